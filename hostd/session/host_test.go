package session

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// memBook is a Book in memory; hostd/book has the durable one and its tests.
type memBook struct {
	mu       sync.Mutex
	machines map[string]machine.Handle
	sessions map[string]Record
	tombs    map[string]hostlink.Tombstone
	acked    map[string]bool
	full     bool // End and PutSession fail
	targets  map[string]Record
	left     map[string]Left
	verdicts map[string]hostlink.Verdict
	cut      *cut
}

func newMemBook() *memBook {
	return &memBook{targets: map[string]Record{}, left: map[string]Left{}, verdicts: map[string]hostlink.Verdict{}, machines: map[string]machine.Handle{}, sessions: map[string]Record{}, tombs: map[string]hostlink.Tombstone{}, acked: map[string]bool{}}
}

var errFull = errors.New("no space left on device")

func (b *memBook) locked(f func()) error { b.mu.Lock(); defer b.mu.Unlock(); f(); return nil }

// on is a record as it comes back from a disk: nothing of it is shared.
func on(r Record) (copied Record) {
	if err := json.Unmarshal(mustJSON(r), &copied); err != nil {
		panic(err)
	}
	return copied
}

// write is locked for what changes the book.
func (b *memBook) write(step string, f func()) error {
	return b.cut.do("book: "+step, func() error { return b.locked(f) })
}
func (b *memBook) PutMachine(h machine.Handle) error {
	return b.write("machine", func() { b.machines[h.Spec.ID] = h })
}
func (b *memBook) DeleteMachine(id string) error {
	return b.write("no machine", func() { delete(b.machines, id) })
}
func (b *memBook) Machines() (out []machine.Handle, err error) {
	return out, b.locked(func() {
		for _, h := range b.machines {
			out = append(out, h)
		}
	})
}
func (b *memBook) PutSession(r Record) error {
	b.mu.Lock()
	full := b.full
	b.mu.Unlock()
	if full {
		return errFull
	}
	return b.write("session", func() { b.sessions[r.Acquire.SessionID] = on(r) })
}
func (b *memBook) Drop(r Record) error {
	return b.locked(func() { delete(b.sessions, r.Acquire.SessionID); delete(b.machines, r.MachineID) })
}
func (b *memBook) Sessions() (out []Record, err error) {
	return out, b.locked(func() {
		for _, r := range b.sessions {
			out = append(out, r)
		}
	})
}
func (b *memBook) End(t hostlink.Tombstone, machineID string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.full {
		return errFull
	}
	return b.cut.do("book: end", func() error {
		b.tombs[t.SessionID] = t
		delete(b.sessions, t.SessionID)
		delete(b.machines, machineID)
		delete(b.left, t.SessionID)
		return nil
	})
}
func (b *memBook) PutTarget(r Record) error {
	return b.write("target", func() { b.targets[r.Acquire.SessionID] = on(r) })
}
func (b *memBook) Targets() (out []Record, err error) {
	return out, b.locked(func() {
		for _, r := range b.targets {
			out = append(out, r)
		}
	})
}
func (b *memBook) GoOn(r Record, v hostlink.Verdict) error {
	return b.write("go on", func() {
		id := r.Acquire.SessionID
		b.sessions[id], b.verdicts[v.OpID] = on(r), v
		if r.Op.Role == hostlink.Target {
			delete(b.targets, id)
			delete(b.left, id)
		}
	})
}
func (b *memBook) Discard(r Record, v *hostlink.Verdict, l *Left) error {
	return b.write("discard", func() {
		id := r.Acquire.SessionID
		if r.Op.Role == hostlink.Target {
			delete(b.targets, id)
		} else {
			delete(b.sessions, id)
		}
		delete(b.machines, r.MachineID)
		if v != nil {
			b.verdicts[v.OpID] = *v
		}
		if l != nil {
			b.left[id] = *l
		}
	})
}
func (b *memBook) Left(id string) (l Left, ok bool, err error) {
	err = b.locked(func() { l, ok = b.left[id] })
	return
}
func (b *memBook) Verdict(op string) (v hostlink.Verdict, ok bool, err error) {
	err = b.locked(func() { v, ok = b.verdicts[op] })
	return
}
func (b *memBook) Tombstone(id string) (t hostlink.Tombstone, ok bool, err error) {
	err = b.locked(func() { t, ok = b.tombs[id] })
	return
}
func (b *memBook) Tombstones() (out []hostlink.Tombstone, err error) {
	return out, b.locked(func() {
		for id, t := range b.tombs {
			if !b.acked[id] {
				out = append(out, t)
			}
		}
	})
}
func (b *memBook) Ack(ids []string, _ time.Time) error {
	return b.locked(func() {
		for _, id := range ids {
			b.acked[id] = true
		}
	})
}
func (b *memBook) Forget(time.Time) error { return nil }

