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

	"github.com/berth-dev/berth/hostd/machine"
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
	// Last is the highest seq of a session's log, 0 for none.
	Last(sessionID string) uint64
	// Begin starts the log of a session from another host: the agent's notices
	// up to notice are in it, numbers up to used are not given again.
	Begin(sessionID string, notice, used uint64) error
	// Add appends events of another host, under the numbers they have.
	Add(sessionID string, events []event.Event) error
	// SetNotice says that another agent numbers its notices from n on.
	SetNotice(sessionID string, n uint64) error
	// Leave removes the log of a session that goes on elsewhere.
	Leave(sessionID string) error
}

// Config is what a Host works with.
type Config struct {
	Name      string
	Pool      *pool.Pool
	Book      Book
	Events    Events
	Snapshots Snapshots
	// Egress makes a session's way to proxyd, shut.
	Egress func(sessionID string, epoch uint64) Way
	// Peers gives the host that listens at a host link address.
	Peers func(addr string) Peer
	// Keeper is the driver where it keeps memory, nil where it does not; Rebuild
	// then makes machines of captures.
	Keeper  machine.Keeper
	Rebuild Rebuild
	// Wake makes a waiting machine that outlived its hostd fit for a session; nil:
	// it is.
	Wake func(context.Context, *pool.Guest) error
	// Building says whether the template of a recipe is being made here; nil: never.
	Building func(recipe string) bool
	// Room says whether the computer has the memory for one more session of a
	// kind; nil: always.
	Room func(session.Kind) error
	Log  *slog.Logger
}

// Host holds the sessions of this host. Safe for concurrent use.
type Host struct {
	name      string
	pool      *pool.Pool
	book      Book
	events    Events
	snapshots Snapshots
	egress    func(sessionID string, epoch uint64) Way
	peers     func(addr string) Peer
	keeper    machine.Keeper
	rebuild   Rebuild
	wake      func(context.Context, *pool.Guest) error
	building  func(recipe string) bool
	room      func(session.Kind) error
	log       *slog.Logger

	claims sync.WaitGroup // acquires and ends under way; added to under mu, before closed
	owners sync.WaitGroup // run goroutines, and what they start
	ending sync.WaitGroup // machines on their way down
	ctx    context.Context
	stop   context.CancelFunc // ends the owners, not their sessions

	mu        sync.Mutex // guards what follows
	closed    bool
	sessions  map[string]*live
	targets   map[string]*live              // those that wait here for the verdict that they are
	restoring map[string]restoring          // by session, while it becomes a target
	expected  map[string]*expected          // by operation, until its restore is done
	taking    map[string]chan struct{}      // acquires, restores and ends under way, closed at their end
	unwritten map[string]hostlink.Tombstone // those that the book has not taken yet
	watchers  map[chan hostlink.Notice]bool
}

