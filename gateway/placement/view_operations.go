package placement

import (
	"time"

	"github.com/berth-dev/berth/shared/session"
)

// Operations lists the sessions with an open operation, the earliest deadline
// first.
func (v *View) Operations() []session.Session {
	var all []session.Session
	for s := range rows[*session.Session](v, tabSessions, byDeadline, nil) {
		all = append(all, *s)
	}
	return all
}

// PausedOver lists the sessions whose time to stay paused is over at now, but
// for those that are being resumed.
func (v *View) PausedOver(now time.Time) []session.Session {
	var all []session.Session
	for s := range rows[*session.Session](v, tabSessions, byPausedEnd, nil) {
		if s.ExpiresAt.After(now) {
			break
		}
		if s.Op == nil {
			all = append(all, *s)
		}
	}
	return all
}

// SessionOfSnapshot finds the session that refers to a snapshot: as its last
// capture, or as what an open operation captures.
func (v *View) SessionOfSnapshot(id string) (session.Session, bool) {
	for s := range rows[*session.Session](v, tabSessions, bySnapshot, words(id)) {
		return *s, true
	}
	for s := range rows[*session.Session](v, tabSessions, byDeadline, nil) {
		if s.Op.SnapshotID == id {
			return *s, true
		}
	}
	return session.Session{}, false
}
