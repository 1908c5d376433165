package session

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"sort"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Events is the log that sessions write to.
type Events interface {
	Append(sessionID string, e event.Event) error
	// AppendNotice appends an event the agent numbered n, once.
	AppendNotice(sessionID string, n uint64, e event.Event) error
	LastNotice(sessionID string) uint64
	// Finish appends the last event, in one step with the word that nothing
	// more will come. On a log that is finished it does nothing.
	Finish(sessionID string, last event.Event) error
	// Unfinished names the logs to which more may come.
	Unfinished() ([]string, error)
}

// Host holds the sessions of this host. Safe for concurrent use.
type Host struct {
	name   string
	pool   *pool.Pool
	book   Book
	events Events
	egress func(sessionID string, epoch uint64) func(context.Context) (net.Conn, error)
	log    *slog.Logger

	claims sync.WaitGroup // acquires and ends under way; added to under mu, before closed
	owners sync.WaitGroup // run goroutines, and what they start
	ending sync.WaitGroup // machines on their way down
	ctx    context.Context
	stop   context.CancelFunc // ends the owners, not their sessions

	mu        sync.Mutex // guards what follows
	closed    bool
	sessions  map[string]*live
	taking    map[string]chan struct{}      // acquires and ends under way, closed at their end
	unwritten map[string]hostlink.Tombstone // those that the book has not taken yet
	watchers  map[chan hostlink.Notice]bool
}

// NewHost makes the set of sessions, empty until Restore and Acquire fill it.
// egress gives a session's way to proxyd.
func NewHost(name string, p *pool.Pool, b Book, e Events,
	egress func(sessionID string, epoch uint64) func(context.Context) (net.Conn, error), log *slog.Logger) *Host {
	ctx, stop := context.WithCancel(context.Background())
	h := &Host{ctx: ctx, stop: stop, name: name, pool: p, book: b, events: e, egress: egress, log: log,
		sessions: map[string]*live{}, taking: map[string]chan struct{}{},
		unwritten: map[string]hostlink.Tombstone{}, watchers: map[chan hostlink.Notice]bool{}}
	daemon.Gauge("berth_sessions_running", func() float64 {
		h.mu.Lock()
		defer h.mu.Unlock()
		return float64(len(h.sessions))
	})
	return h
}

// Acquire gives a machine to a session. The same session and epoch again
// answers with what runs (created is false); one that ended here is refused.
func (h *Host) Acquire(ctx context.Context, a hostlink.Acquire) (st hostlink.Status, created bool, err error) {
	finish, err := h.claim(ctx, a.SessionID)
	if err != nil {
		return st, false, err
	}
	defer finish()
	if s := h.find(a.SessionID); s != nil {
		st, err := s.ask(ctx, order{})
		if err == nil && st.Epoch != a.Epoch {
			err = apierr.New(apierr.SessionNotRunning, "session %s runs here with epoch %d, not %d", a.SessionID, st.Epoch, a.Epoch)
		}
		return st, false, err
	}
	if t, ok, err := h.tombstone(a.SessionID); err != nil {
		return st, false, err
	} else if ok && t.Epoch >= a.Epoch {
		return st, false, apierr.New(apierr.SessionNotRunning, "session %s has ended on this host", a.SessionID)
	}
	st, err = h.start(ctx, a)
	return st, err == nil, err
}

// start takes a machine for a new session. A waiting machine that fails the
// session, because it died that moment or hangs, is replaced once.
func (h *Host) start(ctx context.Context, a hostlink.Acquire) (hostlink.Status, error) {
	for again := true; ; again = false {
		guest, warm, err := h.pool.Take(ctx, a.Kind)
		if err != nil {
			return hostlink.Status{}, h.refusal(ctx, a, fmt.Errorf("take a machine: %w", err))
		}
		rec := Record{Acquire: a, MachineID: guest.Machine.ID(), Since: time.Now().UTC(), Warm: warm}
		if len(a.Setup) > 0 {
			rec.Setup = session.SetupRunning
		}
		if err = h.begin(ctx, guest, rec); err == nil {
			return h.adopt(guest, rec, agentlink.State{}), nil
		}
		h.discard(guest)
		err = h.refusal(ctx, a, err)
		if !warm || !again || ctx.Err() != nil {
			return hostlink.Status{}, err
		}
	}
}