// NewHost makes the set of sessions, empty until Adopt, Acquire and Restore fill
// it.
func NewHost(c Config) *Host {
	ctx, stop := context.WithCancel(context.Background())
	h := &Host{ctx: ctx, stop: stop, name: c.Name, pool: c.Pool, book: c.Book, events: c.Events, snapshots: c.Snapshots,
		egress: c.Egress, peers: c.Peers, keeper: c.Keeper, rebuild: c.Rebuild, wake: c.Wake, building: c.Building, room: c.Room, log: c.Log,
		sessions: map[string]*live{}, targets: map[string]*live{}, restoring: map[string]restoring{}, expected: map[string]*expected{}, taking: map[string]chan struct{}{},
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
		now, err := s.ask(ctx, order{})
		if err == nil && s.epoch != a.Epoch {
			err = apierr.New(apierr.SessionNotRunning, "session %s runs here with epoch %d, not %d", a.SessionID, s.epoch, a.Epoch)
		}
		return now.status, false, err
	}
	if late, err := h.late(a.SessionID, a.Epoch); err != nil {
		return st, false, err
	} else if late {
		return st, false, apierr.New(apierr.SessionNotRunning, "session %s has ended on this host, or gone on from it", a.SessionID)
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
		way, err := h.begin(ctx, guest, rec)
		if err == nil {
			return h.adopt(guest, rec, way), nil
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
func (h *Host) begin(ctx context.Context, g *pool.Guest, rec Record) (Way, error) {
	a := rec.Acquire
	way := h.wayOf(g, a)
	book := make(chan error, 1)
	go func() { book <- h.book.PutSession(rec) }()
	err := g.Machine.Promote(ctx)
	err = errors.Join(<-book, err)
	if err == nil {
		sctx, cancel := context.WithTimeoutCause(ctx, startTime, fmt.Errorf("no answer within %s", startTime))
		defer cancel()
		err = g.Agent.Start(sctx, agentlink.Start{SessionID: a.SessionID, Kind: a.Kind, Viewport: a.Viewport, Setup: a.Setup, Proxy: shellProxy(a)})
	}
	if err == nil {
		return way, nil
	}
	way.Shut()
	if errBook := h.book.Drop(rec); errBook != nil {
		h.log.Error("a session that never began stays in the book", "session", a.SessionID, "error", errBook)
	}
	return nil, fmt.Errorf("begin session: %w", err)
}

// adopt starts the owner of a session whose machine has just been taken.
func (h *Host) adopt(g *pool.Guest, rec Record, way Way) hostlink.Status {
	s := newLive(h, g, rec, running, agentlink.State{})
	knows := shellProxy(rec.Acquire)
	s.way, s.knows = way, &knows
	status := s.status()
	h.record(s.id, event.Event{At: rec.Since, Type: event.Lifecycle, Text: "Session is running.",
		Data: mustJSON(withProxy(rec.Acquire.Settings, map[string]any{"state": session.Running, "reason": "created"}))})
	h.own(s)
	return status
}

// own starts a session's owner.
func (h *Host) own(s *live) {
	h.mu.Lock()
	h.sessions[s.id] = s
	h.mu.Unlock()
	h.owners.Go(s.run)
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

// findPart finds the session, or else a target, at one moment: the one becomes
// the other.
func (h *Host) findPart(id string) *live {
	h.mu.Lock()
	defer h.mu.Unlock()
	if s := h.sessions[id]; s != nil {
		return s
	}
	return h.targets[id]
}

func (h *Host) findTarget(id string) *live {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.targets[id]
}

// place makes a target the session, if it is one.
func (h *Host) place(s *live) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.targets[s.id] == s {
		delete(h.targets, s.id)
		h.sessions[s.id] = s
	}
}

func (h *Host) forget(s *live) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, m := range []map[string]*live{h.sessions, h.targets} {
		if m[s.id] == s {
			delete(m, s.id)
		}
	}
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
	now, err := s.ask(ctx, order{})
	if errors.Is(err, errEnded) {
		err = h.gone(id)
	}
	return now.status, err
}

// Patch changes a running session's settings, or those of one that is about to
// run here: before its verdict comes, what changed meanwhile is in force.
func (h *Host) Patch(ctx context.Context, id string, set hostlink.Settings) (hostlink.Status, error) {
	s := h.find(id)
	if t := h.findTarget(id); t != nil && t.epoch == set.PassEpoch {
		s = t
	}
	if s == nil {
		return hostlink.Status{}, h.gone(id)
	}
	done, err := s.ask(ctx, order{settings: &set})
	if err != nil {
		if errors.Is(err, errEnded) {
			err = h.gone(id)
		}
		return hostlink.Status{}, err
	}
	if done.await {
		h.awaitTold(ctx, s)
	}
	now, err := s.ask(ctx, order{})
	if errors.Is(err, errEnded) {
		err = h.gone(id)
	}
	return now.status, err
}

// Capture stops a session's machine and captures it; it is held until the
// verdict.
func (h *Host) Capture(ctx context.Context, id string, o hostlink.Capture) (hostlink.Captured, error) {
	s := h.find(id)
	if s == nil {
		return hostlink.Captured{}, h.gone(id)
	}
	a, err := s.ask(ctx, order{capture: &o})
	if errors.Is(err, errEnded) {
		err = h.gone(id)
	}
	return a.captured, err
}

// Tunnel opens a connection to a session's agent for the session link. It is
// the bare connection; done closes it. A machine that stands still for an
// operation cuts its tunnels and takes no new ones: the caller looks again
// where the session is. Before one that is about to go on the caller waits.
func (h *Host) Tunnel(ctx context.Context, id string, epoch uint64) (conn net.Conn, done func(), err error) {
	s, err := h.tunnelTo(id, epoch)
	if err != nil {
		return nil, nil, err
	}
	held := apierr.New(apierr.Unavailable, "the session's machine stands still for an operation; try again")
	if s == nil || !s.opens(ctx) {
		return nil, nil, held
	}
	if conn, err = s.guest.Agent.Tunnel(ctx); err != nil {
		return nil, nil, err
	}
	leave, ok := s.gate.add(conn)
	if !ok {
		conn.Close()
		return nil, nil, held
	}
	return conn, func() { leave(); conn.Close() }, nil
}

// tunnelTo finds the part of a session with an epoch, a target too: the record
// may know of the commit before this host does. nil: it is here with another one.
func (h *Host) tunnelTo(id string, epoch uint64) (*live, error) {
	h.mu.Lock()
	parts := [...]*live{h.sessions[id], h.targets[id]} // at one moment: a target becomes the session
	h.mu.Unlock()
	if parts[0] == nil && parts[1] == nil {
		return nil, h.gone(id)
	}
	for _, part := range parts {
		if part != nil && part.epoch == epoch {
			return part, nil
		}
	}
	return nil, nil
}

// tunnelWait is how long a tunnel waits for a machine to go on.
const tunnelWait = 3 * time.Second

func (s *live) opens(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, tunnelWait)
	defer cancel()
	return s.gate.wait(ctx)
}

// Inventory lists what this host holds, targets too: during a move to this very
// host a session is in it twice, with two epochs.
func (h *Host) Inventory(ctx context.Context) (hostlink.Inventory, error) {
	h.mu.Lock()
	all := make([]*live, 0, len(h.sessions)+len(h.targets))
	for _, m := range []map[string]*live{h.sessions, h.targets} {
		for _, s := range m {
			all = append(all, s)
		}
	}
	h.mu.Unlock()
	inv := hostlink.Inventory{Host: h.name, Sessions: make([]hostlink.Status, 0, len(all))}
	inv.Snapshots, inv.Durable = h.snapshots.List()
	for _, s := range all {
		now, err := s.ask(ctx, order{})
		if errors.Is(err, errEnded) {
			continue
		} else if err != nil {
			return inv, err
		}
		inv.Sessions = append(inv.Sessions, now.status)
	}
	sort.Slice(inv.Sessions, func(i, j int) bool { return inv.Sessions[i].SessionID < inv.Sessions[j].SessionID })
	var err error
	inv.Tombstones, err = h.tombstones()
	return inv, err
}

// Ack forgets tombstones that the record has taken in.
func (h *Host) Ack(ids []string) error { return h.book.Ack(ids, time.Now()) }

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
	h.letAllGo()
	h.ending.Wait()
}

func stopping() error {
	return apierr.New(apierr.Unavailable, "this host's daemon is stopping; try again soon").After(time.Second)
}
