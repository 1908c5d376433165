package meter

import (
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// row is a row of the ledger as the last scan saw it.
type row struct {
	proxylink.Row
	cell    *cell  // nil: of an earlier incarnation, at its last value
	track   *track // that counts, or counted, into the cell
	version uint64 // of the last change; 0: no byte yet
	acked   bytes  // what the record has
	saved   bytes  // what the file has
	inFile  bool
}

type bytes struct{ up, down int64 }

// rowKey is what two rows that merge have in common.
type rowKey struct {
	session, incarnation string
	typ                  egress.Type
	hour                 int64
}

func keyOf(r proxylink.Row) rowKey { return rowKey{r.SessionID, r.Incarnation, r.Type, r.Hour} }

func (r *row) bytes() bytes { return bytes{r.Up, r.Down} }

func (r *row) acknowledged() bool { return r.acked.up >= r.Up && r.acked.down >= r.Down }

// Rows gives every row that is not acknowledged, as of now.
func (m *Meter) Rows() []proxylink.Row {
	rows, _ := m.Changed(0)
	return rows
}

// Changed gives the rows that changed after a version that an earlier call gave,
// 0 for none, and are not acknowledged; and the version for the next call.
func (m *Meter) Changed(since uint64) (rows []proxylink.Row, version uint64) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.scan()
	for _, r := range m.rows {
		if r.version > since && !r.acknowledged() {
			rows = append(rows, r.Row)
		}
	}
	return rows, m.version
}

// Acknowledge takes the record's word that it has these rows at these values.
func (m *Meter) Acknowledge(rows []proxylink.Row) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, has := range rows {
		if r := m.rows[keyOf(has)]; r != nil {
			r.acked = bytes{max(r.acked.up, has.Up), max(r.acked.down, has.Down)}
		}
	}
	m.scan()
}

// scan brings the rows up to date with their cells and drops those that nobody
// needs any more; m.mu is held.
func (m *Meter) scan() {
	m.hour = max(m.hour, hourNow())
	changed := m.version + 1
	for key, r := range m.rows {
		if r.cell != nil {
			if now := (bytes{r.cell.up.Load(), r.cell.down.Load()}); now != r.bytes() {
				r.Up, r.Down, r.version = now.up, now.down, changed
				m.version = changed
			}
		}
		if r.acknowledged() && m.over(r) {
			m.drop(key, r)
		}
	}
}

// over says whether a row cannot grow any more.
func (m *Meter) over(r *row) bool {
	return r.cell == nil || r.Hour < m.hour && r.track.e.open == 0
}

// drop forgets a row. Its track goes too, where the row was its latest: the
// session's next connection makes one with a row of its own.
func (m *Meter) drop(key rowKey, r *row) {
	delete(m.rows, key)
	if r.inFile {
		m.gone = append(m.gone, key)
	}
	if t := r.track; t != nil && t.cell.Load() == r.cell {
		delete(t.e.tracks, trackKey{t.row.ProjectID, t.row.Type})
	}
}

// adopt takes in the rows that a file has.
func (m *Meter) adopt(rows []proxylink.Row) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.version++
	for _, old := range rows {
		r := &row{Row: old, version: m.version, inFile: true}
		r.saved = r.bytes()
		m.rows[keyOf(old)] = r
	}
}

// unsaved gives the rows that the file has not at their present values, and
// what it has no need of any more.
func (m *Meter) unsaved() (rows []proxylink.Row, gone []rowKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.scan()
	for _, r := range m.rows {
		if r.saved != r.bytes() {
			rows = append(rows, r.Row)
		}
	}
	return rows, m.gone
}

// written notes what unsaved gave as done.
func (m *Meter) written(rows []proxylink.Row, gone []rowKey) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.gone = m.gone[len(gone):]
	for _, in := range rows {
		r := m.rows[keyOf(in)]
		if r == nil { // dropped while it was written
			m.gone = append(m.gone, keyOf(in))
			continue
		}
		r.saved, r.inFile = bytes{in.Up, in.Down}, true
	}
}
