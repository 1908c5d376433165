// Package meter counts sessions' bytes and bounds their open connections.
//
// Counters are cumulative for the life of this process, payload only: what
// follows the answer to CONNECT or SOCKS, and whole plain-HTTP messages.
package meter

import (
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
)

// forgetAfter is when the counters of a session without connections go: none
// lives longer than a day (spec "Plan limits").
const forgetAfter = 25 * time.Hour

var (
	upTotal   = daemon.Counter(`berth_proxyd_bytes_total{direction="up"}`)
	downTotal = daemon.Counter(`berth_proxyd_bytes_total{direction="down"}`)
)

// Counts are the cumulative numbers of one session.
type Counts struct {
	Up          int64 `json:"up"`   // bytes from the session
	Down        int64 `json:"down"` // bytes to the session
	Connections int64 `json:"connections"`
	Open        int   `json:"open"`
}

// Meter keeps all sessions' counters. Safe for concurrent use.
type Meter struct {
	limit int

	mu       sync.Mutex
	sessions map[string]*entry
	open     int
	swept    time.Time
}

// entry is one session; open, connections and last are guarded by Meter.mu.
type entry struct {
	up, down    atomic.Int64
	open        int
	connections int64
	last        time.Time
}

// New makes a meter that lets limit connections of a session be open at once.
func New(limit int) *Meter {
	return &Meter{limit: limit, sessions: map[string]*entry{}, swept: time.Now()}
}

// Conn counts one connection until Close.
type Conn struct {
	m         *Meter
	e         *entry
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
		e = &entry{}
		m.sessions[sessionID] = e
	}
	e.last = now
	if e.open >= m.limit {
		return nil, egress.Refuse(egress.TooManyConnections, "the session has %d connections open, which is the limit", m.limit)
	}
	e.open++
	e.connections++
	m.open++
	return &Conn{m: m, e: e}, nil
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
// HTTP has several, also at once: each request is routed anew.
type Flow struct{ c *Conn }

// Via says through which type of proxy bytes go: None is straight out.
func (c *Conn) Via(egress.Type) *Flow { return &Flow{c} }

// Up counts bytes from the session.
func (f *Flow) Up(n int64) {
	f.c.up.Add(n)
	f.c.e.up.Add(n)
	upTotal.AddInt64(n)
}

// Down counts bytes to the session.
func (f *Flow) Down(n int64) {
	f.c.down.Add(n)
	f.c.e.down.Add(n)
	downTotal.AddInt64(n)
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
