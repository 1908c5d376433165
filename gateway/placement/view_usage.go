package placement

import (
	"iter"
	"time"

	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

// PlatformBytes is what a project's sessions carried through the platform's
// proxies in the calendar month (UTC) of at, both ways: what its plan's allowance
// counts. The record hears of bytes a second or two after they went.
func (v *View) PlatformBytes(projectID string, at time.Time) int64 {
	m := first[month](v.txn, tabMonths, byID, monthKey(projectID, monthOf(at)))
	if m == nil {
		return 0
	}
	return m.Platform
}

// UsageRows walks the rows of a session's proxy data, those of a type together
// and in the order of their hours. They must not be written to.
func (v *View) UsageRows(sessionID string) iter.Seq[*proxylink.Row] {
	return rows[*proxylink.Row](v, tabUsage, byID, words(sessionID))
}

// SessionsSince walks a project's sessions but for those that ended before
// from. They must not be written to.
func (v *View) SessionsSince(project string, from time.Time) iter.Seq[*session.Session] {
	return func(yield func(*session.Session) bool) {
		if from.Before(time.Unix(0, 1)) {
			from = time.Unix(0, 1) // a key counts from 1970
		}
		it, err := v.txn.LowerBound(tabSessions, byProjectEnd, endKey(project, from))
		must(err)
		for row := it.Next(); row != nil; row = it.Next() {
			s := row.(*session.Session)
			if s.ProjectID != project || !yield(s) {
				return
			}
		}
	}
}

// Projects walks all projects by id.
func (v *View) Projects() iter.Seq[*Project] { return rows[*Project](v, tabProjects, byID, nil) }
