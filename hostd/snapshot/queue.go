package snapshot

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"time"
)

// queue brings snapshots to the blob store and removes them there, one at a
// time, until it succeeds. What it has to do stands in the folders wanted and
// condemned, so that a restart loses nothing.
type queue struct {
	s      *Store
	cancel context.CancelFunc
	done   chan struct{}
	wake   chan struct{} // a word that tasks changed; holds one

	mu      sync.Mutex // guards what is below
	tasks   map[string]*task
	changed chan struct{} // closed and replaced when a task is done or given up
}

// task is one snapshot's.
type task struct {
	ref    Ref
	remove bool // else upload
	since  time.Time
	due    time.Time
	failed int
	last   error
	stop   context.CancelFunc // while it runs
}

const (
	retryFirst = time.Second
	retryMost  = 5 * time.Minute
)

// startQueue takes up what was left to do.
func (s *Store) startQueue() error {
	ctx, cancel := context.WithCancel(context.Background())
	q := &queue{s: s, cancel: cancel, done: make(chan struct{}), wake: make(chan struct{}, 1),
		tasks: map[string]*task{}, changed: make(chan struct{})}
	if err := q.find(); err != nil {
		cancel()
		return err
	}
	s.queue = q
	go q.run(ctx)
	return nil
}

func (q *queue) find() error {
	uploads, err := q.s.names(wanted)
	if err != nil {
		return err
	}
	for _, id := range uploads {
		if h, ok := q.s.have(id); ok {
			q.put(&task{ref: Ref{id, h.SessionID}, since: h.Created})
		}
	}
	removals, err := q.s.names(condemned)
	for _, id := range removals {
		session, err := os.ReadFile(q.s.path(condemned, id))
		if err != nil {
			return err
		}
		ref := Ref{id, string(session)}
		if err := ref.check(); err != nil {
			q.s.log.Error("a snapshot to be removed from the blob store is not known", "snapshot", id, "error", err)
			continue
		}
		if err := q.s.drop(id); err != nil { // a crash came in between
			return err
		}
		q.put(&task{ref: ref, remove: true, since: time.Now()})
	}
	return err
}

// put adds a task in place of the snapshot's earlier one.
func (q *queue) put(t *task) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dropLocked(t.ref.ID)
	q.tasks[t.ref.ID] = t
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// forget gives a snapshot's task up.
func (q *queue) forget(id string) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.dropLocked(id)
}

func (q *queue) dropLocked(id string) {
	t := q.tasks[id]
	if t == nil {
		return
	}
	if t.stop != nil {
		t.stop()
	}
	delete(q.tasks, id)
	close(q.changed)
	q.changed = make(chan struct{})
}

func (q *queue) stop() {
	q.cancel()
	<-q.done
}

func (q *queue) run(ctx context.Context) {
	defer close(q.done)
	for ctx.Err() == nil {
		t, wait := q.next()
		if t != nil {
			q.try(ctx, t)
			continue
		}
		timer := time.NewTimer(wait)
		select {
		case <-q.wake:
		case <-timer.C:
		case <-ctx.Done():
		}
		timer.Stop()
	}
}

// next gives the task that is due first, or how long to wait.
func (q *queue) next() (*task, time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	var first *task
	for _, t := range q.tasks {
		if first == nil || t.due.Before(first.due) || t.due.Equal(first.due) && t.since.Before(first.since) {
			first = t
		}
	}
	if first == nil {
		return nil, time.Hour
	}
	if wait := time.Until(first.due); wait > 0 {
		return nil, wait
	}
	return first, 0
}

func (q *queue) try(ctx context.Context, t *task) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if !q.begin(t, cancel) {
		return
	}
	err := q.s.do(ctx, t)
	q.mu.Lock()
	defer q.mu.Unlock()
	t.stop = nil
	switch {
	case q.tasks[t.ref.ID] != t: // given up meanwhile
	case err == nil:
		q.dropLocked(t.ref.ID)
	case ctx.Err() == nil:
		t.last = err
		t.due = time.Now().Add(min(retryFirst<<min(t.failed, 20), retryMost))
		t.failed++
		q.s.log.Warn("the blob store did not take a change; will try again", "snapshot", t.ref.ID,
			"session", t.ref.SessionID, "remove", t.remove, "failed", t.failed, "error", err)
	}
}