// refusal is the answer to an acquire that failed: another host may do better,
// so nothing that went wrong here is Internal.
func (h *Host) refusal(ctx context.Context, a hostlink.Acquire, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if apierr.Is(err, apierr.NoCapacity) {
		return err
	}
	h.log.Warn("a session could not begin", "session", a.SessionID, "kind", a.Kind, "error", err)
	return apierr.Wrap(err, apierr.Unavailable, "the host could not start a machine; try again soon").After(time.Second)
}

// startTime bounds the agent's answer to Start.
const startTime = 20 * time.Second

// begin turns a waiting machine into the session's. It is in the book as such
// before the agent hears of the session: from then on the customer's commands
// run there, and no later hostd may take it for a fresh one.
func (h *Host) begin(ctx context.Context, g *pool.Guest, rec Record) error {
	a := rec.Acquire
	g.Slot.SetEgress(h.egress(a.SessionID, a.Epoch))
	book := make(chan error, 1)
	go func() { book <- h.book.PutSession(rec) }()
	err := g.Machine.Promote(ctx)
	err = errors.Join(<-book, err)
	if err == nil {
		sctx, cancel := context.WithTimeoutCause(ctx, startTime, fmt.Errorf("no answer within %s", startTime))
		defer cancel()
		err = g.Agent.Start(sctx, agentlink.Start{SessionID: a.SessionID, Kind: a.Kind, Viewport: a.Viewport, Setup: a.Setup})
	}
	if err == nil {
		return nil
	}
	if errBook := h.book.Drop(rec); errBook != nil {
		h.log.Error("a session that never began stays in the book", "session", a.SessionID, "error", errBook)
	}
	return fmt.Errorf("begin session: %w", err)
}

// adopt starts the owner of a session whose machine runs.
func (h *Host) adopt(g *pool.Guest, rec Record, st agentlink.State) hostlink.Status {
	s := newLive(h, g, rec, st)
	status := s.status()
	h.mu.Lock()
	h.sessions[rec.Acquire.SessionID] = s
	h.mu.Unlock()
	if st.SessionID == "" { // new, not re-adopted
		h.record(rec.Acquire.SessionID, event.Event{At: rec.Since, Type: event.Lifecycle, Text: "Session is running.",
			Data: mustJSON(map[string]any{"state": session.Running, "reason": "created"})})
	}
	h.owners.Go(s.run)
	return status
}

// claim makes the caller the only one to acquire or end this session.
func (h *Host) claim(ctx context.Context, id string) (finish func(), err error) {
	for {
		h.mu.Lock()
		if h.closed {
			h.mu.Unlock()
			return nil, stopping()
		}
		other, busy := h.taking[id]
		if !busy {
			mine := make(chan struct{})
			h.taking[id] = mine
			h.claims.Add(1)
			h.mu.Unlock()
			return func() {
				h.mu.Lock()
				delete(h.taking, id)
				h.mu.Unlock()
				close(mine)
				h.claims.Done()
			}, nil
		}
		h.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (h *Host) find(id string) *live {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.sessions[id]
}

func (h *Host) forget(s *live) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.sessions, s.id)
}

// discard takes a machine down in the background.
func (h *Host) discard(g *pool.Guest) {
	h.ending.Go(func() {
		if err := h.pool.Destroy(g); err != nil {
			h.log.Error("a machine did not end cleanly; the next start sweeps it", "machine", g.Machine.ID(), "error", err)
		}
	})
}

// Get answers with a running session's status.
func (h *Host) Get(ctx context.Context, id string) (hostlink.Status, error) {
	s := h.find(id)
	if s == nil {
		return hostlink.Status{}, h.gone(id)
	}
	st, err := s.ask(ctx, order{})
	if errors.Is(err, errEnded) {
		err = h.gone(id)
	}
	return st, err
}

// Patch changes a running session's settings.
func (h *Host) Patch(ctx context.Context, id string, set hostlink.Settings) (hostlink.Status, error) {
	s := h.find(id)
	if s == nil {
		return hostlink.Status{}, h.gone(id)
	}
	if _, err := s.ask(ctx, order{settings: &set}); err != nil {
		if errors.Is(err, errEnded) {
			err = h.gone(id)
		}
		return hostlink.Status{}, err
	}
	return h.Get(ctx, id)
}

