package session

import (
	"errors"
	"fmt"
	"net"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

func noticeOf(e event.Event) agentlink.Notice { return agentlink.Notice{Event: &e} }

// operation is a gateway's part of one: it gives the orders, decides, and tells
// the verdict until it is heard.
type operation struct {
	id        string
	kind      session.OpKind
	from, to  *world // nil: none
	snapshot  session.Snapshot
	portable  bool
	epoch     uint64 // of the session before
	patient   bool   // orders that fail are given again
	holder    *world // of a paused session's snapshot
	committed bool
}

func (o *operation) capture() error {
	order := hostlink.Capture{OpID: o.id, Kind: o.kind, Epoch: o.epoch,
		SnapshotID: "snap-" + o.id, Key: make([]byte, 32), Portable: o.portable, Deadline: time.Now().Add(time.Minute)}
	if o.to != nil && o.to != o.from && !o.portable {
		order.To = o.to.name
	}
	return o.from.try(o.patient, func() error {
		done, err := o.from.host.Capture(o.from.t.Context(), "s", order)
		if err == nil {
			o.snapshot = done.Snapshot
		}
		return err
	})
}

func (o *operation) restore() error {
	return o.to.try(o.patient, func() error {
		a := order1("s", session.Shell, time.Hour)
		a.Epoch = o.epoch + 1
		order := hostlink.Restore{OpID: o.id, Kind: o.kind, Acquire: a, Snapshot: o.snapshot, Key: make([]byte, 32), Deadline: time.Now().Add(time.Minute)}
		if o.holder != o.to {
			order.From = o.holder.name
		}
		_, err := o.to.host.Restore(o.to.t.Context(), "s", order)
		return err
	})
}

// run is the whole operation.
func (o *operation) run(t *testing.T) {
	t.Helper()
	var err error
	if o.from != nil {
		o.holder = o.from
		if o.to != nil {
			err = o.prepare()
		}
		if err == nil {
			err = o.capture()
		}
	}
	if err == nil && o.to != nil {
		err = o.restore()
	}
	o.committed = err == nil
	first, then := o.to, o.from
	if !o.committed {
		first, then = then, first
	}
	for _, w := range []*world{first, then} {
		if w != nil {
			o.tell(t, w)
		}
	}
}

// prepare asks the target for a place before anything stops.
func (o *operation) prepare() error {
	from := o.from.name
	if o.from == o.to {
		from = ""
	}
	return o.to.try(o.patient, func() error {
		return o.to.host.Prepare(o.to.t.Context(), "s", hostlink.Prepare{OpID: o.id, Kind: session.Shell, Memory: !o.portable,
			From: from, Deadline: time.Now().Add(time.Minute)})
	})
}

func (o *operation) tell(t *testing.T, w *world) {
	t.Helper()
	err := w.try(true, func() error {
		return w.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: o.id, Committed: o.committed})
	})
	if err != nil && !apierr.Is(err, apierr.NotFound) && !apierr.Is(err, apierr.SessionNotRunning) {
		t.Errorf("verdict %v at %s: %v", o.committed, w.name, err)
	}
}

