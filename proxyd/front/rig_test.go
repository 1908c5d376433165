package front

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/proxyd/guard"
	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/refusals"
	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a front with a real guard that may reach 127.0.0.1.
type rig struct {
	t      *testing.T
	secret *trust.Secret
	meter  *meter.Meter
	feed   *refusals.Feed
	server *Server
	addr   string
	stop   context.CancelFunc // what a signal does
	ended  chan struct{}      // closed when Serve returned
}

func newRig(t *testing.T, limit int, drain time.Duration) *rig {
	t.Helper()
	return newRigWith(t, limit, drain, upstream.Config{})
}

func newRigWith(t *testing.T, limit int, drain time.Duration, ups upstream.Config) *rig {
	t.Helper()
	allow, err := egress.ParseAllow("127.0.0.1")
	if err != nil {
		t.Fatal(err)
	}
	ln, err := Listen(context.Background(), "127.71.3.5:0") // where nobody else listens: after a stop nobody is there
	if err != nil {
		t.Fatal(err)
	}
	out := guard.New(egress.Policy{Allow: allow}, &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("no name server in tests")
	}})
	ups.Dialer = out
	upstreams, err := upstream.New(ups)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, secret: trust.New(), meter: meter.New(limit), feed: refusals.New(), addr: ln.Addr().String(), ended: make(chan struct{})}
	var ctx context.Context
	ctx, r.stop = context.WithCancel(context.Background())
	s := New(Config{Secret: r.secret, Guard: out, Upstreams: upstreams, Meter: r.meter, Feed: r.feed, Drain: drain,
		Log: slog.New(slog.NewTextHandler(io.Discard, nil))})
	r.server = s
	go func() {
		defer close(r.ended)
		if err := s.Serve(ctx, ln); err != nil {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		r.stop()
		select {
		case <-r.ended:
		case <-time.After(time.Minute):
			t.Error("Serve did not return")
		}
	})
	return r
}

// dial opens a connection of a session without rules, as hostd does.
func (r *rig) dial(session string) *net.TCPConn {
	r.t.Helper()
	return r.dialWith(session, r.pass(proxylink.Pass{SessionID: session}))
}

// pass seals a pass of project "p", good for a minute where p does not say.
func (r *rig) pass(p proxylink.Pass) []byte {
	r.t.Helper()
	p.ProjectID = "p"
	if p.Expires.IsZero() {
		p.Expires = time.Now().Add(time.Minute)
	}
	sealed, err := proxylink.SealPass(r.secret, p)
	if err != nil {
		r.t.Fatal(err)
	}
	return sealed
}

func (r *rig) dialWith(session string, sealed []byte) *net.TCPConn {
	r.t.Helper()
	conn, err := proxylink.Dial(context.Background(), r.addr, proxylink.Hello{Proof: r.secret.Proof(), Host: "host", SessionID: session, Epoch: 1, Pass: sealed})
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	return conn
}

// connections are a session's open ones; the server's lock is held meanwhile.
func (r *rig) connections(session string) iter.Seq[*client] {
	return func(yield func(*client) bool) {
		r.server.mu.Lock()
		defer r.server.mu.Unlock()
		for c := range r.server.clients {
			if c.hello.SessionID == session && !yield(c) {
				return
			}
		}
	}
}

// counts are a session's.
type counts = meter.Counts

// fed takes the one refusal that host "host" hears of.
func (r *rig) fed() proxylink.Refused {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	lines := newLines(cancel)
	r.feed.ServeHTTP(lines, httptest.NewRequestWithContext(ctx, "GET", "/v1/refusals?host=host", nil))
	var got proxylink.Refused
	if err := json.Unmarshal(lines.first, &got); err != nil {
		r.t.Errorf("%q: %v", lines.first, err)
	}
	return got
}

// lines keeps the first line that is not empty, and ends the stream then.
type lines struct {
	*httptest.ResponseRecorder
	first []byte
	end   func()
}

func newLines(end func()) *lines { return &lines{ResponseRecorder: httptest.NewRecorder(), end: end} }

func (l *lines) SetWriteDeadline(time.Time) error { return nil }

func (l *lines) Write(p []byte) (int, error) {
	if l.first == nil && len(bytes.TrimSpace(p)) > 0 {
		l.first = append([]byte(nil), p...)
		l.end()
	}
	return len(p), nil
}

// client speaks HTTP through the proxy, one connection kept alive.
func (r *rig) client(session string) *http.Client {
	proxy, _ := url.Parse("http://proxy.invalid:3128")
	tr := &http.Transport{Proxy: http.ProxyURL(proxy), MaxConnsPerHost: 1, DisableCompression: true,
		DialContext: func(context.Context, string, string) (net.Conn, error) { return r.dial(session), nil }}
	r.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: time.Minute}
}

// billed are the bytes in the ledger, all of project "p" and one type.
func (r *rig) billed(kind egress.Type) (up, down int64) {
	r.t.Helper()
	for _, row := range r.meter.Rows() { // two where the hour changed meanwhile
		if row.Type != kind || row.ProjectID != "p" {
			r.t.Errorf("a row of another kind: %+v", row)
		}
		up, down = up+row.Up, down+row.Down
	}
	return up, down
}

// settled waits until a session has no open connection.
func (r *rig) settled(session string) meter.Counts {
	r.t.Helper()
	return r.until(session, func(c meter.Counts) bool { return c.Open == 0 })
}

func (r *rig) until(session string, ok func(meter.Counts) bool) meter.Counts {
	r.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		c := r.meter.Session(session)
		if ok(c) {
			return c
		}
		if time.Now().After(deadline) {
			r.t.Fatalf("counts stay at %+v", c)
		}
	}
}

// serveTCP runs handle for each connection to a new loopback address.
func serveTCP(t *testing.T, handle func(*net.TCPConn)) string {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var open sync.WaitGroup
	open.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_ = conn.SetDeadline(time.Now().Add(time.Minute))
			open.Go(func() {
				defer conn.Close()
				handle(conn.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() { ln.Close(); open.Wait() })
	return ln.Addr().String()
}

func echo(t *testing.T) string {
	return serveTCP(t, func(c *net.TCPConn) { _, _ = io.Copy(c, c) })
}

func portOf(t *testing.T, addr string) uint16 {
	t.Helper()
	_, p, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	n, _ := strconv.Atoi(p)
	return uint16(n)
}

// nobody is an address where nobody listens, and that nobody takes meanwhile.
func nobody(t *testing.T) string {
	t.Helper()
	s, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = syscall.Close(s) })
	if err := syscall.Bind(s, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	bound, err := syscall.Getsockname(s)
	if err != nil {
		t.Fatal(err)
	}
	return net.JoinHostPort("127.0.0.1", strconv.Itoa(bound.(*syscall.SockaddrInet4).Port))
}

// send writes a raw request and reads one response.
func send(t *testing.T, conn net.Conn, raw string) *http.Response {
	t.Helper()
	if _, err := io.WriteString(conn, raw); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("%.80q: %v", raw, err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}
