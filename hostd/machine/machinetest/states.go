package machinetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
)

// pids gives the host's pids of a slot's processes; first is the machine's
// first process, 0 where it is not seen.
func (r *Rig) pids(s machine.Slot) (all []int, first int) {
	entries, _ := filepath.Glob("/proc/[0-9]*") // the pattern is good
	for _, dir := range entries {
		status, err := os.ReadFile(filepath.Join(dir, "status"))
		if err != nil || !uidWithin(string(status), s.UIDBase) {
			continue
		}
		pid, _ := strconv.Atoi(filepath.Base(dir)) // digits by the pattern
		all = append(all, pid)
		// NSpid lists the pid in each namespace, outermost first (proc(5)).
		_, rest, _ := strings.Cut(string(status), "\nNSpid:")
		line, _, _ := strings.Cut(rest, "\n")
		if fields := strings.Fields(line); len(fields) == 2 && fields[1] == "1" {
			first = pid
		}
	}
	return all, first
}

// signal sends a signal to every process of the machine from the host.
func (r *Rig) signal(s machine.Slot, sig syscall.Signal) {
	all, _ := r.pids(s)
	for _, pid := range all {
		_ = syscall.Kill(pid, sig) // may have ended
	}
}

// killFirst kills a machine's first process from the host and waits until all
// its threads have ended, which its being a zombie does not yet say.
func (r *Rig) killFirst(s machine.Slot) {
	r.Helper()
	_, first := r.pids(s)
	fd, err := unix.PidfdOpen(first, 0)
	if err != nil {
		r.Fatalf("first process %d: %v", first, err)
	}
	defer unix.Close(fd)
	if err := unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0); err != nil {
		r.Fatal(err)
	}
	r.Until("it dies", func() bool {
		n, _ := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, 0)
		return n == 1
	})
}

func stopInEveryState(r *Rig) {
	states := map[string]func(m machine.Machine, s machine.Slot){
		"fresh":   func(machine.Machine, machine.Slot) {},
		"stopped": func(_ machine.Machine, s machine.Slot) { r.signal(s, syscall.SIGSTOP) },
		"busy": func(m machine.Machine, _ machine.Slot) {
			r.Sh(m, "for i in $(seq 50); do sleep 1000 & done; setsid nohup sleep 1000 >/dev/null 2>&1 &")
		},
		"fork bomb": func(m machine.Machine, s machine.Slot) {
			go func() { _, _ = Ask(r.Context(), m, "sh", forkBomb, 0) }() // ends with the machine
			r.Until("the bomb spreads", func() bool { all, _ := r.pids(s); return len(all) > 50 })
		},
		"dead": func(m machine.Machine, s machine.Slot) {
			r.killFirst(s)
			r.WantDone(m)
		},
		"deleted files": func(m machine.Machine, _ machine.Slot) {
			r.Sh(m, "rm -rf /etc /usr/bin /usr/sbin /workspace 2>/dev/null; true")
		},
		"dirty disk": func(m machine.Machine, _ machine.Slot) {
			r.Sh(m, "dd if=/dev/zero of=/workspace/x bs=1M count=100 2>/dev/null")
		},
	}
	if r.subject.OwnKernel {
		delete(states, "fork bomb") // nobody outside sees it spread
	}
	for name, enter := range states {
		spec := r.Spec()
		m := r.Start(spec)
		r.Ask(m, "echo", "up")
		enter(m, spec.Slot)
		begin := time.Now()
		var wg sync.WaitGroup
		for range 3 { // callers at once get one result
			wg.Go(func() { r.Stop(m) })
		}
		wg.Wait()
		r.Logf("%s: stopped in %v", name, time.Since(begin).Round(time.Millisecond))
		r.WantDone(m)
		r.WantNothing()
	}
}

// stopWithoutPatience: a caller that leaves does not end the work.
func stopWithoutPatience(r *Rig) {
	m := r.Start(r.Spec())
	ctx, cancel := context.WithCancel(r.Context())
	cancel()
	if err := m.Stop(ctx); err != nil && !errors.Is(err, context.Canceled) {
		r.Errorf("stop: %v", err)
	}
	r.Stop(m)
	r.WantNothing()
}