// End ends a session, or says how it had ended. A session this host never saw
// gets a tombstone too, so that an acquire still under way comes too late.
func (h *Host) End(ctx context.Context, t hostlink.Tombstone) (hostlink.Tombstone, error) {
	finish, err := h.claim(ctx, t.SessionID)
	if err != nil {
		return t, err
	}
	defer finish()
	if s := h.find(t.SessionID); s != nil {
		if s.epoch > t.Epoch {
			return t, apierr.New(apierr.SessionNotRunning, "session %s runs here with a newer epoch", t.SessionID)
		}
		_, err := s.ask(ctx, order{end: &t})
		if err != nil && !errors.Is(err, errEnded) {
			return t, err
		}
		<-s.done
		return s.tomb, nil
	}
	old, ok, err := h.tombstone(t.SessionID)
	if err != nil || ok && old.Epoch >= t.Epoch {
		return old, err
	}
	return t, h.book.End(t, "")
}

// gone is the error for a session that does not run here.
func (h *Host) gone(id string) error {
	if t, ok, err := h.tombstone(id); err != nil {
		return err
	} else if ok {
		return apierr.New(apierr.SessionNotRunning, "session %s has ended (%s%s)", id, t.Reason, t.Error)
	}
	return apierr.New(apierr.NotFound, "session %s is not on this host", id)
}

// Tunnel opens a connection to a session's agent for the session link.
func (h *Host) Tunnel(ctx context.Context, id string, epoch uint64) (net.Conn, error) {
	s := h.find(id)
	if s == nil || s.epoch != epoch {
		return nil, h.gone(id)
	}
	return s.guest.Agent.Tunnel(ctx)
}

// Inventory lists what this host holds.
func (h *Host) Inventory(ctx context.Context) (hostlink.Inventory, error) {
	h.mu.Lock()
	all := make([]*live, 0, len(h.sessions))
	for _, s := range h.sessions {
		all = append(all, s)
	}
	h.mu.Unlock()
	inv := hostlink.Inventory{Host: h.name, Sessions: make([]hostlink.Status, 0, len(all))}
	for _, s := range all {
		st, err := s.ask(ctx, order{})
		if errors.Is(err, errEnded) {
			continue
		} else if err != nil {
			return inv, err
		}
		inv.Sessions = append(inv.Sessions, st)
	}
	sort.Slice(inv.Sessions, func(i, j int) bool { return inv.Sessions[i].SessionID < inv.Sessions[j].SessionID })
	var err error
	inv.Tombstones, err = h.tombstones()
	return inv, err
}

// Ack forgets tombstones that the record has taken in.
func (h *Host) Ack(ids []string) error { return h.book.Ack(ids, time.Now()) }

// Watch gives every notice from now on. The channel is closed when the watcher
// is too slow or stop is called; the inventory is the caller's to ask after.
func (h *Host) Watch() (notices <-chan hostlink.Notice, stop func()) {
	ch := make(chan hostlink.Notice, 1024)
	h.mu.Lock()
	h.watchers[ch] = true
	h.mu.Unlock()
	return ch, func() { h.unwatch(ch) }
}

func (h *Host) unwatch(ch chan hostlink.Notice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchers[ch] {
		delete(h.watchers, ch)
		close(ch)
	}
}

// tell never blocks on a watcher: one that is 1024 notices behind is cut and
// begins again with the inventory.
func (h *Host) tell(n hostlink.Notice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch := range h.watchers {
		select {
		case ch <- n:
		default:
			delete(h.watchers, ch)
			close(ch)
		}
	}
}

func (h *Host) record(id string, e event.Event) {
	if err := h.events.Append(id, e); err != nil {
		h.log.Warn("an event was lost", "session", id, "error", err)
	}
}

// Close leaves the sessions to the next hostd: their machines run on. It
// returns when acquires and ends under way are over, and machines on their way
// down are gone; callers of Acquire see to it that their contexts end.
func (h *Host) Close() {
	h.mu.Lock()
	h.closed = true
	h.mu.Unlock()
	h.stop()
	h.claims.Wait()
	h.owners.Wait()
	h.ending.Wait()
}

func stopping() error {
	return apierr.New(apierr.Unavailable, "this host's daemon is stopping; try again soon").After(time.Second)
}