// settle starts dead hostds again and tells them what they still wait for.
func (o *operation) settle(t *testing.T, all []*world) {
	t.Helper()
	for _, w := range all {
		synctest.Wait()
		if w.cut.isDead() {
			w.restart()
		}
		inv, err := w.host.Inventory(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		for _, st := range inv.Sessions {
			if st.Held != nil {
				o.tell(t, w)
			}
		}
		time.Sleep(2 * time.Minute) // whatever takes time in the background
		synctest.Wait()
	}
}

// check says what is wrong with the outcome: the session must be in exactly one
// place, and nothing must be left anywhere else.
func (o *operation) check(t *testing.T, all []*world) {
	t.Helper()
	epoch, at := o.epoch, o.from
	switch {
	case o.committed && o.kind == session.Pause:
		at = nil
	case o.committed:
		epoch, at = epoch+1, o.to
	case o.kind == session.Resume:
		at = nil
	}
	lost := false
	for _, w := range all {
		inv, err := w.host.Inventory(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		lost = lost || len(inv.Tombstones) > 0
		alive := w.alive()
		waiting := 0
		for _, n := range w.pool.Ready() {
			waiting += n
		}
		want := 0
		if w == at && len(inv.Tombstones) == 0 {
			want = 1
		}
		if len(alive)-waiting != want || len(inv.Sessions) != want || len(w.book.machines) != len(alive) || len(w.book.targets) != 0 || len(w.book.sessions) != want {
			t.Errorf("%s: %d machines, %d waiting, %d sessions; in the book %d machines, %d targets, %d sessions; want %d",
				w.name, len(alive), waiting, len(inv.Sessions), len(w.book.machines), len(w.book.targets), len(w.book.sessions), want)
		}
		if n := w.snaps.begun(); n != 0 {
			t.Errorf("%s: %d drafts, or layers that came ahead, are left", w.name, n)
		}
		if free := w.pool.Free(); free != 8-want {
			t.Errorf("%s: %d places free", w.name, free)
		}
		for _, f := range w.guests {
			f.mu.Lock()
			if f.stops > 1 || f.closed > f.stops {
				t.Errorf("%s: machine %s: %d stops, slot closed %d times", w.name, f.id, f.stops, f.closed)
			}
			f.mu.Unlock()
		}
		if want == 1 && len(inv.Sessions) == 1 {
			o.checkRunning(t, w, inv.Sessions[0], epoch)
		}
	}
	if lost {
		return
	}
	if at == nil {
		holder := o.holder
		left, ok, _ := holder.book.Left("s")
		if !ok || left.Epoch != o.epoch || !holder.snaps.Has(left.SnapshotID) || holder.events.Last("s") < 5 {
			t.Errorf("paused: left %v %+v, %d events", ok, left, holder.events.Last("s"))
		}
	}
}

func (o *operation) checkRunning(t *testing.T, w *world, st hostlink.Status, epoch uint64) {
	t.Helper()
	if st.Epoch != epoch || st.Held != nil {
		t.Errorf("%s runs %+v, want epoch %d", w.name, st, epoch)
	}
	for _, f := range w.alive() {
		f.mu.Lock()
		if f.started.SessionID == "s" && (f.still || f.frozen || f.state != "counter 17" || !f.egress) {
			t.Errorf("%s: still %v, frozen %v, state %q, egress %v", w.name, f.still, f.frozen, f.state, f.egress)
		}
		f.mu.Unlock()
	}
	texts := []string{}
	for _, e := range w.events.all("s") {
		texts = append(texts, e.Text)
	}
	if got := strings.Join(texts, ","); !strings.HasPrefix(got, "Session is running.,0,1,2") || o.committed && !strings.HasSuffix(got, ",Session is running.") {
		t.Errorf("%s: events %q", w.name, got)
	}
	for _, f := range w.alive() { // whatever its agent tells from here on comes into the log, once
		if f.started.SessionID == "s" {
			f.tell(noticeOf(event.Event{Type: event.Exec, Text: "after"}))
		}
	}
	synctest.Wait()
	if all := w.events.all("s"); all[len(all)-1].Text != "after" || len(all) != len(texts)+1 {
		t.Errorf("%s: %d events after %d, the last %q", w.name, len(all), len(texts), all[len(all)-1].Text)
	}
	if _, err := w.host.Patch(t.Context(), "s", hostlink.Settings{Version: 9, ExpiresAt: time.Now().Add(time.Hour)}); err != nil {
		t.Errorf("%s: Patch: %v", w.name, err)
	}
}

// scenarios are all shapes of an operation on hosts a and b.
var scenarios = []struct {
	name string
	kind session.OpKind
	to   string
}{
	{"pause", session.Pause, ""},
	{"move", session.Move, "b"},
	{"move to the same host", session.Move, "a"},
	{"resume", session.Resume, "a"},
	{"resume elsewhere", session.Resume, "b"},
}

// prepare brings the hosts to where the operation begins.
func prepare(t *testing.T, kind session.OpKind, to string, keeps, portable, patient bool) ([]*world, *operation) {
	all := worlds(t, keeps, "a", "b")
	a := all[0]
	a.begin()
	o := &operation{id: "op", kind: kind, from: a, portable: portable, epoch: 1, patient: patient}
	if to != "" {
		o.to = a.others[to]
	}
	if kind == session.Resume {
		pause := &operation{id: "earlier", kind: session.Pause, from: a, portable: portable, epoch: 1}
		pause.run(t)
		if !pause.committed {
			t.Fatal("no pause")
		}
		o.from, o.holder, o.snapshot = nil, a, pause.snapshot
	}
	synctest.Wait()
	return all, o
}

func TestOperations(t *testing.T) {
	for _, sc := range scenarios {
		for _, keeps := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, memory %v", sc.name, keeps), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					all, o := prepare(t, sc.kind, sc.to, keeps, !keeps, false)
					o.run(t)
					if !o.committed {
						t.Error("it came to nothing")
					}
					o.settle(t, all)
					o.check(t, all)
					for _, w := range all {
						w.end()
					}
				})
			})
		}
	}
}