func killedFirstProcess(r *Rig) {
	spec := r.Spec()
	m := r.Start(spec)
	r.Ask(m, "echo", "up")
	r.killFirst(spec.Slot)
	r.WantDone(m)
	r.Stop(m)
	r.WantNothing()
}

func adopt(r *Rig) {
	m := r.Start(r.Spec())
	r.Sh(m, "echo kept > /workspace/note")
	handle := m.Handle()
	r.Restart()
	adopted, err := r.Driver.Adopt(r.Context(), handle)
	if err != nil {
		r.Fatal(err)
	}
	if got := r.Sh(adopted, "cat /workspace/note"); got != "kept" {
		r.Errorf("after adoption the file holds %q", got)
	}
	if err := adopted.Promote(r.Context()); err != nil {
		r.Error(err)
	}
	select {
	case <-m.Done():
		r.Error("letting go of a machine looked like its end")
	default:
	}
	r.Stop(adopted)
	r.WantDone(adopted)
	r.WantNothing()
}

func adoptTheDead(r *Rig) {
	spec := r.Spec()
	m := r.Start(spec)
	handle := m.Handle()
	r.Restart()
	r.killFirst(spec.Slot)
	if _, err := r.Driver.Adopt(r.Context(), handle); !errors.Is(err, machine.ErrGone) {
		r.Errorf("adopting a dead machine gave %v", err)
	}
	r.WantNothing()

	handle.Spec = r.SpecIn(spec.Slot) // persisted, then crashed before anything was made
	if _, err := r.Driver.Adopt(r.Context(), handle); !errors.Is(err, machine.ErrGone) {
		r.Errorf("adopting a machine that never was gave %v", err)
	}
	handle.Version += 1000
	if _, err := r.Driver.Adopt(r.Context(), handle); err == nil || errors.Is(err, machine.ErrGone) {
		r.Errorf("a handle of another version gave %v", err)
	}
}

func sweep(r *Rig) {
	keep, drop := r.Spec(), r.Spec()
	handle := r.Start(keep).Handle()
	r.Start(drop)
	r.Restart()
	if err := r.Driver.Sweep(r.Context(), func(id string) bool { return id == keep.ID }); err != nil {
		r.Error(err)
	}
	if all, _ := r.pids(drop.Slot); len(all) > 0 && !onlyZombies(r.processesOf(drop.Slot)) {
		r.Errorf("processes %v outlived the sweep", all)
	}
	m, err := r.Driver.Adopt(r.Context(), handle)
	if err != nil {
		r.Fatal(err)
	}
	if got := r.Ask(m, "echo", "kept"); got.Text != "kept" {
		r.Errorf("echo gave %q", got.Text)
	}
	r.Stop(m)
	r.WantNothing()
}

// crashedHost kills a process that starts a machine at moments all over the
// start, and sweeps.
func crashedHost(r *Rig) {
	self, err := os.Executable()
	if err != nil {
		r.Fatal(err)
	}
	slot := r.Spec().Slot
	for after := 5 * time.Millisecond; after < 200*time.Millisecond; after += 13 * time.Millisecond {
		c := crash{Home: r.Home, Base: r.Base, Layer: r.Layer, Spec: r.SpecIn(slot)}
		host := exec.Command(self)
		host.Env = append(os.Environ(), c.env())
		ready, err := host.StdoutPipe()
		if err != nil {
			r.Fatal(err)
		}
		if err := host.Start(); err != nil {
			r.Fatal(err)
		}
		_, _ = ready.Read(make([]byte, 1)) // the start begins
		time.AfterFunc(after, func() { _ = host.Process.Kill() })
		_ = host.Wait() // killed
		if err := r.Driver.Sweep(r.Context(), func(string) bool { return false }); err != nil {
			r.Errorf("sweep after a crash at %v: %v", after, err)
		}
		r.WantNothing()
	}
}

// crashNow is the process that crashedHost kills.
func crashNow(s Subject, c crash) {
	var t testing.T // New needs one to fail on
	d, _ := s.New(&t, c.Home, c.Base, c.Layer)
	fmt.Print("!")
	_, err := d.Start(context.Background(), c.Spec, Ignore)
	fmt.Fprintln(os.Stderr, "not killed in time:", err)
	select {}
}