// memEvents is an event log in memory.
type memEvents struct {
	mu     sync.Mutex
	events map[string][]event.Event
	notice map[string]uint64
	ended  map[string]bool
	skip   map[string]uint64
	cut    *cut
}

// write changes the log, unless hostd is dead.
func (m *memEvents) write(f func()) error {
	if m.cut.isDead() {
		return errDead
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	f()
	return nil
}

func newMemEvents() *memEvents {
	return &memEvents{skip: map[string]uint64{}, events: map[string][]event.Event{}, notice: map[string]uint64{}, ended: map[string]bool{}}
}
func (m *memEvents) Append(id string, e event.Event) error { return m.AppendNotice(id, 0, e) }
func (m *memEvents) AppendNotice(id string, n uint64, e event.Event) error {
	return m.write(func() {
		if n != 0 && n <= m.notice[id] {
			return
		}
		m.notice[id] = max(m.notice[id], n)
		m.events[id] = append(m.events[id], e)
	})
}
func (m *memEvents) LastNotice(id string) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.notice[id]
}
func (m *memEvents) Finish(id string, last event.Event) error {
	return m.write(func() {
		if !m.ended[id] {
			m.events[id] = append(m.events[id], last)
		}
		m.ended[id] = true
	})
}
func (m *memEvents) Last(id string) uint64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.skip[id] + uint64(len(m.events[id]))
}
func (m *memEvents) Begin(id string, notice, used uint64) error {
	return m.write(func() { m.events[id], m.notice[id], m.skip[id], m.ended[id] = nil, notice, used, false })
}
func (m *memEvents) Add(id string, events []event.Event) error {
	return m.write(func() { m.events[id] = append(m.events[id], events...) })
}
func (m *memEvents) SetNotice(id string, n uint64) error {
	return m.write(func() { m.notice[id] = n })
}
func (m *memEvents) Leave(id string) error {
	return m.write(func() { delete(m.events, id) })
}
func (m *memEvents) all(id string) []event.Event {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.Clone(m.events[id])
}
func (m *memEvents) Unfinished() (ids []string, err error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for id := range m.events {
		if !m.ended[id] {
			ids = append(ids, id)
		}
	}
	return ids, nil
}
func (m *memEvents) last(id string) (e event.Event, n int, ended bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n = len(m.events[id]); n > 0 {
		e = m.events[id][n-1]
	}
	return e, n, m.ended[id]
}

// rig is a Host over fake guests.
type rig struct {
	t      *testing.T
	host   *Host
	pool   *pool.Pool
	book   *memBook
	events *memEvents
	ways   fakeWays
	mu     sync.Mutex
	guests []*fakeGuest // guarded by mu
	fail   error        // of boots, guarded by mu
}

func newRig(t *testing.T, most int) *rig {
	r := &rig{t: t, book: newMemBook(), events: newMemEvents()}
	r.pool = pool.New(pool.Config{MaxTotal: most, Parallel: 1}, r.boot, quiet())
	r.host = r.newHost()
	return r
}