// Every step of every operation fails, or hostd dies before or after it, on
// either host: there is always exactly one outcome, and nothing is left.
func TestEveryStepCut(t *testing.T) {
	for _, sc := range scenarios {
		for _, keeps := range []bool{true, false} {
			for _, victim := range []int{0, 1} {
				if victim == 1 && sc.to != "b" {
					continue
				}
				for _, h := range []how{fail, dieBefore, dieAfter} {
					for _, patient := range []bool{true, false} {
						name := fmt.Sprintf("%s, memory %v, host %d, way %d, patient %v", sc.name, keeps, victim, h, patient)
						t.Run(name, func(t *testing.T) { cutEach(t, sc.kind, sc.to, keeps, victim, h, patient) })
					}
				}
			}
		}
	}
}

func cutEach(t *testing.T, kind session.OpKind, to string, keeps bool, victim int, h how, patient bool) {
	for n := 1; ; n++ {
		step := ""
		synctest.Test(t, func(t *testing.T) {
			all, o := prepare(t, kind, to, keeps, !keeps, patient)
			all[victim].cut.arm(n, h)
			o.run(t)
			o.settle(t, all)
			step = all[victim].cut.disarm()
			if (step == "stop machine" || step == "let go") && h == fail { // the next start sweeps it
				all[victim].restart()
				synctest.Wait()
			}
			o.check(t, all)
			if t.Failed() {
				t.Errorf("when cut at step %d, %s", n, step)
			}
			for _, w := range all {
				w.end()
			}
		})
		if step == "" || t.Failed() {
			return
		}
	}
}

func TestReleaseWinsOverAnOperation(t *testing.T) {
	for name, when := range map[string]func(o *operation) error{
		"captured": func(o *operation) error { return o.capture() },
		"restored": func(o *operation) error { return errors.Join(o.capture(), o.restore()) },
	} {
		for _, to := range []string{"a", "b"} {
			t.Run(name+" to "+to, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					all, o := prepare(t, session.Move, to, true, false, false)
					o.holder = o.from
					if err := when(o); err != nil {
						t.Fatal(err)
					}
					for _, w := range all {
						if _, err := w.host.End(t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1, EndedAt: time.Now(), Reason: session.Released}); err != nil {
							t.Error(err)
						}
					}
					time.Sleep(time.Minute)
					synctest.Wait()
					for _, w := range all {
						if n := len(w.alive()); n != 0 || len(w.book.machines)+len(w.book.sessions)+len(w.book.targets) != 0 || w.pool.Free() != 8 {
							t.Errorf("%s: %d machines, book %v %v %v", w.name, n, w.book.machines, w.book.sessions, w.book.targets)
						}
						if err := w.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op"}); !apierr.Is(err, apierr.NotFound) {
							t.Errorf("%s: a verdict after the end: %v", w.name, err)
						}
						w.end()
					}
				})
			})
		}
	}
}

func TestHeldSessionStandsStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Move, "b", true, false, false)
		a := all[0]
		begun := time.Now()
		if err := o.capture(); err != nil {
			t.Fatal(err)
		}
		if err := o.capture(); err != nil { // the same order, the same answer
			t.Errorf("the same order again: %v", err)
		}
		other := *o
		other.id = "other"
		if err := other.capture(); !apierr.Is(err, apierr.OperationInProgress) {
			t.Errorf("another operation: %v", err)
		}
		if _, _, err := a.host.Tunnel(t.Context(), "s", 1); !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("a tunnel: %v", err)
		}
		time.Sleep(3 * time.Hour) // its timeout is one
		if _, err := a.host.Patch(t.Context(), "s", hostlink.Settings{Version: 2, KeepAlive: true, ExpiresAt: begun.Add(2 * time.Hour)}); err != nil {
			t.Errorf("settings while held: %v", err)
		}
		a.restart()
		st, err := a.host.Get(t.Context(), "s")
		if err != nil || st.Held == nil || *st.Held != (hostlink.Held{OpID: "op", Role: hostlink.Source}) || st.Version != 2 {
			t.Fatalf("%+v %v", st, err)
		}
		if err := a.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "unknown"}); !apierr.Is(err, apierr.NotFound) {
			t.Errorf("verdict on something else: %v", err)
		}
		for range 2 {
			if err := a.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op"}); err != nil {
				t.Errorf("aborted: %v", err)
			}
		}
		if err := o.capture(); !apierr.Is(err, apierr.OperationInProgress) {
			t.Errorf("an order to capture after its verdict: %v", err)
		}
		time.Sleep(2*time.Hour - time.Minute) // less than it stood still and had left
		if st, err := a.host.Get(t.Context(), "s"); err != nil || st.Held != nil {
			t.Errorf("its time passed while it stood still: %+v %v", st, err)
		}
		time.Sleep(2 * time.Minute)
		if _, err := a.host.Get(t.Context(), "s"); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("after its timeout: %v", err)
		}
		for _, w := range all {
			w.end()
		}
	})
}

func TestLateOrdersAfterTheSessionWentOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Move, "b", true, false, false)
		o.run(t)
		a, b := all[0].host, all[1].host
		if _, _, err := a.Acquire(t.Context(), order1("s", session.Shell, time.Hour)); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("Acquire with the old epoch: %v", err)
		}
		if _, _, err := a.Tunnel(t.Context(), "s", 1); !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("a tunnel at the old host: %v", err)
		}
		if _, _, err := b.Tunnel(t.Context(), "s", 1); !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("a tunnel with the old epoch: %v", err)
		}
		if _, err := a.End(t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1, Reason: session.Released}); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("an end with the old epoch: %v", err)
		}
		if err := o.restore(); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("an order to restore after its verdict: %v", err)
		}
		if inv, _ := a.Inventory(t.Context()); len(inv.Tombstones) != 0 {
			t.Errorf("the source says the session ended: %+v", inv.Tombstones)
		}
		for _, w := range all {
			w.end()
		}
	})
}

func TestReleaseOfAPausedSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Pause, "", true, false, false)
		o.run(t)
		w := all[0]
		w.restart()
		if _, _, ended := w.events.last("s"); ended {
			t.Error("a restart closed the log of a paused session")
		}
		if _, err := w.host.End(t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1, EndedAt: time.Now(), Reason: session.Released}); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		e, _, ended := w.events.last("s")
		if !ended || e.Text != "Session ended: released" || w.snaps.Has("snap-op") {
			t.Errorf("last event %+v, ended %v, snapshot %v", e, ended, w.snaps.Has("snap-op"))
		}
		for _, w := range all {
			w.end()
		}
	})
}

// A machine that dies while it is held ends its session only if the verdict is
// that it goes on.
func TestMachineDiesWhileHeld(t *testing.T) {
	for _, committed := range []bool{true, false} {
		for _, restart := range []bool{true, false} {
			t.Run(fmt.Sprintf("committed %v, restart %v", committed, restart), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					all, o := prepare(t, session.Pause, "", true, false, false)
					w := all[0]
					if err := o.capture(); err != nil {
						t.Fatal(err)
					}
					w.alive()[0].kill()
					synctest.Wait()
					if restart {
						w.restart()
					}
					err := w.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op", Committed: committed})
					inv, _ := w.host.Inventory(t.Context())
					synctest.Wait()
					_, left, _ := w.book.Left("s")
					if committed && (err != nil || len(inv.Tombstones) != 0 || !left) {
						t.Errorf("a paused session: %v, tombstones %+v, left %v", err, inv.Tombstones, left)
					}
					if !committed && (!apierr.Is(err, apierr.SessionNotRunning) || len(inv.Tombstones) != 1 || inv.Tombstones[0].Error == "") {
						t.Errorf("a session that should go on: %v, tombstones %+v", err, inv.Tombstones)
					}
					if len(inv.Sessions) != 0 || len(w.book.machines) != 0 {
						t.Errorf("left: %+v %v", inv.Sessions, w.book.machines)
					}
					for _, w := range all {
						w.end()
					}
				})
			})
		}
	}
}

