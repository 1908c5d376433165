package sessions

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// scenario is one operation and the one thing that goes wrong in it.
type scenario struct {
	name string
	op   session.OpKind
	to   string // of a move
	prep func(*faultRig)
	// lost says that a host does not come back: ERROR is right then.
	lost bool
	// aborts says that the fault comes before the commit and is final.
	aborts bool
}

// faultRig is a rig with a session, and what a scenario needs to break it.
type faultRig struct {
	*rig
	id   string
	mu   sync.Mutex
	heal []func() // guarded by mu: hosts break while the gateway works
	well bool     // what breaks heals at once; guarded by mu
	ctx  context.Context
	cut  context.CancelCauseFunc // the client leaves
}

// hostStep is a step of an operation that a host sees.
type hostStep struct{ step, host string }

func orders(kind session.OpKind, to string) []hostStep {
	switch kind {
	case session.Pause:
		return []hostStep{{"capture", "h1"}, {"verdict", "h1"}}
	case session.Resume:
		return []hostStep{{"restore", "h1"}, {"verdict", "h1"}}
	}
	all := []hostStep{{"prepare", to}, {"capture", "h1"}, {"restore", to}, {"verdict", to}}
	if to != "h1" {
		all = append(all, hostStep{"verdict", "h1"})
	}
	return all
}

// hostFaults are the ways in which a host fails one order.
var hostFaults = map[string]func(f *faultRig, host *fakeHost, step string) *fault{
	"refuses": func(*faultRig, *fakeHost, string) *fault {
		return &fault{refuse: apierr.New(apierr.Internal, "disk full")}
	},
	"answer lost": func(*faultRig, *fakeHost, string) *fault { return &fault{lost: true} },
	"hangs": func(f *faultRig, _ *fakeHost, _ string) *fault {
		hang := make(chan struct{})
		f.later(func() { close(hang) })
		return &fault{hang: hang}
	},
	"restarts": func(f *faultRig, host *fakeHost, _ string) *fault { // unreachable after the order; machines stay
		f.hosts.setAway(host.name, true)
		f.later(func() { f.hosts.setAway(host.name, false) })
		return &fault{lost: true}
	},
	"restarts before": func(f *faultRig, host *fakeHost, _ string) *fault {
		f.hosts.setAway(host.name, true)
		f.later(func() { f.hosts.setAway(host.name, false) })
		return &fault{refuse: apierr.New(apierr.Unavailable, "going down")}
	},
	"is lost": func(f *faultRig, host *fakeHost, _ string) *fault {
		f.hosts.setAway(host.name, true)
		host.with(func() {
			clear(host.running)
			clear(host.targets)
			clear(host.snapshots)
		})
		return &fault{refuse: apierr.New(apierr.Unavailable, "dead")}
	},
}

func scenarios() (all []scenario) {
	for _, base := range []scenario{
		{name: "pause", op: session.Pause}, {name: "resume", op: session.Resume},
		{name: "move", op: session.Move, to: "h2"}, {name: "move on the host", op: session.Move, to: "h1"},
	} {
		steps := []string{"open", "opened", "commit", "committed"}
		for _, o := range orders(base.op, base.to) {
			for what := range hostFaults {
				s := base
				s.name = fmt.Sprintf("%s: %s %s at %s", base.name, o.host, what, o.step)
				s.lost, s.aborts = what == "is lost", o.step != "verdict" && what == "refuses"
				s.prep = func(f *faultRig) { f.failOnce(o.host, o.step, what) }
				all = append(all, s)
			}
			if o.step == "verdict" {
				steps = append(steps, "verdict "+o.host)
			} else {
				steps = append(steps, o.step, o.step+"d")
			}
		}
		for _, step := range steps {
			died, left := base, base
			died.name = fmt.Sprintf("%s: gateway dies at %s", base.name, step)
			died.prep = func(f *faultRig) { f.dieAt(step) }
			left.name = fmt.Sprintf("%s: client leaves at %s", base.name, step)
			left.prep = func(f *faultRig) { f.leaveAt(step) }
			all = append(all, died, left)
		}
	}
	return all
}

// later adds to what heals the world; an order may come to a host late.
func (f *faultRig) later(heal func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.well {
		heal()
		return
	}
	f.heal = append(f.heal, heal)
}

func (f *faultRig) healAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.well = true
	for _, heal := range f.heal {
		heal()
	}
}