func (r *rig) newHost() *Host {
	return NewHost(Config{Name: "h1", Pool: r.pool, Book: r.book, Events: r.events, Snapshots: newMemSnapshots(), Egress: r.ways.way, Log: quiet()})
}

func (r *rig) boot(_ context.Context, kind session.Kind) (*pool.Guest, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.fail != nil {
		return nil, r.fail
	}
	f := newFakeGuest(fmt.Sprintf("m%d", len(r.guests)), kind)
	r.guests = append(r.guests, f)
	return f.guest(), r.book.PutMachine(f.Handle())
}

func (r *rig) guest(i int) *fakeGuest { r.mu.Lock(); defer r.mu.Unlock(); return r.guests[i] }

func (r *rig) acquire(id string, kind session.Kind, life time.Duration) hostlink.Status {
	r.t.Helper()
	st, created, err := r.host.Acquire(r.t.Context(), order1(id, kind, life))
	if err != nil || !created {
		r.t.Fatalf("Acquire: created %v, %v", created, err)
	}
	return st
}

func order1(id string, kind session.Kind, life time.Duration) hostlink.Acquire {
	return hostlink.Acquire{SessionID: id, Epoch: 1, Kind: kind, Settings: hostlink.Settings{Version: 1, ExpiresAt: time.Now().Add(life)}}
}

// close stops hostd and then the machines that it leaves running.
func (r *rig) close() {
	r.host.Close()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, f := range r.guests {
		f.kill()
	}
}

// gone checks that a machine was stopped once, its slot closed and its handle
// removed.
func (r *rig) gone(i int) {
	r.t.Helper()
	f := r.guest(i)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.stops != 1 || f.closed != 1 {
		r.t.Errorf("machine %d: stopped %d times, slot closed %d times", i, f.stops, f.closed)
	}
	if h, _ := r.book.Machines(); len(h) != 0 {
		r.t.Errorf("the book still has machines %v", h)
	}
}

