// Package eventlog keeps the event logs of a host's sessions (contract:
// shared/event) in one bbolt file: numbered, bounded, readable while they
// grow, and for a week after the session's end.
package eventlog

import (
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/store"
)

const (
	logs  = "events" // events/<session>: the log
	heads = "heads"  // <session> → head

	quiet = 15 * time.Second // Follow yields a zero event after that long without one
)

// head is what is known of a log beside its events.
type head struct {
	Notice uint64    `json:"notice"` // highest agent notice stored
	Ended  time.Time `json:"ended"`  // zero while more may come
	Gone   time.Time `json:"gone"`   // since then another host goes on with the log; zero: it is here
}

// Log is all logs of this host. All methods may be called at once.
type Log struct {
	db *store.DB

	mu      sync.Mutex         // guards waiting
	waiting map[string]*waiter // by session, while somebody follows it
}

// waiter is where the followers of one log wait.
type waiter struct {
	followers int
	changed   chan struct{} // closed and replaced at each change
}

// New uses an open file, whose other buckets it leaves alone.
func New(db *store.DB) *Log { return &Log{db: db, waiting: map[string]*waiter{}} }

// Append adds an event; Seq is set here, and At if it is zero. A finished log
// takes none.
func (l *Log) Append(sessionID string, e event.Event) error { return l.append(sessionID, 0, e, false) }

// AppendNotice adds an event that the agent numbered n, unless a notice of
// that number or a higher one was stored before.
func (l *Log) AppendNotice(sessionID string, n uint64, e event.Event) error {
	return l.append(sessionID, n, e, false)
}

// Finish adds the last event, in one step with the word that nothing more will
// come. On a finished log it does nothing.
func (l *Log) Finish(sessionID string, last event.Event) error {
	return l.append(sessionID, 0, last, true)
}

func (l *Log) append(sessionID string, notice uint64, e event.Event, last bool) error {
	if e.At.IsZero() {
		e.At = time.Now()
	}
	e.At = e.At.UTC().Truncate(time.Millisecond)
	e = fit(e)
	err := l.db.Batch(func(tx *store.Tx) error {
		var h head
		if _, err := tx.Get(heads, sessionID, &h); err != nil {
			return err
		}
		if notice != 0 && notice <= h.Notice || !h.Ended.IsZero() || !h.Gone.IsZero() {
			return nil
		}
		h.Notice = max(h.Notice, notice)
		if last {
			h.Ended = e.At
		}
		if err := tx.Put(heads, sessionID, h); err != nil {
			return err
		}
		if _, err := tx.Append(logs+"/"+sessionID, func(seq uint64) any { e.Seq = seq; return e }); err != nil {
			return err
		}
		_, err := tx.DropOldest(logs+"/"+sessionID, event.MaxPerSession)
		return err
	})
	if err != nil {
		return fmt.Errorf("append event: %w", err)
	}
	l.wake(sessionID)
	return nil
}

// fit cuts an event that is too large: its data goes first, then its text.
func fit(e event.Event) event.Event {
	size := func() int { b, _ := json.Marshal(e); return len(b) }
	if size() <= event.MaxEventBytes {
		return e
	}
	e.Data = json.RawMessage(`{"truncated":true}`)
	if size() > event.MaxEventBytes {
		for _, field := range []*string{&e.Text, &e.URL, &e.Level, &e.TabID} {
			*field = event.Cut(*field, 512) // in JSON at most six times as long
		}
	}
	return e
}

// LastNotice is the highest agent notice stored for a session, 0 for none.
func (l *Log) LastNotice(sessionID string) uint64 {
	h, _ := l.head(sessionID)
	return h.Notice
}

func (l *Log) head(sessionID string) (h head, found bool) {
	_ = l.db.View(func(tx *store.Tx) (err error) { // an unreadable head is none
		found, err = tx.Get(heads, sessionID, &h)
		return err
	})
	return h, found
}

// Unfinished names the logs to which more may come.
func (l *Log) Unfinished() (ids []string, err error) {
	err = l.db.View(func(tx *store.Tx) error {
		return scan(tx, func(id string, h head) {
			if h.Ended.IsZero() && h.Gone.IsZero() {
				ids = append(ids, id)
			}
		})
	})
	return ids, err
}

// scan goes through the heads of all logs.
func scan(tx *store.Tx, each func(id string, h head)) error {
	return tx.Scan(heads, "", func(id string, raw json.RawMessage) error {
		var h head
		if err := json.Unmarshal(raw, &h); err != nil {
			return fmt.Errorf("log %s: %w", id, err)
		}
		each(id, h)
		return nil
	})
}

