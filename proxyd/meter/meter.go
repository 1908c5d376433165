// Package meter counts sessions' bytes, bounds their open connections and keeps
// the ledger of their proxy data.
//
// What counts is payload: what follows the answer to CONNECT or SOCKS, and whole
// plain-HTTP messages. Every byte is in Counts and in the metrics; bytes through
// a proxy are in the ledger too, one row for each session, project, type of proxy
// and UTC hour.
//
//	Conn.Via ─▶ Flow.Up, Down ─▶ cell of the hour ─▶ row ─▶ Ledger: file, each second and at a stop
//	                                                  └─▶ Rows, Changed: the gateway's record ─▶ Acknowledge
//
// Rows are cumulative, and each start of proxyd is an incarnation with rows of
// its own: the record merges equal keys by maximum, so a row may be told twice,
// late or out of order and no sum moves. A row stays, here and in the file,
// until the record has acknowledged its last value, its hour is over and the
// session has no connection open; the rows of earlier incarnations, until they
// are acknowledged. What kill -9 may take are the bytes since the last flush that
// no gateway has heard of: a second's worth.
//
// A byte is booked in the hour in which it is counted. A clock that is set back
// does not take hours back: bytes then stay in the latest hour begun.
//
// Memory and file hold one row of some 300 bytes for each session, type and hour
// that is not acknowledged, and those of the sessions connected now.
package meter

import (
	"crypto/rand"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
)

// forgetAfter is when the counters of a session without connections go: none
// lives longer than a day (spec "Plan limits").
const forgetAfter = 25 * time.Hour

// totals are the metrics of one type.
type totals struct{ up, down interface{ AddInt64(int64) } }

var totalsOf = func() map[egress.Type]totals {
	all := map[egress.Type]totals{}
	for _, t := range []egress.Type{egress.None, egress.Residential, egress.Datacenter, egress.Custom} {
		all[t] = totals{daemon.Counter(`berth_proxyd_bytes_total{direction="up",type="` + string(t) + `"}`),
			daemon.Counter(`berth_proxyd_bytes_total{direction="down",type="` + string(t) + `"}`)}
	}
	return all
}()

// Counts are the cumulative numbers of one session in this run of proxyd.
type Counts struct {
	Up          int64 `json:"up"`   // bytes from the session
	Down        int64 `json:"down"` // bytes to the session
	Connections int64 `json:"connections"`
	Open        int   `json:"open"`
}

// Meter keeps all sessions' counters. Safe for concurrent use.
type Meter struct {
	limit       int
	incarnation string

	mu       sync.Mutex // guards what follows
	sessions map[string]*entry
	open     int
	swept    time.Time
	rows     map[rowKey]*row
	gone     []rowKey // dropped, but still in the file
	hour     int64    // the latest one begun
	version  uint64   // of the last change that a scan saw
}

// entry is one session; all but up and down is guarded by Meter.mu.
type entry struct {
	up, down    atomic.Int64
	open        int
	connections int64
	last        time.Time
	tracks      map[trackKey]*track
}

// New makes a meter that lets limit connections of a session be open at once.
// Its rows live as long as the process: Keep gives them a file.
func New(limit int) *Meter {
	return &Meter{limit: limit, incarnation: rand.Text(), sessions: map[string]*entry{}, rows: map[rowKey]*row{}, swept: time.Now()}
}

// Conn counts one connection until Close.
type Conn struct {
	m         *Meter
	e         *entry
	sessionID string
	projectID string
	up, down  atomic.Int64
	closeOnce sync.Once
}

// Open books a connection of a project's session. Beyond the limit the result
// is nil and a refusal with too_many_connections.
func (m *Meter) Open(sessionID, projectID string) (*Conn, error) {
	now := time.Now()
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sweep(now)
	e := m.sessions[sessionID]
	if e == nil {
		e = &entry{tracks: map[trackKey]*track{}}
		m.sessions[sessionID] = e
	}
	e.last = now
	if e.open >= m.limit {
		return nil, egress.Refuse(egress.TooManyConnections, "the session has %d connections open, which is the limit", m.limit)
	}
	e.open++
	e.connections++
	m.open++
	return &Conn{m: m, e: e, sessionID: sessionID, projectID: projectID}, nil
}

// sweep forgets old sessions, once an hour; m.mu is held.
func (m *Meter) sweep(now time.Time) {
	if now.Sub(m.swept) < time.Hour {
		return
	}
	m.swept = now
	for id, e := range m.sessions {
		if e.open == 0 && now.Sub(e.last) > forgetAfter {
			delete(m.sessions, id)
		}
	}
}

// Flow counts what a connection carries one way out. A connection with plain
// HTTP has several, also at once: each request is routed anew. None counts after
// the connection's Close.
type Flow struct {
	c     *Conn
	total totals
	track *track // nil: straight out, which is not proxy data
}

// Via says through which type of proxy bytes go: None is straight out.
func (c *Conn) Via(t egress.Type) *Flow {
	f := &Flow{c: c, total: totalsOf[egress.None]}
	if t.Proxied() {
		f.total, f.track = totalsOf[t], c.m.track(c, t)
	}
	return f
}

// Up counts bytes from the session.
func (f *Flow) Up(n int64) {
	f.c.up.Add(n)
	f.c.e.up.Add(n)
	f.total.up.AddInt64(n)
	if f.track != nil {
		f.track.now().up.Add(n)
	}
}

// Down counts bytes to the session.
func (f *Flow) Down(n int64) {
	f.c.down.Add(n)
	f.c.e.down.Add(n)
	f.total.down.AddInt64(n)
	if f.track != nil {
		f.track.now().down.Add(n)
	}
}

// Bytes gives what this connection carried so far.
func (c *Conn) Bytes() (up, down int64) { return c.up.Load(), c.down.Load() }

// Close gives the connection's place free. Idempotent.
func (c *Conn) Close() {
	c.closeOnce.Do(func() {
		c.m.mu.Lock()
		defer c.m.mu.Unlock()
		c.e.open--
		c.e.last = time.Now()
		c.m.open--
	})
}

// Session gives a session's counts, zero for one never seen.
func (m *Meter) Session(id string) Counts {
	m.mu.Lock()
	defer m.mu.Unlock()
	e := m.sessions[id]
	if e == nil {
		return Counts{}
	}
	return Counts{Up: e.up.Load(), Down: e.down.Load(), Connections: e.connections, Open: e.open}
}

// OpenConnections is how many connections of all sessions are open.
func (m *Meter) OpenConnections() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.open
}