func (q *queue) begin(t *task, stop context.CancelFunc) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.tasks[t.ref.ID] != t {
		return false
	}
	t.stop = stop
	return true
}

// do works on one task.
func (s *Store) do(ctx context.Context, t *task) error {
	if t.remove {
		if err := s.expunge(ctx, t.ref); err != nil {
			return err
		}
		return s.fs.remove(s.path(condemned, t.ref.ID))
	}
	h, ok := s.pinAll(t.ref.ID) // the files must stay until they are read
	if !ok {
		return nil
	}
	err := s.upload(ctx, h)
	if err := errors.Join(err, s.unpin(h.names()...)); err != nil {
		return err
	}
	return s.markDurable(ctx, t.ref)
}

func (s *Store) markDurable(ctx context.Context, ref Ref) error {
	end, err := s.begin(ctx, ref.SessionID)
	if err != nil {
		return err
	}
	defer end()
	s.mu.Lock()
	e := s.entries[ref.ID]
	s.mu.Unlock()
	if e == nil {
		return nil
	}
	if err := s.fs.put(s.path(stored, ref.ID), nil); err != nil {
		return err
	}
	s.mu.Lock()
	e.durable = true
	s.mu.Unlock()
	return s.fs.remove(s.path(wanted, ref.ID))
}

// condemn has a snapshot removed from the blob store, if there is one.
func (s *Store) condemn(ref Ref) error {
	if s.queue == nil {
		return nil
	}
	if err := s.fs.put(s.path(condemned, ref.ID), []byte(ref.SessionID)); err != nil {
		return err
	}
	s.queue.put(&task{ref: ref, remove: true, since: time.Now()})
	return nil
}

// Upload has a snapshot that is here brought to the blob store in the
// background, also after a restart; WaitDurable waits for it. Without a blob
// store it does nothing.
func (s *Store) Upload(ctx context.Context, ref Ref) error {
	if s.queue == nil {
		return nil
	}
	end, err := s.begin(ctx, ref.SessionID)
	if err != nil {
		return fmt.Errorf("upload snapshot %s: %w", ref.ID, err)
	}
	defer end()
	h, ok := s.have(ref.ID)
	if !ok || h.SessionID != ref.SessionID {
		return fmt.Errorf("upload snapshot %s: %w", ref.ID, ErrNotFound)
	}
	if s.Durable(ref.ID) || s.marked(wanted, ref.ID) {
		return nil
	}
	if err := s.fs.put(s.path(wanted, ref.ID), nil); err != nil {
		return fmt.Errorf("upload snapshot %s: %w", ref.ID, err)
	}
	s.queue.put(&task{ref: ref, since: time.Now()})
	return nil
}

// Durable says whether a snapshot that is here is in the blob store too.
func (s *Store) Durable(id string) bool {
	i, _ := s.Info(id)
	return i.Durable
}

// WaitDurable waits until an Upload is done. It tells the last failure when ctx
// ends before.
func (s *Store) WaitDurable(ctx context.Context, id string) error {
	for !s.Durable(id) {
		changed, t := s.waiting(id)
		if s.Durable(id) {
			return nil
		}
		if t == nil {
			return fmt.Errorf("wait for snapshot %s to be durable: %w", id, ErrNotFound)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("wait for snapshot %s to be durable: %w", id, errors.Join(context.Cause(ctx), s.queue.lastError(id)))
		}
	}
	return nil
}

func (s *Store) waiting(id string) (<-chan struct{}, *task) {
	if s.queue == nil {
		return nil, nil
	}
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	return s.queue.changed, s.queue.tasks[id]
}

func (q *queue) lastError(id string) error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t := q.tasks[id]; t != nil {
		return t.last
	}
	return nil
}

// Pending says how many snapshots wait for the blob store, and since when the
// oldest does: a host that is lost takes these with it.
func (s *Store) Pending() (n int, oldest time.Time) {
	if s.queue == nil {
		return 0, time.Time{}
	}
	s.queue.mu.Lock()
	defer s.queue.mu.Unlock()
	for _, t := range s.queue.tasks {
		if t.remove {
			continue
		}
		if n++; oldest.IsZero() || t.since.Before(oldest) {
			oldest = t.since
		}
	}
	return n, oldest
}
