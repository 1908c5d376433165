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
	"github.com/berth-dev/berth/shared/session"
)

// Bootstrap is what a boot needs.
type Bootstrap struct {
	Driver   machine.Driver
	MakeSlot func(ctx context.Context) (Slot, error)
	OpenSlot func(ctx context.Context, s machine.Slot) (Slot, error) // adopts one
	Persist  func(machine.Handle) error
	Forget   func(id string) error // undoes Persist
	Sizes    session.Sizes
	Disk     int64         // bytes a machine may write
	Pids     int           // processes and threads a machine may have
	Template string        // see machine.Spec
	Deadline time.Duration // a machine not ready by then is given up
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
func (b Bootstrap) Boot(ctx context.Context, kind session.Kind) (_ *Guest, err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, b.Deadline, fmt.Errorf("not ready after %s", b.Deadline))
	defer cancel()
	slot, err := b.MakeSlot(ctx)
	if err != nil {
		return nil, fmt.Errorf("make slot: %w", err)
	}
	spec := b.spec(kind)
	spec.ID, spec.Slot = newID(), slot.Info()
	m, err := b.Driver.Start(ctx, spec, b.Persist)
	if err != nil {
		err = fmt.Errorf("start machine: %w", err)
		if e := b.Forget(spec.ID); e != nil { // then the slot stays its own; see Guest.Destroy
			return nil, errors.Join(err, e)
		}
		return nil, errors.Join(err, slot.Close(context.WithoutCancel(ctx)))
	}
	g := b.guest(m, slot)
	if err := g.Agent.Ready(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("boot machine: %w", err), g.Destroy())
	}
	return g, nil
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
