package meter

import (
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// track is where a session's bytes of one type are booked. Flows use it without
// a lock but for the first byte of an hour.
type track struct {
	m    *Meter
	e    *entry
	row  proxylink.Row // its session, project, type and incarnation
	cell atomic.Pointer[cell]
}

type trackKey struct {
	project string
	typ     egress.Type
}

// cell is one hour of a track.
type cell struct {
	hour     int64
	up, down atomic.Int64
}

// track finds or makes a connection's track of a type.
func (m *Meter) track(c *Conn, typ egress.Type) *track {
	m.mu.Lock()
	defer m.mu.Unlock()
	key := trackKey{c.projectID, typ}
	t := c.e.tracks[key]
	if t == nil {
		t = &track{m: m, e: c.e, row: proxylink.Row{SessionID: c.sessionID, ProjectID: c.projectID, Type: typ, Incarnation: m.incarnation}}
		m.begin(t)
		c.e.tracks[key] = t
	}
	return t
}

// now gives the cell of this hour.
func (t *track) now() *cell {
	c := t.cell.Load()
	if hourNow() <= c.hour {
		return c
	}
	t.m.mu.Lock()
	defer t.m.mu.Unlock()
	return t.m.begin(t)
}

// begin gives a track the cell of the hour, unless it has that; m.mu is held. A
// cell that was left keeps its row, and may still get bytes of a flow that was
// about to count them: so rows stay while the session has connections.
func (m *Meter) begin(t *track) *cell {
	m.hour = max(m.hour, hourNow())
	if c := t.cell.Load(); c != nil && c.hour >= m.hour {
		return c
	}
	fresh := t.row
	fresh.Hour = m.hour
	r := m.rows[keyOf(fresh)]
	if r == nil {
		r = &row{Row: fresh, cell: &cell{hour: fresh.Hour}}
		m.rows[keyOf(fresh)] = r
	}
	r.track = t
	t.cell.Store(r.cell)
	return r.cell
}

// hourNow is the hour of the clock, counted from 1970 UTC.
func hourNow() int64 { return time.Now().Unix() / 3600 }
