package session

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// A place that was promised is enough for a move without memory too, also where
// no machine waits.
func TestPortableMoveToAHostsLastPlace(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Move, "b", false, true, false)
		for i := range 7 {
			if err := all[1].pool.Keep(fmt.Sprint("other", i), time.Hour); err != nil {
				t.Fatal(err)
			}
		}
		o.run(t)
		if !o.committed {
			t.Error("the move found no place")
		}
		for i := range 7 {
			all[1].pool.Release(fmt.Sprint("other", i))
		}
		for _, w := range all {
			w.end()
		}
	})
}

// An order to drop a target is late once the target has become the session: it
// was given for the epoch before.
func TestDropOfATargetThatWentOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Move, "b", true, false, false)
		o.holder, o.committed = o.from, true
		o.holder = o.from
		if err := errors.Join(o.capture(), o.restore()); err != nil {
			t.Fatal(err)
		}
		target := all[1].host.findTarget("s")
		o.tell(t, all[1])
		synctest.Wait()
		if _, err := target.ask(t.Context(), order{drop: true}); err != nil {
			t.Error(err)
		}
		if all[1].host.find("s") != target || len(all[1].alive()) != 1 {
			t.Error("the session is gone")
		}
		o.tell(t, all[0])
		for _, w := range all {
			w.end()
		}
	})
}

// After a reboot a held session has no machine, so none that has a template.
func TestTemplateOfASessionWithoutAMachine(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Move, "b", true, false, false)
		if err := o.capture(); err != nil {
			t.Fatal(err)
		}
		a := all[0]
		a.alive()[0].kill()
		a.restart()
		if _, err := a.host.TemplateOf("s"); !apierr.Is(err, apierr.NotFound) {
			t.Error(err)
		}
		if err := a.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op"}); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Error(err)
		}
		for _, w := range all {
			w.end()
		}
	})
}

// The next move may begin as soon as the record knows of this one's commit, and
// asks a host that has not heard the verdict yet.
func TestTemplateOfATargetThatAwaitsItsVerdict(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Move, "b", true, false, false)
		b := all[1]
		if _, err := b.host.TemplateOf("s"); !apierr.Is(err, apierr.NotFound) {
			t.Errorf("before the restore: %v", err)
		}
		o.holder = o.from
		if err := errors.Join(o.capture(), o.restore()); err != nil {
			t.Fatal(err)
		}
		if of, err := b.host.TemplateOf("s"); err != nil || of.Template != "template" {
			t.Errorf("before the verdict: %q, %v", of.Template, err)
		}
		for _, w := range all {
			w.end()
		}
	})
}

// A machine that waits is a clone of a template. When that is not today's any
// more, since QEMU was replaced, no session gets it.
func TestWaitingCloneOfAnOlderTemplateIsEnded(t *testing.T) {
	for _, made := range []string{"template", "another"} {
		synctest.Test(t, func(t *testing.T) {
			w := worlds(t, true, "a")[0]
			if _, err := w.boot(t.Context(), session.Shell); err != nil {
				t.Fatal(err)
			}
			w.made = made
			w.restart()
			synctest.Wait()
			waits := w.pool.Ready()[session.Shell]
			if today := made == "template"; today != (waits == 1) || today != (len(w.alive()) == 1) {
				t.Errorf("today's is %s: %d wait, %d live", made, waits, len(w.alive()))
			}
			w.end()
		})
	}
}

// A machine that has outlived the monitor that it was started by is paused and
// moved all the same, without its memory, and both hosts say so.
func TestMachineThatNothingCouldRestoreGoesWithoutItsMemory(t *testing.T) {
	for _, sc := range scenarios[:3] {
		t.Run(sc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				all, o := prepare(t, sc.kind, sc.to, true, false, false)
				a := all[0]
				a.alive()[0].set(func(f *fakeGuest) { f.old = true })
				if of, err := a.host.TemplateOf("s"); err != nil || of.Template != "" {
					t.Errorf("template %q, %v: nobody can use it", of.Template, err)
				}
				o.run(t)
				if !o.committed || o.snapshot.Memory {
					t.Errorf("committed %v with %+v", o.committed, o.snapshot)
				}
				o.settle(t, all)
				o.check(t, all)
				at := o.to
				if at == nil {
					at = a
				}
				events := at.events.all("s")
				for n, e := range events { // the last that is not of the check
					if e.Type == event.Lifecycle && n > 0 && !strings.Contains(string(e.Data), `"memory":false`) {
						t.Errorf("the event says %s", e.Data)
					}
				}
				for _, w := range all {
					w.end()
				}
			})
		})
	}
}

// Setup that still runs would be cut by that, and nothing asked for it.
func TestNoMemoryLostWhileSetupRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := worlds(t, true, "a")[0]
		order := order1("s", session.Shell, time.Hour)
		order.Setup = []string{"sleep 1000"}
		if _, _, err := w.host.Acquire(t.Context(), order); err != nil {
			t.Fatal(err)
		}
		f := w.alive()[0]
		f.set(func(f *fakeGuest) { f.old = true })
		o := &operation{id: "op", kind: session.Pause, from: w, epoch: 1}
		if err := o.capture(); !apierr.Is(err, apierr.OperationInProgress) || f.frozen {
			t.Errorf("frozen %v, %v", f.frozen, err)
		}
		w.end()
	})
}

// A machine that says it is another session's never runs a customer's process:
// it is asked before.
func TestNoStrangerGoesOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Resume, "b", true, false, false)
		if err := o.restore(); err != nil {
			t.Fatal(err)
		}
		b := all[1]
		f := b.alive()[0]
		f.set(func(f *fakeGuest) { f.started.SessionID = "another" })
		if err := b.host.Verdict(t.Context(), "s", hostlink.Verdict{OpID: "op", Committed: true}); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Error(err)
		}
		f.set(func(f *fakeGuest) {
			if !f.frozen {
				t.Error("its customer's processes ran")
			}
		})
		for _, w := range all {
			w.end()
		}
	})
}

// A snapshot that its host gives damaged is refused: a move's source goes on, a
// paused session stays one, and nothing is left at the target. Where the blob
// store has it too, a resume elsewhere takes that one.
func TestDamagedSnapshotIsRefused(t *testing.T) {
	for _, sc := range []struct {
		kind    session.OpKind
		durable bool
	}{{session.Move, false}, {session.Resume, false}, {session.Resume, true}} {
		t.Run(fmt.Sprintf("%s, durable %v", sc.kind, sc.durable), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				all, o := prepare(t, sc.kind, "b", true, false, false)
				a, b := all[0], all[1]
				if sc.kind == session.Move {
					if err := o.capture(); err != nil {
						t.Fatal(err)
					}
					o.holder = a
				}
				a.snaps.bad = map[string]bool{o.snapshot.ID: true}
				if o.snapshot.Durable = sc.durable; sc.durable { // as Load fetches it
					b.snaps.blob = map[string]memSnapshot{o.snapshot.ID: a.snaps.all[o.snapshot.ID]}
				}
				err := o.restore()
				if o.committed = err == nil; o.committed != sc.durable || err != nil && !apierr.Is(err, apierr.Internal) {
					t.Errorf("restored: %v", err)
				}
				for _, w := range []*world{b, a} {
					if w == b || o.from != nil {
						o.tell(t, w)
					}
				}
				o.settle(t, all)
				a.snaps.bad = nil
				o.check(t, all)
				for _, w := range all {
					w.end()
				}
			})
		})
	}
}
