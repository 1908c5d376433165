package placement

import (
	"encoding/base64"
	"encoding/json"
	"iter"

	"github.com/hashicorp/go-memdb"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// View is the record at one moment. It never changes and may be kept and read
// by many at once; what its methods return must not be written to where it
// is a slice (UserMetadata, SigningKey).
type View struct {
	txn  *memdb.Txn
	head *head
}

// View gives the record as it is here and now. On a miss see Fresh.
func (r *Record) View() *View { return r.state.View() }

// View gives the state of this moment.
func (s *State) View() *View {
	txn := s.db.Txn(false)
	return &View{txn, first[head](txn, tabHead, byID, headKey)}
}

// Index is that of the last command in the view.
func (v *View) Index() uint64 { return v.head.Index }

// SigningKey is the cluster's 32-byte key for signed URLs; empty before the
// first leader.
func (v *View) SigningKey() []byte { return v.head.SigningKey }

// Session finds a session by id.
func (v *View) Session(id string) (session.Session, bool) {
	return found(first[session.Session](v.txn, tabSessions, byID, []byte(id)))
}

// MadeWith finds the session that a project made with an idempotency key that
// still holds.
func (v *View) MadeWith(project, key string) (session.Session, bool) {
	return found(idempotent(v.txn, v.head.Clock, project, key))
}

// WatchSession finds a session and gives a channel that closes when it may
// have changed, or appeared; then ask a new view.
func (v *View) WatchSession(id string) (_ session.Session, ok bool, changed <-chan struct{}) {
	changed, row, err := v.txn.FirstWatch(tabSessions, byID, []byte(id))
	must(err)
	p, _ := row.(*session.Session)
	s, ok := found(p)
	return s, ok, changed
}

// Running counts a project's RUNNING sessions: the very set that the list with
// that status shows and that the limit counts.
func (v *View) Running(project string) int { return running(v.txn, project) }

// Counted is what the limit counts: Running, and the sessions that are being
// resumed.
func (v *View) Counted(project string) int { return counted(v.txn, project) }

// SessionsOnHost lists the sessions of a host that have not ended: those that
// run there, and those whose snapshot is there.
func (v *View) SessionsOnHost(host string) []session.Session {
	var all []session.Session
	for s := range rows[*session.Session](v, tabSessions, byHost, words(host)) {
		all = append(all, *s)
	}
	return all
}

// HostNames lists the hosts that have sessions which have not ended.
func (v *View) HostNames() []string {
	var names []string
	for s := range rows[*session.Session](v, tabSessions, byHost, nil) {
		if len(names) == 0 || names[len(names)-1] != s.Host {
			names = append(names, s.Host)
		}
	}
	return names
}

// KeyByHash finds an API key, revoked or not, by token.APIKey.Hash. The lookup
// is of a hash of a random secret: its timing tells nothing of the secret.
func (v *View) KeyByHash(hash string) (Key, bool) {
	return found(first[Key](v.txn, tabKeys, byHash, []byte(hash)))
}

// Keys lists a project's API keys, or all for an empty project, revoked ones
// included.
func (v *View) Keys(project string) []Key {
	var prefix []byte
	if project != "" {
		prefix = words(project)
	}
	var all []Key
	for k := range rows[*Key](v, tabKeys, byProject, prefix) {
		all = append(all, *k)
	}
	return all
}

// Project finds a project by id.
func (v *View) Project(id string) (Project, bool) {
	return found(first[Project](v.txn, tabProjects, byID, []byte(id)))
}

// Plan finds a plan by name.
func (v *View) Plan(name string) (Plan, bool) {
	return found(first[Plan](v.txn, tabPlans, byID, []byte(name)))
}

// Plans lists all plans by name.
func (v *View) Plans() []Plan {
	var all []Plan
	for p := range rows[*Plan](v, tabPlans, byID, nil) {
		all = append(all, *p)
	}
	return all
}

// Filter chooses sessions; empty fields choose all.
type Filter struct {
	Project  string
	Status   session.Status
	Region   string
	Metadata map[string]string // top-level keys of userMetadata; numbers and booleans as JSON writes them
	Cursor   string            // nextCursor of the page before
	Limit    int               // 0: no limit
}

// Sessions lists what f chooses, newest first. next is the cursor of the next
// page, empty after the last. A cursor that is none of ours: invalid_request.
func (v *View) Sessions(f Filter) (page []session.Session, next string, err error) {
	index, prefix := byCreated, []byte(nil)
	switch {
	case f.Project != "" && f.Status != "":
		index, prefix = byProjectStatus, words(f.Project, string(f.Status))
	case f.Project != "":
		index, prefix = byProject, words(f.Project)
	}
	before, err := parseCursor(f.Cursor)
	if err != nil {
		return nil, "", err
	}
	for s := range v.backwards(index, prefix, before) {
		if !f.chooses(s) {
			continue
		}
		if f.Limit > 0 && len(page) == f.Limit {
			return page, formatCursor(&page[len(page)-1]), nil
		}
		page = append(page, *s)
	}
	return page, "", nil
}

// backwards walks the sessions of an index whose keys start with prefix, from
// the last below before, nil meaning from the end.
func (v *View) backwards(index string, prefix, before []byte) iter.Seq[*session.Session] {
	return func(yield func(*session.Session) bool) {
		start := append(append([]byte(nil), prefix...), before...)
		if before == nil {
			start = append(start, 0xff) // above every time until the year 2262
		}
		it, err := v.txn.ReverseLowerBound(tabSessions, index, start)
		must(err)
		for row := it.Next(); row != nil; row = it.Next() {
			s := row.(*session.Session)
			key := orderKey(nil, s)
			if before != nil && string(key) == string(before) {
				continue // the cursor's own session was on the page before
			}
			if !inPrefix(index, prefix, s) || !yield(s) {
				return
			}
		}
	}
}

func inPrefix(index string, prefix []byte, s *session.Session) bool {
	switch index {
	case byProject:
		return string(words(s.ProjectID)) == string(prefix)
	case byProjectStatus:
		return string(words(s.ProjectID, string(s.Status))) == string(prefix)
	}
	return true
}

func (f Filter) chooses(s *session.Session) bool {
	if f.Status != "" && s.Status != f.Status || f.Region != "" && s.Region != f.Region {
		return false
	}
	if len(f.Metadata) == 0 {
		return true
	}
	var meta map[string]json.RawMessage
	if json.Unmarshal(s.UserMetadata, &meta) != nil {
		return false
	}
	for key, want := range f.Metadata {
		raw, ok := meta[key]
		if !ok {
			return false
		}
		var text string
		if json.Unmarshal(raw, &text) != nil || raw[0] != '"' {
			text = string(raw)
		}
		if text != want {
			return false
		}
	}
	return true
}

func formatCursor(s *session.Session) string {
	return base64.RawURLEncoding.EncodeToString(orderKey(nil, s))
}

func parseCursor(cursor string) ([]byte, error) {
	if cursor == "" {
		return nil, nil
	}
	key, err := base64.RawURLEncoding.DecodeString(cursor)
	if err != nil || len(key) <= 8 {
		return nil, apierr.New(apierr.InvalidRequest, "cursor is not one that a list returned: leave it out to start from the newest")
	}
	return key, nil
}

func running(txn *memdb.Txn, project string) int {
	return length(txn, byProjectStatus, words(project, string(session.Running)))
}

func counted(txn *memdb.Txn, project string) int {
	return running(txn, project) + length(txn, byResuming, words(project))
}

// length counts the sessions whose key in index starts with prefix.
func length(txn *memdb.Txn, index string, prefix []byte) int {
	it, err := txn.Get(tabSessions, index+"_prefix", prefix)
	must(err)
	n := 0
	for it.Next() != nil {
		n++
	}
	return n
}

// first finds the row of a key, or nil.
func first[T any](txn *memdb.Txn, table, index string, key []byte) *T {
	row, err := txn.First(table, index, key)
	must(err)
	p, _ := row.(*T)
	return p
}

func found[T any](p *T) (T, bool) {
	if p == nil {
		var none T
		return none, false
	}
	return *p, true
}

// rows walks the rows whose key in index starts with prefix, in order.
func rows[T any](v *View, table, index string, prefix []byte) iter.Seq[T] {
	return func(yield func(T) bool) {
		if prefix == nil {
			prefix = []byte{}
		}
		it, err := v.txn.Get(table, index+"_prefix", prefix)
		must(err)
		for row := it.Next(); row != nil; row = it.Next() {
			if !yield(row.(T)) {
				return
			}
		}
	}
}