func TestEveryEnd(t *testing.T) {
	n := func(i int) agentlink.Notice { return agentlink.Notice{Clients: &i} }
	cases := []struct {
		name   string
		kind   session.Kind
		act    func(r *rig)
		reason session.EndReason
		err    bool
		after  time.Duration
	}{
		{name: "timeout", kind: session.Both, act: func(*rig) {}, reason: session.TimedOut, after: 60 * time.Second},
		{name: "released", kind: session.Browser, reason: session.Released, act: func(r *rig) {
			if _, err := r.host.End(r.t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1, EndedAt: time.Now(), Reason: session.Released}); err != nil {
				r.t.Error(err)
			}
		}},
		{name: "machine dies", kind: session.Browser, err: true, act: func(r *rig) { r.guest(0).kill() }},
		{name: "last client leaves", kind: session.Browser, reason: session.Disconnected, after: 5 * time.Second, act: func(r *rig) {
			r.guest(0).tell(n(1))
			r.guest(0).tell(n(2))
			r.guest(0).tell(n(0))
		}},
		{name: "client comes back in time", kind: session.Browser, reason: session.TimedOut, after: 60 * time.Second, act: func(r *rig) {
			r.guest(0).tell(n(1))
			r.guest(0).tell(n(0))
			time.Sleep(4 * time.Second) // the bubble's clock
			r.guest(0).tell(n(1))
		}},
		{name: "clients do not count with a shell", kind: session.Both, reason: session.TimedOut, after: 60 * time.Second, act: func(r *rig) {
			r.guest(0).tell(n(1))
			r.guest(0).tell(n(0))
		}},
		{name: "no client ever came", kind: session.Browser, reason: session.TimedOut, after: 60 * time.Second, act: func(*rig) {}},
		{name: "keepAlive set meanwhile", kind: session.Browser, reason: session.TimedOut, after: 60 * time.Second, act: func(r *rig) {
			r.guest(0).tell(n(1))
			r.guest(0).tell(n(0))
			synctest.Wait()
			set := hostlink.Settings{Version: 2, KeepAlive: true, ExpiresAt: time.Now().Add(60 * time.Second)}
			if _, err := r.host.Patch(r.t.Context(), "s", set); err != nil {
				r.t.Error(err)
			}
		}},
		{name: "timeout prolonged, older order ignored", kind: session.Both, reason: session.TimedOut, after: 90 * time.Second, act: func(r *rig) {
			for version, life := range map[uint64]time.Duration{3: 90 * time.Second} {
				st, err := r.host.Patch(r.t.Context(), "s", hostlink.Settings{Version: version, ExpiresAt: time.Now().Add(life)})
				if err != nil || st.Version != 3 {
					r.t.Error(st, err)
				}
			}
			if st, err := r.host.Patch(r.t.Context(), "s", hostlink.Settings{Version: 2, ExpiresAt: time.Now()}); err != nil || st.Version != 3 {
				r.t.Error(st, err)
			}
		}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				r := newRig(t, 4)
				notices, stop := r.host.Watch()
				defer stop()
				begin := time.Now()
				r.acquire("s", c.kind, 60*time.Second)
				synctest.Wait()
				c.act(r)
				var ended *hostlink.Tombstone
				for ended == nil {
					ended = (<-notices).Ended
				}
				if ended.Reason != c.reason || (ended.Error != "") != c.err {
					t.Errorf("ended with %+v", ended)
				}
				if took := time.Since(begin).Truncate(time.Second); took != c.after {
					t.Errorf("ended after %s, want %s", took, c.after)
				}
				if _, _, err := r.host.Acquire(t.Context(), order1("s", c.kind, time.Minute)); !apierr.Is(err, apierr.SessionNotRunning) {
					t.Errorf("Acquire after the end: %v", err)
				}
				r.host.Close()
				r.gone(0)
				if e, _, finished := r.events.last("s"); !finished || e.Type != event.Lifecycle {
					t.Errorf("last event %+v, finished %v", e, finished)
				}
				if _, err := r.host.Get(t.Context(), "s"); !apierr.Is(err, apierr.SessionNotRunning) {
					t.Errorf("Get after the end: %v", err)
				}
			})
		})
	}
}

func TestAcquireTwiceIsOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		r.acquire("s", session.Shell, time.Minute)
		st, created, err := r.host.Acquire(t.Context(), order1("s", session.Shell, time.Minute))
		if err != nil || created || st.SessionID != "s" {
			t.Errorf("second Acquire: %+v %v %v", st, created, err)
		}
		other := order1("s", session.Shell, time.Minute)
		other.Epoch = 2
		if _, _, err := r.host.Acquire(t.Context(), other); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("Acquire with another epoch: %v", err)
		}
		if _, _, err := r.host.Tunnel(t.Context(), "s", 2); err == nil {
			t.Error("a tunnel with another epoch was opened")
		}
		r.close()
	})
}

func TestEndBeforeAcquireWins(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		if _, err := r.host.End(t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1, Reason: session.Released}); err != nil {
			t.Fatal(err)
		}
		if _, _, err := r.host.Acquire(t.Context(), order1("s", session.Shell, time.Minute)); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("Acquire after an early end: %v", err)
		}
		r.close()
	})
}

func TestFullHostRefusesAndRecovers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 1)
		r.acquire("a", session.Shell, time.Minute)
		if _, _, err := r.host.Acquire(t.Context(), order1("b", session.Shell, time.Minute)); !apierr.Is(err, apierr.NoCapacity) {
			t.Errorf("Acquire on a full host: %v", err)
		}
		if _, err := r.host.End(t.Context(), hostlink.Tombstone{SessionID: "a", Epoch: 1, Reason: session.Released}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		r.acquire("c", session.Shell, time.Minute)
		r.close()
	})
}

