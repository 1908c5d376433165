package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/agentlink"
)

// More names inside a machine's folder.
const (
	socketName = "agent.sock"
	bundleName = "config.json"
	runcState  = "runc"     // runc's own state, this machine's alone
	halfPid    = "init.tmp" // the first process's pid, written by runc
	pidName    = "init.pid" // the same once the machine has started: what Adopt looks for
)

// cleanupTime bounds the removal of a machine whose start failed, which goes
// on when the start's context has ended.
const cleanupTime = 15 * time.Second

// Start boots a machine; see machine.Driver. The agent's socket listens before
// the agent runs, so Dial works at once and waits for the agent to accept.
func (d *Driver) Start(ctx context.Context, spec machine.Spec, persist func(machine.Handle) error) (machine.Machine, error) {
	if err := checkSpec(spec); err != nil {
		return nil, fmt.Errorf("start: %w", err)
	}
	handle := machine.Handle{Driver: driverName, Version: handleVersion, Spec: spec}
	if err := persist(handle); err != nil {
		return nil, fmt.Errorf("start %s: persist: %w", spec.ID, err)
	}
	// Not MkdirAll: a folder that exists is another machine's, to be left alone.
	if err := os.Mkdir(d.dir(spec.ID), 0o700); err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.ID, err)
	}
	c, err := d.boot(ctx, handle)
	if err == nil {
		return c, nil
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	return nil, fmt.Errorf("start %s: %w", spec.ID, errors.Join(err, d.remove(clean, spec.ID)))
}

func checkSpec(spec machine.Spec) error {
	switch {
	case !validID.MatchString(spec.ID):
		return fmt.Errorf("id %q is not lower-case hex of 1 to 64 digits", spec.ID)
	case spec.DiskBytes < minDisk || spec.DiskBytes%4096 != 0:
		return fmt.Errorf("diskBytes is %d, want a multiple of 4096 from %d", spec.DiskBytes, minDisk)
	case spec.Pids < 1:
		return fmt.Errorf("pids is %d, want at least 1", spec.Pids)
	case spec.Size.VCPU < 1 || spec.Size.GiB < 1:
		return fmt.Errorf("size is %d processors and %d GiB, want at least 1 of each", spec.Size.VCPU, spec.Size.GiB)
	case spec.Slot.UIDBase < idRange:
		return fmt.Errorf("slot.uidBase is %d, want at least %d: lower ids are the host's", spec.Slot.UIDBase, idRange)
	case !filepath.IsAbs(spec.Slot.NetNS):
		return fmt.Errorf("slot.netns is %q, want a path", spec.Slot.NetNS)
	}
	return nil
}

// boot does everything after the machine's folder exists; on error the caller
// removes what it made.
func (d *Driver) boot(ctx context.Context, handle machine.Handle) (*container, error) {
	spec, dir := handle.Spec, d.dir(handle.Spec.ID)
	ns, err := d.idmaps.get(spec.Slot.UIDBase)
	if err != nil {
		return nil, err
	}
	if err := d.writeBundle(filepath.Join(dir, bundleName), spec); err != nil {
		return nil, fmt.Errorf("bundle: %w", err)
	}
	var console *os.File
	err = inOwnMounts(func() error {
		if err := unix.Chdir(dir); err != nil {
			return err
		}
		if err := d.mountRoot(spec, ns); err != nil {
			return err
		}
		socket, err := listen(socketName)
		if err != nil {
			return fmt.Errorf("agent socket: %w", err)
		}
		defer socket.Close()
		if console, err = os.OpenFile(filepath.Join(diskDir, consoleLog), os.O_CREATE|os.O_APPEND|os.O_RDWR, 0o600); err != nil {
			return err
		}
		return d.runc(ctx, spec.ID, socket, console)
	})
	if err != nil {
		return nil, closeAll(err, console)
	}
	c, err := d.attach(handle, filepath.Join(dir, halfPid), console)
	if err != nil {
		return nil, closeAll(err, console)
	}
	if err := os.Rename(filepath.Join(dir, halfPid), filepath.Join(dir, pidName)); err != nil {
		c.detach()
		return nil, err
	}
	return c, nil
}

func closeAll(err error, f *os.File) error {
	if f != nil {
		return errors.Join(err, f.Close())
	}
	return err
}

// listen makes the agent's socket in the working directory, as a bare
// descriptor: Go's listener would make it non-blocking, which its copies share.
func listen(name string) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	socket := os.NewFile(uintptr(fd), name)
	if err := unix.Bind(fd, &unix.SockaddrUnix{Name: name}); err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	if err := unix.Listen(fd, unix.SOMAXCONN); err != nil {
		return nil, errors.Join(err, socket.Close())
	}
	return socket, nil
}

// runc creates and starts the container. It runs on the caller's thread, so
// that runc is in the caller's mount namespace and, by Pdeathsig, never
// outlives hostd: a half-made container is then what Sweep finds.
func (d *Driver) runc(ctx context.Context, id string, socket, console *os.File) error {
	dir := d.dir(id)
	var says bytes.Buffer
	logs, err := os.CreateTemp(dir, "runc-log-")
	if err != nil {
		return err
	}
	defer logs.Close()
	cmd := exec.CommandContext(ctx, d.cfg.Runc, "--root", filepath.Join(dir, runcState), "--log", logs.Name(),
		"run", "--detach", "--bundle", dir, "--pid-file", filepath.Join(dir, halfPid),
		"--preserve-fds", strconv.Itoa(agentlink.ListenFD-2), id)
	// Files, not pipes: the machine inherits them.
	cmd.Stdout, cmd.Stderr = console, console
	cmd.ExtraFiles = []*os.File{socket}
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Run(); err != nil {
		_, _ = says.ReadFrom(logs) // best effort: the error is there without it
		if ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		return fmt.Errorf("runc: %w: %s", err, strings.TrimSpace(says.String()))
	}
	return nil
}

// Adopt takes a running machine over; see machine.Driver.
func (d *Driver) Adopt(ctx context.Context, h machine.Handle) (machine.Machine, error) {
	if h.Driver != driverName || h.Version != handleVersion || !validID.MatchString(h.Spec.ID) {
		return nil, fmt.Errorf("adopt: handle of driver %q version %d and id %q is not one of %s version %d",
			h.Driver, h.Version, h.Spec.ID, driverName, handleVersion)
	}
	c, err := d.attach(h, filepath.Join(d.dir(h.Spec.ID), pidName), nil)
	if err == nil {
		return c, nil
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if err := d.remove(clean, h.Spec.ID); err != nil {
		return nil, fmt.Errorf("adopt %s: %w", h.Spec.ID, err)
	}
	return nil, fmt.Errorf("adopt %s: %w: %w", h.Spec.ID, machine.ErrGone, err)
}

// attach makes the running container of the pid in a file this Driver's.
func (d *Driver) attach(h machine.Handle, pidFile string, console *os.File) (*container, error) {
	data, err := os.ReadFile(pidFile)
	if err != nil {
		return nil, err
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(data)))
	if err != nil {
		return nil, fmt.Errorf("pid file: %w", err)
	}
	first, err := d.groups.Open(d.group(h.Spec.ID), pid)
	if err != nil {
		return nil, err
	}
	c := newContainer(d, h, first, console)
	d.mu.Lock()
	d.live[h.Spec.ID] = c
	d.mu.Unlock()
	go c.watch()
	return c, nil
}
