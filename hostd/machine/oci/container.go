package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/cgroup"
)

// container is one running machine. Immutable but for what its Onces guard.
type container struct {
	driver *Driver
	handle machine.Handle
	first  *cgroup.Process
	// console is the log of the machine's first process, on the machine's
	// disk; nil for an adopted machine. While open it keeps that disk mounted.
	console *os.File

	done     chan struct{} // closed by watch
	watched  chan struct{} // closed when watch has returned
	detached sync.Once
	stop     sync.Once
	stopped  chan struct{} // closed when stopErr is set
	stopErr  error         // written before stopped is closed
}

var _ machine.Machine = (*container)(nil)

func newContainer(d *Driver, h machine.Handle, first *cgroup.Process, console *os.File) *container {
	return &container{driver: d, handle: h, first: first, console: console,
		done: make(chan struct{}), watched: make(chan struct{}), stopped: make(chan struct{})}
}

func (c *container) ID() string               { return c.handle.Spec.ID }
func (c *container) Handle() machine.Handle   { return c.handle }
func (c *container) Done() <-chan struct{}    { return c.done }
func (c *container) group() string            { return c.driver.group(c.ID()) }
func (c *container) socketDir() string        { return c.driver.dir(c.ID()) }
func (c *container) shares(one uint64) uint64 { return one * uint64(c.handle.Spec.Size.VCPU) }

// watch closes done when the first process exits.
func (c *container) watch() {
	defer close(c.watched)
	if c.first.Wait() {
		c.first.Reap()
		close(c.done)
	}
}

// detach ends what this Driver value keeps of the machine, not the machine.
func (c *container) detach() {
	c.detached.Do(func() {
		_ = c.first.Close()
		<-c.watched
		if c.console != nil {
			_ = c.console.Close()
		}
	})
}

// Dial connects to the agent's socket by way of an open folder: a socket's
// address has room for 107 bytes of path only (unix(7)).
func (c *container) Dial(ctx context.Context) (net.Conn, error) {
	dir, err := unix.Open(c.socketDir(), unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", c.ID(), err)
	}
	defer unix.Close(dir)
	var dialer net.Dialer
	conn, err := dialer.DialContext(ctx, "unix", "/proc/self/fd/"+strconv.Itoa(dir)+"/"+socketName)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", c.ID(), err)
	}
	return conn, nil
}

// Promote gives the machine its full CPU share.
func (c *container) Promote(context.Context) error {
	if err := c.driver.groups.SetShares(c.group(), c.shares(fullShares)); err != nil {
		return fmt.Errorf("promote %s: %w", c.ID(), err)
	}
	return nil
}

// Stop ends the machine and removes everything of it. The first call's work
// goes on when a later caller's context ends; that caller gets its own
// context's error.
func (c *container) Stop(ctx context.Context) error {
	go c.stop.Do(func() {
		clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
		defer cancel()
		c.stopErr = c.end(clean)
		close(c.stopped)
	})
	select {
	case <-c.stopped:
		return c.stopErr
	case <-ctx.Done():
		return fmt.Errorf("stop %s: %w", c.ID(), context.Cause(ctx))
	}
}

func (c *container) end(ctx context.Context) error {
	select {
	case <-c.done: // nobody asked it to: its last words tell why
		c.driver.cfg.Log.Warn("machine ended by itself", "machine", c.ID(), "console", c.lastWords())
	default:
	}
	d := c.driver
	err := d.kill(ctx, c.ID())
	if err == nil {
		select {
		case <-c.watched: // closes done before Stop returns
		case <-ctx.Done():
		}
	}
	c.detach() // lets go of the disk
	err = errors.Join(err, d.remove(ctx, c.ID()))
	d.mu.Lock()
	if d.live[c.ID()] == c {
		delete(d.live, c.ID())
	}
	d.mu.Unlock()
	if err != nil {
		return fmt.Errorf("stop %s: %w", c.ID(), err)
	}
	return nil
}

// lastWords is the end of the console log, at most 2 KiB.
func (c *container) lastWords() string {
	if c.console == nil {
		return ""
	}
	info, err := c.console.Stat()
	if err != nil {
		return ""
	}
	tail, _ := io.ReadAll(io.NewSectionReader(c.console, max(0, info.Size()-2048), 2048)) // what can be read is enough
	return string(bytes.TrimSpace(tail))
}

// kill ends the machine's processes.
func (d *Driver) kill(ctx context.Context, id string) error { return d.groups.Kill(ctx, d.group(id)) }

// remove ends a machine in whatever state it is, whole, half-made or
// half-removed, and removes everything of it. The folder goes last: while it
// is there, Sweep finds the machine.
func (d *Driver) remove(ctx context.Context, id string) error {
	if err := d.kill(ctx, id); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	if err := d.groups.Rmdir(ctx, d.group(id)); err != nil {
		return err
	}
	if err := d.diskGone(ctx, d.dir(id)); err != nil {
		return err
	}
	// The folder holds only what hostd and runc wrote: the guest's files were
	// never mounted in this namespace.
	if err := os.RemoveAll(d.dir(id)); err != nil {
		return fmt.Errorf("remove folder: %w", err)
	}
	return nil
}

// diskGone waits until the kernel has taken the machine's mounts apart, which
// it does after the last process is gone.
func (d *Driver) diskGone(ctx context.Context, dir string) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		loops := loopsBelow(dir)
		if len(loops) == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s still holds the disk: %w", filepath.Join("/dev", loops[0]), context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}
