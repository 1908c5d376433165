package pool

import (
	"context"
	"errors"
	"net"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/session"
)

// yardDriver is a driver of one machine that notes the order of what is done.
type yardDriver struct {
	steps    []string
	start    error // of Start
	adopt    error // of Adopt
	openSlot error
	stop     error // of the machine's Stop
	forget   error
}

func (d *yardDriver) step(s string)                                     { d.steps = append(d.steps, s) }
func (d *yardDriver) Name() string                                      { return "yard" }
func (d *yardDriver) Isolation() string                                 { return "none" }
func (d *yardDriver) Check(context.Context) error                       { return nil }
func (d *yardDriver) Sweep(context.Context, func(string) bool) error    { return nil }
func (d *yardDriver) Close() error                                      { return nil }
func (d *yardDriver) Info() machine.Slot                                { return machine.Slot{Index: 7} }
func (d *yardDriver) SetEgress(func(context.Context) (net.Conn, error)) {}
func (d *yardDriver) ID() string                                        { return "m" }
func (d *yardDriver) Handle() machine.Handle                            { return machine.Handle{} }
func (d *yardDriver) Promote(context.Context) error                     { return nil }
func (d *yardDriver) Done() <-chan struct{}                             { return nil }
func (d *yardDriver) Dial(context.Context) (net.Conn, error)            { return nil, errors.New("no agent") }
func (d *yardDriver) Stop(context.Context) error                        { d.step("stop machine"); return d.stop }
func (d *yardDriver) Adopt(context.Context, machine.Handle) (machine.Machine, error) {
	d.step("adopt machine")
	return d, d.adopt
}

func (d *yardDriver) Start(_ context.Context, spec machine.Spec, persist func(machine.Handle) error) (machine.Machine, error) {
	if err := persist(machine.Handle{Spec: spec}); err != nil {
		return nil, err
	}
	d.step("start machine")
	return d, d.start
}

// yardSlot notes its end.
type yardSlot struct{ *yardDriver }

func (s yardSlot) Close(context.Context) error { s.step("close slot"); return nil }

func (d *yardDriver) bootstrap() Bootstrap {
	slot := func() (Slot, error) { d.step("slot"); return yardSlot{d}, d.openSlot }
	return Bootstrap{Driver: d, Deadline: time.Minute,
		MakeSlot: func(context.Context) (Slot, error) { return slot() },
		OpenSlot: func(context.Context, machine.Slot) (Slot, error) { return slot() },
		Persist:  func(machine.Handle) error { d.step("persist"); return nil },
		Forget:   func(string) error { d.step("forget"); return d.forget }}
}

// The slot of a machine may be given out again only when the machine is gone
// and the book does not name the slot for it any more.
func TestStepsOfBootAndRevive(t *testing.T) {
	broken := errors.New("broken")
	boot := func(b Bootstrap) error { _, err := b.Boot(t.Context(), session.Shell); return err }
	revive := func(b Bootstrap) error { _, err := b.Revive(t.Context(), machine.Handle{}); return err }
	cases := []struct {
		name   string
		driver yardDriver
		do     func(Bootstrap) error
		err    error
		want   []string
	}{
		{"no start", yardDriver{start: broken}, boot, broken, []string{"slot", "persist", "start machine", "forget", "close slot"}},
		{"no start, and the book is stuck", yardDriver{start: broken, forget: broken}, boot, broken, []string{"slot", "persist", "start machine", "forget"}},
		{"no agent", yardDriver{}, boot, nil, []string{"slot", "persist", "start machine", "stop machine", "forget", "close slot"}},
		{"no agent, and it does not stop", yardDriver{stop: broken}, boot, broken, []string{"slot", "persist", "start machine", "stop machine"}},
		{"dead when revived: its slot may be another's now", yardDriver{adopt: machine.ErrGone}, revive, machine.ErrGone, []string{"adopt machine"}},
		{"revived without its slot", yardDriver{openSlot: broken}, revive, broken, []string{"adopt machine", "slot", "stop machine"}},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			err := c.do(c.driver.bootstrap())
			if err == nil || c.err != nil && !errors.Is(err, c.err) {
				t.Errorf("error %v, want %v", err, c.err)
			}
			if !slices.Equal(c.driver.steps, c.want) {
				t.Errorf("did %q, want %q", c.driver.steps, c.want)
			}
		})
	}
}