// failOnce makes a host fail the first order of a step.
func (f *faultRig) failOnce(host, step, what string) {
	h := f.hosts.fake(host)
	var done atomic.Bool
	f.setFault(h, func(at string) *fault {
		if at != step || done.Swap(true) {
			return nil
		}
		return hostFaults[what](f, h, step)
	})
}

// dieAt lets the gateway do nothing from a step on; healing starts another.
func (f *faultRig) dieAt(step string) {
	var dead atomic.Bool
	f.use.onStep = func(at string) error {
		if at == step {
			dead.Store(true)
		}
		if dead.Load() {
			return errDied
		}
		return nil
	}
	f.later(func() {
		old := f.use
		f.use = New(old.cfg, f.record, f.hosts, slog.New(slog.DiscardHandler))
		f.use.pace = hasty
	})
}

func (f *faultRig) leaveAt(step string) {
	f.use.onStep = func(at string) error {
		if at == step {
			f.cut(apierr.New(apierr.Canceled, "gone"))
		}
		return nil
	}
}

func newFaultRig(t *testing.T, c scenario) *faultRig {
	f := &faultRig{rig: twoHosts(t)}
	f.id = f.create().ID
	if c.op == session.Resume {
		if _, err := f.use.Pause(t.Context(), f.caller, f.id); err != nil {
			t.Fatal(err)
		}
	}
	f.use.after.wait(time.Minute)
	f.use.pace = hasty
	f.use.cfg.OperationDeadline = 400 * time.Millisecond
	f.use.cfg.HostLostAfter = 450 * time.Millisecond
	f.ctx, f.cut = context.WithCancelCause(t.Context())
	t.Cleanup(func() { f.cut(nil) })
	c.prep(f)
	return f
}

// TestOperationsUnderFaults plays every scenario and then lets the world heal:
// in the end the session runs in exactly one place, or is paused, or has ended
// with a sentence, and hosts hold nothing besides. That it never runs twice is
// checked all along.
func TestOperationsUnderFaults(t *testing.T) {
	t.Parallel()
	var group errgroup.Group
	group.SetLimit(8) // they wait more than they work
	for _, c := range scenarios() {
		group.Go(func() error {
			t.Run(c.name, func(t *testing.T) { playOut(t, c) })
			return nil
		})
	}
	_ = group.Wait() // each has its own test
}

func playOut(t *testing.T, c scenario) {
	f := newFaultRig(t, c)
	err := f.play(c)
	f.use.after.wait(time.Minute)
	f.healAll()
	f.run()
	defer func() {
		if t.Failed() {
			t.Log("at last:", f.settled())
		}
	}()
	until(t, "the session is settled", func() bool { return f.settled() == "" })
	now := f.session(f.id)
	switch {
	case now.Status == session.Error && (!c.lost || now.Error == ""):
		t.Errorf("ended with %q after %v", now.Error, err)
	case c.aborts && (err == nil || now.LastOp.Committed):
		t.Errorf("not aborted: %+v, %v", now.LastOp, err)
	case err == nil && now.Status != session.Error && now.LastOp != nil && !now.LastOp.Committed:
		t.Errorf("answered well and aborted after: %+v", now)
	}
	f.use.after.wait(time.Minute)
}

func (f *faultRig) play(c scenario) (err error) {
	switch c.op {
	case session.Pause:
		_, err = f.use.Pause(f.ctx, f.caller, f.id)
	case session.Resume:
		_, err = f.use.Resume(f.ctx, f.caller, f.id)
	default:
		_, _, err = f.use.Move(f.ctx, f.caller, f.id, MoveRequest{Host: c.to})
	}
	return err
}

// settled says what is not yet as it must be, empty for nothing.
func (f *faultRig) settled() string {
	now := f.session(f.id)
	run, held := f.world.machines(f.id)
	kept := f.world.kept()
	switch {
	case now.Op != nil:
		return "an operation is open"
	case held != 0:
		return fmt.Sprint(held, " machines are held")
	case now.Status == session.Running && !slices.Equal(run, []string{fmt.Sprintf("%s/%d", now.Host, now.Epoch)}):
		return fmt.Sprintf("runs at %v, not at %s/%d", run, now.Host, now.Epoch)
	case now.Status != session.Running && len(run) != 0:
		return fmt.Sprint(now.Status, ", and runs at ", run)
	case now.Status == session.Paused && !slices.Equal(kept, []string{now.Snapshot.Host}):
		return fmt.Sprint("the snapshot is at ", kept)
	case now.Status == session.Running && len(kept) > 1 || now.Status.Ended() && len(kept) > 0:
		return fmt.Sprint("snapshots are left at ", kept)
	}
	return ""
}