// Forget removes the logs of sessions that ended before a moment, and the marks
// of those that left before it.
func (l *Log) Forget(before time.Time) error {
	return l.db.Update(func(tx *store.Tx) error {
		var old []string
		err := scan(tx, func(id string, h head) {
			if over := latest(h.Ended, h.Gone); !over.IsZero() && over.Before(before) {
				old = append(old, id)
			}
		})
		for _, id := range old {
			if err == nil {
				err = tx.Drop(logs + "/" + id)
			}
			if err == nil {
				err = tx.Delete(heads, id)
			}
		}
		return err
	})
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// Page reads up to limit events after a seq (1 to event.MaxPage); types empty
// means all.
func (l *Log) Page(sessionID string, after uint64, types []event.Type, limit int) (hostlink.EventPage, error) {
	limit = min(max(limit, 1), event.MaxPage)
	page := hostlink.EventPage{Data: []event.Event{}, NextAfter: after}
	err := l.db.View(func(tx *store.Tx) error {
		var h head
		if _, err := tx.Get(heads, sessionID, &h); err != nil {
			return err
		}
		if !h.Gone.IsZero() {
			return errGone
		}
		return tx.After(logs+"/"+sessionID, after, func(seq uint64, raw json.RawMessage) (bool, error) {
			var e event.Event
			if err := json.Unmarshal(raw, &e); err != nil {
				return false, fmt.Errorf("event %d of %s: %w", seq, sessionID, err)
			}
			if len(types) == 0 || slices.Contains(types, e.Type) {
				page.Data = append(page.Data, e)
			}
			page.NextAfter = seq // those the filter left out are passed too
			return len(page.Data) < limit, nil
		})
	})
	return page, err
}

// Follow yields events after a seq as they come, hostlink.FromNow for those
// still to come, and a zero Event after a while without any. It ends after the
// last event of an ended session, and at once for a session without a log; an
// error, ctx's too, says that there may be more, perhaps on another host.
func (l *Log) Follow(ctx context.Context, sessionID string, after uint64, types []event.Type) iter.Seq2[event.Event, error] {
	return func(yield func(event.Event, error) bool) {
		defer l.follow(sessionID)()
		after := min(after, l.Last(sessionID)) // FromNow, and what was never reached
		for {
			changed := l.changed(sessionID) // before the look, so that nothing falls between
			h, found := l.head(sessionID)
			page, err := l.Page(sessionID, after, types, followPage)
			if err != nil {
				yield(event.Event{}, err)
				return
			}
			for _, e := range page.Data {
				if !yield(e, nil) {
					return
				}
			}
			more := page.NextAfter > after
			after = page.NextAfter
			switch {
			case more:
			case !found || !h.Ended.IsZero():
				return
			case pause(ctx, changed):
			case ctx.Err() != nil:
				yield(event.Event{}, context.Cause(ctx))
				return
			case !yield(event.Event{}, nil):
				return
			}
		}
	}
}

// followPage bounds what a follower holds in memory, in events.
const followPage = 64

// pause waits for a change; false when none came within quiet, or ctx ended.
func pause(ctx context.Context, changed <-chan struct{}) bool {
	t := time.NewTimer(quiet)
	defer t.Stop()
	select {
	case <-changed:
		return true
	case <-ctx.Done():
	case <-t.C:
	}
	return false
}

// Last is the highest seq ever given in a session's log here, 0 for none.
func (l *Log) Last(sessionID string) (seq uint64) {
	_ = l.db.View(func(tx *store.Tx) error {
		seq = tx.Last(logs + "/" + sessionID)
		return nil
	})
	return seq
}

// follow counts a follower in until the function it gives is called.
func (l *Log) follow(sessionID string) (leave func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	w := l.waiting[sessionID]
	if w == nil {
		w = &waiter{changed: make(chan struct{})}
		l.waiting[sessionID] = w
	}
	w.followers++
	return func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if w.followers--; w.followers == 0 {
			delete(l.waiting, sessionID)
		}
	}
}

// changed is closed at the session's next change; for followers.
func (l *Log) changed(sessionID string) <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.waiting[sessionID].changed
}

func (l *Log) wake(sessionID string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if w := l.waiting[sessionID]; w != nil {
		close(w.changed)
		w.changed = make(chan struct{})
	}
}
