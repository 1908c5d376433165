package pool

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/hostd/control"
	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/session"
)

// Bootstrap is what a boot needs.
type Bootstrap struct {
	Driver   machine.Driver
	MakeSlot func(ctx context.Context) (Slot, error)
	TakeSlot func(ctx context.Context) (Slot, error)                 // quickly, for a machine that somebody waits for; nil: MakeSlot
	OpenSlot func(ctx context.Context, s machine.Slot) (Slot, error) // adopts one
	Persist  func(machine.Handle) error
	Forget   func(id string) error // undoes Persist
	Sizes    session.Sizes
	Disk     int64         // bytes a machine may write
	Pids     int           // processes and threads a machine may have
	Template string        // the recipe, see machine.Spec
	Deadline time.Duration // a machine not ready by then is given up
	// Templates builds what a machine.Keeper starts machines from; nil with a
	// driver that is none.
	Templates *Templates
}

// spec is what a machine of a kind is made from today.
func (b Bootstrap) spec(kind session.Kind) machine.Spec {
	return machine.Spec{Kind: kind, Size: b.Sizes[kind], DiskBytes: b.Disk, Pids: b.Pids, Template: b.Template}
}

// Current says whether a machine is what would be made today: its image, agent
// and size are those of this hostd's configuration.
func (b Bootstrap) Current(s machine.Spec) bool {
	s.ID, s.Slot = "", machine.Slot{}
	return s == b.spec(s.Kind)
}

// Boot makes a machine of a kind and returns it ready, or leaves nothing.
func (b Bootstrap) Boot(ctx context.Context, kind session.Kind) (*Guest, error) {
	if b.Templates != nil { // minutes, once: not part of the machine's own deadline
		if err := b.Templates.Ready(ctx, b.spec(kind)); err != nil {
			return nil, fmt.Errorf("template: %w", err)
		}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, b.Deadline, fmt.Errorf("not ready after %s", b.Deadline))
	defer cancel()
	began := time.Now()
	g, err := b.make(ctx, kind, b.Persist, b.Driver.Start)
	if err != nil {
		return nil, err
	}
	startTook(kind, "start", began)
	if err := b.Wake(ctx, g); err != nil {
		return nil, errors.Join(fmt.Errorf("boot machine: %w", err), g.Destroy())
	}
	startTook(kind, "ready", began)
	return g, nil
}

// startTook notes how long a machine took until it ran, step "start", or until
// it waited for a session, step "ready"; both since it was begun.
func startTook(kind session.Kind, step string, began time.Time) {
	daemon.Histogram(fmt.Sprintf("berth_machine_start_seconds{kind=%q,step=%q}", kind, step)).Update(time.Since(began).Seconds())
}

// Wake brings a started machine to the point where it waits for a session. A
// clone of a template must first become one of its own kind: until then it has
// the clock, the random state and the identity of all its siblings. Again it
// does no harm. What nobody may have to wait for is left for later: see Finish.
func (b Bootstrap) Wake(ctx context.Context, g *Guest) error {
	ctx, cancel := context.WithTimeoutCause(ctx, b.Deadline, fmt.Errorf("not ready after %s", b.Deadline))
	defer cancel()
	if b.Templates != nil {
		if err := g.Agent.Thaw(ctx, Thaw(true)); err != nil {
			return err
		}
	}
	return g.Agent.Ready(ctx)
}

// Finish makes in a machine what Wake leaves for later, so that whoever takes it
// does not wait for that.
func (b Bootstrap) Finish(ctx context.Context, g *Guest) error {
	if b.Templates == nil {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, b.Deadline, fmt.Errorf("not whole after %s", b.Deadline))
	defer cancel()
	return g.Agent.Whole(ctx)
}

// Thaw is what an agent needs to go on; the time is control's matter.
func Thaw(fresh bool) agentlink.Thaw {
	entropy := make([]byte, entropyBytes)
	_, _ = rand.Read(entropy) // never fails since Go 1.24
	return agentlink.Thaw{Entropy: entropy, Fresh: fresh}
}

const entropyBytes = 64

// Restore makes a machine from a capture, completely, and leaves it frozen; or
// it leaves nothing. first is called with the handle before the book has it.
func (b Bootstrap) Restore(ctx context.Context, kind session.Kind, c machine.Capture, first func(machine.Handle) error) (*Guest, error) {
	keeper, ok := b.Driver.(machine.Keeper)
	if !ok {
		return nil, fmt.Errorf("driver %s keeps no memory", b.Driver.Name())
	}
	ctx, cancel := context.WithTimeoutCause(ctx, b.Deadline, fmt.Errorf("not restored after %s", b.Deadline))
	defer cancel()
	persist := func(h machine.Handle) error {
		if err := first(h); err != nil {
			return err
		}
		return b.Persist(h)
	}
	if b.TakeSlot != nil {
		b.MakeSlot = b.TakeSlot
	}
	return b.make(ctx, kind, persist, func(ctx context.Context, spec machine.Spec, persist func(machine.Handle) error) (machine.Machine, error) {
		m, err := keeper.Restore(ctx, spec, c, persist)
		if err != nil {
			return nil, err // not m: a nil Kept is no nil Machine
		}
		return m, nil
	})
}

// make gives a machine that start makes a slot, or leaves nothing.
func (b Bootstrap) make(ctx context.Context, kind session.Kind, persist func(machine.Handle) error,
	start func(context.Context, machine.Spec, func(machine.Handle) error) (machine.Machine, error)) (*Guest, error) {
	slot, err := b.MakeSlot(ctx)
	if err != nil {
		return nil, fmt.Errorf("make slot: %w", err)
	}
	spec := b.spec(kind)
	spec.ID, spec.Slot = newID(), slot.Info()
	m, err := start(ctx, spec, persist)
	if err == nil {
		return b.guest(m, slot), nil
	}
	err = fmt.Errorf("start machine: %w", err)
	if e := b.Forget(spec.ID); e != nil { // then the slot stays its own; see Guest.Destroy
		return nil, errors.Join(err, e)
	}
	return nil, errors.Join(err, slot.Close(context.WithoutCancel(ctx)))
}

// Revive takes over a machine of an earlier hostd; machine.ErrGone when it has
// died. Its slot is touched only when the machine lives: the slot of a dead one
// is left to the sweep.
func (b Bootstrap) Revive(ctx context.Context, h machine.Handle) (*Guest, error) {
	m, err := b.Driver.Adopt(ctx, h)
	if err != nil {
		return nil, err
	}
	slot, err := b.OpenSlot(ctx, h.Spec.Slot)
	if err != nil {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), destroyTime)
		defer cancel()
		return nil, errors.Join(fmt.Errorf("adopt slot: %w", err), m.Stop(clean))
	}
	return b.guest(m, slot), nil
}

func (b Bootstrap) guest(m machine.Machine, slot Slot) *Guest {
	return &Guest{Machine: m, Slot: slot, Agent: control.New(m.Dial), Kind: m.Handle().Spec.Kind, Born: time.Now(),
		Forget: func() error { return b.Forget(m.ID()) }}
}

func newID() string {
	b := make([]byte, 8)
	_, _ = rand.Read(b) // never fails since Go 1.24
	return hex.EncodeToString(b)
}