// An agent that a guest's root has stopped must not keep its machine from being
// captured with its memory.
func TestHungAgentDoesNotStopACapture(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Pause, "", true, false, false)
		f := all[0].alive()[0]
		f.set(func(f *fakeGuest) { f.hang = true })
		begun := time.Now()
		if err := o.capture(); err != nil || time.Since(begun) > freezeTime+time.Second {
			t.Errorf("after %s: %v", time.Since(begun), err)
		}
		if got := len(all[0].snaps.all); got != 1 {
			t.Errorf("%d snapshots", got)
		}
		for _, w := range all {
			w.end()
		}
	})
}

func TestAbortWhileCaptured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Pause, "", true, false, false)
		w := all[0]
		w.alive()[0].set(func(f *fakeGuest) { f.hang = true }) // the capture takes its time
		got := make(chan error, 1)
		go func() { got <- o.capture() }()
		time.Sleep(time.Second)
		w.alive()[0].set(func(f *fakeGuest) { f.hang = false })
		if err := w.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op"}); err != nil {
			t.Error(err)
		}
		if err := <-got; !apierr.Is(err, apierr.Internal) {
			t.Errorf("the capture: %v", err)
		}
		o.settle(t, all)
		o.check(t, all)
		for _, w := range all {
			w.end()
		}
	})
}

// A target's machine that dies before the verdict costs the session only if the
// record has put it there.
func TestTargetDiesWhileHeld(t *testing.T) {
	for _, committed := range []bool{true, false} {
		t.Run(fmt.Sprintf("committed %v", committed), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				all, o := prepare(t, session.Move, "b", true, false, false)
				o.holder = o.from
				if err := errors.Join(o.capture(), o.restore()); err != nil {
					t.Fatal(err)
				}
				b := all[1]
				b.alive()[0].kill()
				synctest.Wait()
				err := b.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op", Committed: committed})
				b.restart()
				inv, _ := b.host.Inventory(t.Context())
				if committed != apierr.Is(err, apierr.SessionNotRunning) || committed != (len(inv.Tombstones) == 1 && inv.Tombstones[0].Epoch == 2) {
					t.Errorf("%v, tombstones %+v", err, inv.Tombstones)
				}
				if len(inv.Sessions)+len(b.book.machines)+len(b.book.targets)+len(b.book.sessions) != 0 {
					t.Errorf("left: %+v, book %v %v %v", inv.Sessions, b.book.machines, b.book.targets, b.book.sessions)
				}
				for _, w := range all {
					w.end()
				}
			})
		})
	}
}

// Where the host of a paused session is lost, only the blob store has the rest:
// the log begins anew, above every number that the old one can have given.
func TestResumeWithoutTheHostThatPaused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Resume, "b", true, false, false)
		a, b := all[0], all[1]
		b.snaps.all[o.snapshot.ID] = a.snaps.all[o.snapshot.ID] // as from the blob store
		order := order1("s", session.Shell, time.Hour)
		order.Epoch = 2
		if _, err := b.host.Restore(t.Context(), "s", hostlink.Restore{OpID: "op", Kind: session.Resume, Acquire: order, Snapshot: o.snapshot, Key: make([]byte, 32)}); err != nil {
			t.Fatal(err)
		}
		if err := b.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op", Committed: true}); err != nil {
			t.Fatal(err)
		}
		if first, last := b.events.skip["s"]+1, b.events.Last("s"); first < 1<<39 || last != first {
			t.Errorf("events %d to %d", first, last)
		}
		for _, w := range all {
			w.end()
		}
	})
}

func TestMemoryThatDoesNotFitIsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Resume, "b", true, false, false)
		for name, change := range map[string]func(*session.Snapshot){
			"driver":    func(s *session.Snapshot) { s.Driver = "other" },
			"CPU class": func(s *session.Snapshot) { s.CPUClass = "other" },
		} {
			other := *o
			change(&other.snapshot)
			if err := other.restore(); !apierr.Is(err, apierr.Internal) {
				t.Errorf("another %s: %v", name, err)
			}
		}
		b := all[1]
		if len(b.alive())+len(b.book.targets) != 0 || b.pool.Free() != 8 {
			t.Errorf("left: %d machines, targets %v", len(b.alive()), b.book.targets)
		}
		for _, w := range all {
			w.end()
		}
	})
}

// The record may know that a session goes on here before this host does: a link
// that comes then is told to try again, not that nobody knows the session.
func TestTunnelToATargetThatAwaitsItsVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Resume, "b", true, false, false)
		b := all[1]
		if _, _, err := b.host.Tunnel(t.Context(), "s", 2); !apierr.Is(err, apierr.NotFound) {
			t.Errorf("before the restore: %v", err)
		}
		if err := o.restore(); err != nil {
			t.Fatal(err)
		}
		if _, _, err := b.host.Tunnel(t.Context(), "s", 2); !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("before the verdict: %v", err)
		}
		for _, w := range all {
			w.end()
		}
	})
}

// A tunnel goes with its machine's stop, and opens again when it goes on.
func TestTunnelsAreCutAtTheStop(t *testing.T) {
	var g gate
	near, far := net.Pipe()
	defer near.Close()
	if _, ok := g.add(far); ok {
		t.Error("a shut gate took a tunnel")
	}
	g.set(true)
	leave, ok := g.add(far)
	if !ok || !g.isOpen() {
		t.Fatal("an open gate refused a tunnel")
	}
	g.set(false)
	if _, err := near.Read(make([]byte, 1)); err == nil {
		t.Error("the tunnel is not cut")
	}
	leave()
	g.set(true)
	if len(g.conns) != 0 {
		t.Error("a tunnel that was cut is still known")
	}
}

// Whoever comes to a machine that is about to go on is through when it does, and
// is sent away when it does not.
func TestTunnelsWaitForAMachineThatGoesOn(t *testing.T) {
	for name, turn := range map[string]func(*gate){
		"opens":       func(g *gate) { g.set(true) },
		"opens later": func(g *gate) { g.soon(); g.set(true) },
		"stays shut":  func(g *gate) { g.set(false) },
	} {
		synctest.Test(t, func(t *testing.T) {
			var g gate
			g.soon()
			came := make(chan bool)
			go func() { came <- g.wait(t.Context()) }()
			synctest.Wait()
			select {
			case <-came:
				t.Fatalf("%s: nobody waits", name)
			default:
			}
			turn(&g)
			if through := <-came; through != (name != "stays shut") {
				t.Errorf("%s: through %v", name, through)
			}
		})
	}
}

// A resumed session's link waits at its host from before the verdict, and is
// through in the moment the machine goes on, while the agent still mends it.
func TestTunnelIsThroughWhenTheMachineGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Resume, "b", true, false, false)
		b := all[1]
		if err := o.restore(); err != nil {
			t.Fatal(err)
		}
		came := make(chan error, 1)
		go func() {
			conn, done, err := b.host.Tunnel(t.Context(), "s", 2)
			if err == nil {
				_ = conn.Close()
				done()
			}
			came <- err
		}()
		synctest.Wait()
		select {
		case err := <-came:
			t.Fatalf("before the verdict: %v", err)
		default:
		}
		if err := b.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op", Committed: true}); err != nil {
			t.Fatal(err)
		}
		if err := <-came; err != nil {
			t.Errorf("after the verdict: %v", err)
		}
		for _, w := range all {
			w.end()
		}
	})
}

// A tunnel that waits for a target is sent away when the operation comes to nothing.
func TestTunnelToATargetThatGoesNowhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Resume, "b", true, false, false)
		b := all[1]
		if err := o.restore(); err != nil {
			t.Fatal(err)
		}
		came := make(chan error, 1)
		go func() {
			_, _, err := b.host.Tunnel(t.Context(), "s", 2)
			came <- err
		}()
		synctest.Wait()
		began := time.Now()
		if err := b.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op"}); err != nil {
			t.Fatal(err)
		}
		if err := <-came; !apierr.Is(err, apierr.Unavailable) || time.Since(began) > 0 {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		for _, w := range all {
			w.end()
		}
	})
}