func TestRestoreAdoptsWhatLives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 8)
		for _, id := range []string{"lives", "dies"} {
			r.acquire(id, session.Browser, time.Minute)
		}
		one, zero := 1, 0
		r.guest(0).tell(agentlink.Notice{Clients: &one})
		r.guest(0).tell(agentlink.Notice{Event: &event.Event{Type: event.Exec, Data: json.RawMessage(`{}`)}})
		synctest.Wait()
		r.host.Close() // hostd stops; the machines do not
		_, before, _ := r.events.last("lives")
		r.guest(1).kill()
		r.guest(0).tell(agentlink.Notice{Event: &event.Event{Type: event.Exec, Text: "while away"}})
		waiting := newFakeGuest("waiting", session.Shell)
		if err := r.book.PutMachine(waiting.Handle()); err != nil {
			t.Fatal(err)
		}
		r.pool = pool.New(pool.Config{MaxTotal: 8, Parallel: 1}, r.boot, quiet())
		r.host = r.newHost()
		err := r.host.Adopt(t.Context(), func(_ context.Context, h machine.Handle) (*pool.Guest, error) {
			if h.Spec.ID == "waiting" {
				return waiting.guest(), nil
			}
			var i int
			fmt.Sscanf(h.Spec.ID, "m%d", &i)
			f := r.guest(i)
			select {
			case <-f.done:
				return nil, machine.ErrGone
			default:
				return f.guest(), nil
			}
		}, func(s machine.Spec) bool { return s.Template != "old" })
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		inv, err := r.host.Inventory(t.Context())
		if err != nil || len(inv.Sessions) != 1 || inv.Sessions[0].SessionID != "lives" || inv.Sessions[0].Clients != 1 {
			t.Errorf("inventory %+v, %v", inv, err)
		}
		if len(inv.Tombstones) != 1 || inv.Tombstones[0].SessionID != "dies" || inv.Tombstones[0].Error == "" {
			t.Errorf("tombstones %+v", inv.Tombstones)
		}
		if e, n, _ := r.events.last("lives"); n != before+1 || e.Text != "while away" {
			t.Errorf("after the restart there are %d events, the last %+v; want %d", n, e, before+1)
		}
		if r.pool.Ready()[session.Shell] != 1 {
			t.Errorf("the waiting machine is not in the pool: %v", r.pool.Ready())
		}
		r.guest(0).tell(agentlink.Notice{Clients: &zero})
		time.Sleep(6 * time.Second) // the bubble's clock
		synctest.Wait()
		if _, err := r.host.Get(t.Context(), "lives"); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("the adopted session did not end when its last client left: %v", err)
		}
		waiting.kill()
		r.close()
	})
}

func TestWaitingMachineOfAnOlderImageIsEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		old := newFakeGuest("m0", session.Shell)
		r.guests = append(r.guests, old)
		h := old.Handle()
		h.Spec.Template = "old"
		if err := r.book.PutMachine(h); err != nil {
			t.Fatal(err)
		}
		r.restart()
		synctest.Wait()
		if n := r.pool.Ready()[session.Shell]; n != 0 {
			t.Errorf("%d waiting machines", n)
		}
		r.close()
		r.gone(0)
	})
}

func TestReleaseKeepsTheLastCommandsEvent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		r.acquire("s", session.Shell, time.Minute)
		for i := range 20 { // some of them still on their way
			r.guest(0).tell(agentlink.Notice{Event: &event.Event{Type: event.Exec, Text: fmt.Sprint(i)}})
		}
		if _, err := r.host.End(t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1, EndedAt: time.Now(), Reason: session.Released}); err != nil {
			t.Fatal(err)
		}
		if last, n, _ := r.events.last("s"); n != 22 || last.Type != event.Lifecycle {
			t.Errorf("%d events, the last %+v; want 20 of commands between two of lifecycle", n, last)
		}
		r.close()
	})
}
