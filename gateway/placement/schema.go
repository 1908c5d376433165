package placement

import (
	"encoding/binary"
	"fmt"
	"time"

	"github.com/hashicorp/go-memdb"

	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

// Tables and indexes. Every key is made here by hand: parts that vary in length
// end with a zero byte, times are eight bytes big-endian, so that the order of
// keys is the order of lists.
const (
	tabHead     = "head"
	tabSessions = "sessions"
	tabKeys     = "keys"
	tabProjects = "projects"
	tabPlans    = "plans"
	tabIdem     = "idem"
	tabAnswers  = "answers"
	tabUsage    = "usage"
	tabMonths   = "months"

	byID            = "id"
	byCreated       = "created"        // sessions: created, id
	byProject       = "project"        // sessions: project, created, id; keys: project, id
	byProjectStatus = "project_status" // sessions: project, status, created, id
	byHost          = "host"           // sessions not ended: host, id
	byDeadline      = "deadline"       // sessions with an open operation: its deadline, id
	byResuming      = "resuming"       // sessions with an open resume: project, id
	bySnapshot      = "snapshot"       // sessions: id of their snapshot
	byPausedEnd     = "paused_end"     // PAUSED sessions: day of paused_expired, id
	byProjectEnd    = "project_end"    // sessions: project, end (those that have not ended last), id
	byHash          = "hash"           // keys
	bySession       = "session"        // idem
	byAge           = "age"            // idem: at, id; answers: index
)

// tables lists all but the head in the order in which snapshots hold them.
var tables = []string{tabPlans, tabProjects, tabKeys, tabSessions, tabIdem, tabAnswers, tabUsage, tabMonths}

// keyOf is an index made by one function; lookups give whole keys or prefixes.
type keyOf func(row any) (key []byte, ok bool)

// FromObject gives the key of a row.
func (f keyOf) FromObject(row any) (bool, []byte, error) {
	key, ok := f(row)
	return ok, key, nil
}

// FromArgs takes the key as bytes.
func (keyOf) FromArgs(args ...any) ([]byte, error) {
	if len(args) != 1 {
		return nil, fmt.Errorf("want one key, not %d", len(args))
	}
	return args[0].([]byte), nil
}

// PrefixFromArgs is the same for the start of a key.
func (f keyOf) PrefixFromArgs(args ...any) ([]byte, error) { return f.FromArgs(args...) }

func index(name string, f keyOf) *memdb.IndexSchema {
	return &memdb.IndexSchema{Name: name, Unique: true, AllowMissing: name != byID, Indexer: f}
}

func table(name string, indexes ...*memdb.IndexSchema) *memdb.TableSchema {
	t := &memdb.TableSchema{Name: name, Indexes: make(map[string]*memdb.IndexSchema)}
	for _, i := range indexes {
		t.Indexes[i.Name] = i
	}
	return t
}

// on makes a keyOf of a function over one row type.
func on[T any](f func(*T) []byte) keyOf {
	return func(row any) ([]byte, bool) {
		key := f(row.(*T))
		return key, key != nil
	}
}

var schema = func() *memdb.DBSchema {
	s := &memdb.DBSchema{Tables: make(map[string]*memdb.TableSchema)}
	for _, t := range []*memdb.TableSchema{
		table(tabHead, index(byID, on(func(*head) []byte { return headKey }))),
		table(tabSessions,
			index(byID, on(func(s *session.Session) []byte { return []byte(s.ID) })),
			index(byCreated, on(func(s *session.Session) []byte { return append(timeKey(s.CreatedAt), s.ID...) })),
			index(byProject, on(func(s *session.Session) []byte { return orderKey(words(s.ProjectID), s) })),
			index(byProjectStatus, on(func(s *session.Session) []byte { return orderKey(words(s.ProjectID, string(s.Status)), s) })),
			index(byHost, on(func(s *session.Session) []byte {
				if s.Status.Ended() {
					return nil
				}
				return append(words(s.Host), s.ID...)
			})),
			index(byDeadline, on(func(s *session.Session) []byte {
				if s.Op == nil {
					return nil
				}
				return append(timeKey(s.Op.Deadline), s.ID...)
			})),
			index(byResuming, on(func(s *session.Session) []byte {
				if s.Op == nil || s.Op.Kind != session.Resume {
					return nil
				}
				return append(words(s.ProjectID), s.ID...)
			})),
			index(bySnapshot, on(func(s *session.Session) []byte {
				if s.Snapshot == nil {
					return nil
				}
				return words(s.Snapshot.ID, s.ID)
			})),
			index(byPausedEnd, on(func(s *session.Session) []byte {
				if s.Status != session.Paused {
					return nil
				}
				return append(timeKey(s.ExpiresAt), s.ID...)
			})),
			index(byProjectEnd, on(func(s *session.Session) []byte { return append(endKey(s.ProjectID, s.EndedAt), s.ID...) })),
		),
		table(tabKeys,
			index(byID, on(func(k *Key) []byte { return []byte(k.ID) })),
			index(byHash, on(func(k *Key) []byte { return []byte(k.Hash) })),
			index(byProject, on(func(k *Key) []byte { return append(words(k.ProjectID), k.ID...) })),
		),
		table(tabProjects, index(byID, on(func(p *Project) []byte { return []byte(p.ID) }))),
		table(tabPlans, index(byID, on(func(p *Plan) []byte { return []byte(p.Name) }))),
		table(tabIdem,
			index(byID, on(func(k *idemKey) []byte { return words(k.ProjectID, k.Key) })),
			index(bySession, on(func(k *idemKey) []byte { return []byte(k.SessionID) })),
			index(byAge, on(func(k *idemKey) []byte { return append(numberKey(uint64(k.At)), words(k.ProjectID, k.Key)...) })),
		),
		table(tabAnswers,
			index(byID, on(func(a *answer) []byte { return []byte(a.ID) })),
			index(byAge, on(func(a *answer) []byte { return numberKey(a.Index) })),
		),
		table(tabUsage, index(byID, on(func(r *proxylink.Row) []byte { return usageKey(*r) }))),
		table(tabMonths, index(byID, on(func(m *month) []byte { return monthKey(m.ProjectID, m.Month) }))),
	} {
		s.Tables[t.Name] = t
	}
	return s
}()

var headKey = []byte("head")

// words joins parts, each ended by a zero byte; apply keeps zero bytes out of
// what clients name.
func words(parts ...string) []byte {
	var b []byte
	for _, p := range parts {
		b = append(append(b, p...), 0)
	}
	return b
}

func timeKey(t time.Time) []byte { return numberKey(uint64(t.UnixNano())) }

func numberKey(n uint64) []byte { return binary.BigEndian.AppendUint64(nil, n) }

// orderKey is prefix, then the place of s in a list by age.
func orderKey(prefix []byte, s *session.Session) []byte {
	return append(append(prefix, timeKey(s.CreatedAt)...), s.ID...)
}
