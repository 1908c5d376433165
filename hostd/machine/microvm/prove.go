package microvm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/session"
)

// proven says whether something has been tried here and worked; what it depends
// on is in its name.
func (d *Driver) proven(what string) bool {
	_, err := os.Stat(filepath.Join(d.store.dir, "proofs", hashOf([]byte(what))))
	return err == nil
}

func (d *Driver) setProven(what string) error {
	return d.store.put("proofs", hashOf([]byte(what)), what+"\n")
}

// prove tries once, for each template, CPU class and build of QEMU, what every
// pause and move stands on: a clone is captured and restored, and a TCP
// connection that was opened before goes on after, which only a kernel with its
// memory can do: its sequence numbers are the counter. A template that fails is
// not used.
func (d *Driver) prove(ctx context.Context, t *template) error {
	what := "capture and restore: " + d.class + " " + t.hash
	if d.proven(what) {
		return nil
	}
	begin := time.Now()
	if err := d.try(ctx, t); err != nil {
		return fmt.Errorf("machines do not survive capture and restore on this host: %w", err)
	}
	d.cfg.Log.Info("capture and restore work", "template", t.hash, "seconds", time.Since(begin).Seconds())
	return d.setProven(what)
}

func (d *Driver) try(ctx context.Context, t *template) (err error) {
	n, err := newBuildNet()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, n.Close()) }()
	before, err := d.tryStart(ctx, t, n, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, before.Stop(context.WithoutCancel(ctx))) }()
	conn, err := before.Dial(ctx)
	if err != nil {
		return err
	}
	defer conn.Close()
	if err := before.Freeze(ctx); err != nil {
		return err
	}
	c, err := before.Capture(ctx)
	if err != nil {
		return err
	}
	after, err := d.tryStart(ctx, t, n, c)
	if err := errors.Join(err, c.Close()); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, after.Stop(context.WithoutCancel(ctx))) }()
	if err := errors.Join(before.Stop(ctx), after.Thaw(ctx)); err != nil {
		return err
	}
	var used atomic.Bool
	return d.cfg.Ready(ctx, func(ctx context.Context) (net.Conn, error) {
		if used.CompareAndSwap(false, true) {
			return conn, nil
		}
		return after.Dial(ctx)
	})
}

// tryStart starts a machine in the network of a build. Nobody is told of it:
// what a crash leaves, the sweep takes.
func (d *Driver) tryStart(ctx context.Context, t *template, n *buildNet, c machine.Capture) (*vm, error) {
	spec := machine.Spec{ID: newID(), Size: session.Size{VCPU: t.meta.VCPU, GiB: int(t.meta.RAM.Size >> 30)},
		Slot: machine.Slot{NetNS: n.path(), UIDBase: buildUID}}
	return d.startFrom(ctx, t, spec, c, n.tap, func(machine.Handle) error { return nil })
}

// trialTime is what a kernel gets to come up and end: a second is plenty with
// virtualisation that works.
const trialTime = 30 * time.Second

// trial runs a guest that only has a kernel, which panics for want of anything
// else and so shows that it came to life.
func (d *Driver) trial(ctx context.Context) error {
	kernel, err := d.store.sum(d.bootFile("vmlinuz"))
	if err != nil {
		return err
	}
	what := "trial guest: " + d.class + " " + kernel.Hash
	if d.proven(what) {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, trialTime, fmt.Errorf("it did not end within %s", trialTime))
	defer cancel()
	if err := d.runTrial(ctx); err != nil {
		return fmt.Errorf("a trial guest does not run with accelerator %s, although the processor offers it: %w", d.accel.name, err)
	}
	return d.setProven(what)
}

func (d *Driver) runTrial(ctx context.Context) (err error) {
	b := &build{driver: d, id: newID(), spec: machine.Spec{Size: session.Size{VCPU: 1, GiB: 1}}}
	if err := os.Mkdir(d.dir(b.id), 0o700); err != nil {
		return err
	}
	defer func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		err = errors.Join(err, b.close(clean))
	}()
	if err := b.bootKernelOnly(); err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = b.process.Kill() })()
	if !b.process.Wait() {
		return errors.New("lost sight of QEMU")
	}
	if ctx.Err() != nil {
		return b.why(context.Cause(ctx))
	}
	if words := d.lastWords(b.id); !strings.Contains(words, "Kernel panic") {
		return fmt.Errorf("it ended otherwise than by its panic; console: %s", words)
	}
	return nil
}

func (b *build) bootKernelOnly() (err error) {
	d := b.driver
	if b.ram, err = memoryFile(ramName); err != nil {
		return err
	}
	const size = 128 << 20
	if err := b.ram.Truncate(size); err != nil {
		return err
	}
	kernel, err := memoryCopy(d.bootFile("vmlinuz"))
	if err != nil {
		return err
	}
	defer kernel.Close()
	console, err := os.OpenFile(filepath.Join(d.dir(b.id), logName), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer console.Close()
	if err := d.groups.Make(d.group(b.id), d.limits(b.spec)); err != nil {
		return err
	}
	var c command
	c.machine(d.accel, 1, b.ram, size, true)
	c.console(console)
	c.boot(kernel, nil, "console=ttyS0 panic=-1 reboot=t"+d.accel.params())
	b.process, err = d.spawn(b.id, buildUID, size, c)
	return err
}
