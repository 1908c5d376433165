package api

import (
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
)

// measures are the server's counters; a name is formatted once.
type measures struct {
	requests sync.Map // requestKey → counter
	seconds  sync.Map // operation → histogram
}

type requestKey struct {
	op     string
	status int
}

type counter interface{ Inc() }

type histogram interface{ Update(seconds float64) }

// openSockets counts the relayed WebSockets of the process.
var openSockets atomic.Int64

func newMeasures() *measures {
	daemon.Gauge("berth_api_open_sockets", func() float64 { return float64(openSockets.Load()) })
	return &measures{}
}

func (m *measures) request(op string, status int, took time.Duration) {
	key := requestKey{op, status}
	c, ok := m.requests.Load(key)
	if !ok {
		c, _ = m.requests.LoadOrStore(key, counter(daemon.Counter(fmt.Sprintf(`berth_api_requests_total{operation=%q,status="%d"}`, op, status))))
	}
	c.(counter).Inc()
	h, ok := m.seconds.Load(op)
	if !ok {
		h, _ = m.seconds.LoadOrStore(op, histogram(daemon.Histogram(fmt.Sprintf(`berth_api_request_seconds{operation=%q}`, op))))
	}
	h.(histogram).Update(took.Seconds())
}

func (c *call) opID() string {
	if c.op == nil {
		return "none"
	}
	return c.op.ID
}

// measure counts the call and writes its access line. The query stays out of
// it: it may hold a token.
func (c *call) measure() {
	took := time.Since(c.began)
	status := c.rc.Response.StatusCode()
	c.srv.metrics.request(c.opID(), status, took)
	c.srv.cfg.Log.Debug("request", "request", c.id, "operation", c.opID(), "method", string(c.rc.Method()),
		"path", strings.Clone(string(c.rc.Path())), "status", status, "took", took, "project", c.caller.ProjectID)
}
