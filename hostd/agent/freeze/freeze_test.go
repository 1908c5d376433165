package freeze

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

// inside is set for the copy of the test program that is process 1 of a
// process namespace, as signals need one to be sure of what they meet.
const inside = "BERTH_FREEZE_INSIDE"

func TestMain(m *testing.M) {
	if os.Getenv(inside) != "" {
		signal.Ignore(syscall.SIGCHLD) // orphans come to process 1: nobody has to wait for them
		if err := errors.Join(unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""), unix.Mount("proc", "/proc", "proc", 0, "")); err != nil {
			fmt.Fprintln(os.Stderr, "mount:", err)
			os.Exit(1)
		}
	}
	goleak.VerifyTestMain(m)
}

func openSignals(t *testing.T) *Freezer {
	f := Open(Config{Machine: true, BrowserGID: 900}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	t.Cleanup(func() { closed(t, f) })
	return f
}

func openGroups(t *testing.T) *Freezer {
	t.Helper()
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		dir := filepath.Join(root, "berth-freeze-"+strconv.Itoa(os.Getpid()))
		if os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() { _ = unix.Rmdir(dir) })
		groups, err := openCgroups(dir)
		if err != nil {
			continue
		}
		f := &Freezer{how: groups}
		t.Cleanup(func() { closed(t, f) })
		return f
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("no cgroup v2 that this process may write")
	}
	t.Skip("no cgroup v2 that this process may write")
	return nil
}

func closed(t *testing.T, f *Freezer) {
	if err := f.Close(); err != nil {
		t.Errorf("close: %v", err)
	}
}

// everyWay runs a test with cgroups, and with signals in a process namespace.
func everyWay(t *testing.T, test func(t *testing.T, f *Freezer)) {
	if os.Getenv(inside) != "" {
		test(t, openSignals(t))
		return
	}
	t.Run("cgroups", func(t *testing.T) { test(t, openGroups(t)) })
	t.Run("signals", func(t *testing.T) {
		if os.Getuid() != 0 {
			t.Skip("only root can make a process namespace")
		}
		top := strings.Split(t.Name(), "/")[0]
		cmd := exec.Command("/proc/self/exe", "-test.run=^"+top+"$", "-test.v")
		cmd.Env = append(os.Environ(), inside+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: "+top) {
			t.Fatalf("%v\n%s", err, out)
		}
	})
}

func run(t *testing.T, f *Freezer, part Part, script string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/bin/bash", "-c", script)
	cmd.Dir = t.TempDir()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	leave, err := f.Enter(t.Context(), part)
	if err != nil {
		t.Fatal(err)
	}
	defer leave()
	if err := f.Start(part, cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return cmd
}

func size(file string) int64 {
	info, err := os.Stat(file)
	if err != nil {
		return 0
	}
	return info.Size()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// killed ends the process that wrote its number into a file.
func killed(t *testing.T, file string) {
	t.Helper()
	b, _ := os.ReadFile(file)
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		t.Error(err)
		return
	}
	_ = syscall.Kill(pid, syscall.SIGKILL)
}

// stands looks for a while whether a file grows.
func stands(file string) bool {
	before := size(file)
	for end := time.Now().Add(100 * time.Millisecond); time.Now().Before(end); time.Sleep(5 * time.Millisecond) {
		if size(file) != before {
			return false
		}
	}
	return true
}

// counters: one in the foreground, one detached by a double fork with a session
// and an environment of its own.
const counters = `count() { while :; do echo x >>"$1"; done; }; export -f count
(setsid env -i "PATH=$PATH" bash -c 'echo $$ >pid; while :; do echo x >>away; done' &) &
count near`

func TestCountersStandStill(t *testing.T) {
	everyWay(t, func(t *testing.T, f *Freezer) {
		cmd := run(t, f, Customer, counters)
		chrome := run(t, f, Browser, `while :; do echo x >>chrome; done`)
		near, away, other := filepath.Join(cmd.Dir, "near"), filepath.Join(cmd.Dir, "away"), filepath.Join(chrome.Dir, "chrome")
		defer killed(t, filepath.Join(cmd.Dir, "pid")) // with signals nothing else would
		eventually(t, "both count", func() bool { return size(near) > 0 && size(away) > 0 && size(other) > 0 })
		for range 3 {
			began := time.Now()
			for range 2 { // idempotent
				if err := f.Freeze(t.Context(), Customer); err != nil {
					t.Fatal(err)
				}
			}
			t.Logf("frozen in %v", time.Since(began))
			if !stands(near) || !stands(away) {
				t.Fatal("something of the customer runs while frozen")
			}
			was := size(other)
			eventually(t, "the browser runs while the customer stands still", func() bool { return size(other) > was })
			if err := f.Freeze(t.Context(), Browser); err != nil {
				t.Fatal(err)
			}
			if !stands(other) {
				t.Fatal("the browser runs while frozen")
			}
			if err := errors.Join(f.Thaw(Customer, Browser), f.Thaw(Customer)); err != nil {
				t.Fatal(err)
			}
			for _, file := range []string{near, away, other} {
				was = size(file)
				eventually(t, file+" goes on", func() bool { return size(file) > was })
			}
		}
	})
}

// TestForegroundJobIsNotDisturbed: an interactive bash must not say "Stopped",
// and what the customer has stopped stays so.
func TestForegroundJobIsNotDisturbed(t *testing.T) {
	everyWay(t, func(t *testing.T, f *Freezer) {
		ptm, pts, err := openPTY()
		if err != nil {
			t.Fatal(err)
		}
		defer ptm.Close()
		dir := t.TempDir()
		cmd := exec.Command("/bin/bash", "--norc", "--noprofile", "-i")
		cmd.Dir, cmd.Stdin, cmd.Stdout, cmd.Stderr = dir, pts, pts, pts
		cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
		if err := f.Start(Customer, cmd); err != nil {
			t.Fatal(err)
		}
		pts.Close()
		screen := make(chan string, 1)
		go func() {
			b, _ := io.ReadAll(ptm) // ends with EIO
			screen <- string(b)
		}()
		_, _ = io.WriteString(ptm, "bash -c 'echo $$ >pid; kill -STOP $$; echo resumed >resumed' & until [[ $(</proc/$!/stat) == *') T '* ]]; do sleep 0.01; done; bash -c 'while [ ! -e stop ]; do echo x >>job; sleep 0.01; done'; echo code=$? >done; exit\n")
		job := filepath.Join(dir, "job")
		eventually(t, "the job runs", func() bool { return size(job) > 0 })
		for range 5 {
			if err := f.Freeze(t.Context(), Customer); err != nil {
				t.Fatal(err)
			}
			if !stands(job) {
				t.Fatal("the job runs while frozen")
			}
			if err := f.Thaw(Customer); err != nil {
				t.Fatal(err)
			}
			was := size(job)
			eventually(t, "the job goes on", func() bool { return size(job) > was })
		}
		if size(filepath.Join(dir, "resumed")) != 0 {
			t.Error("a process that the customer had stopped goes on")
		}
		if err := os.WriteFile(filepath.Join(dir, "stop"), nil, 0o600); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the job ended", func() bool { return size(filepath.Join(dir, "done")) > 0 })
		if b, _ := os.ReadFile(filepath.Join(dir, "done")); string(b) != "code=0\n" {
			t.Errorf("the job ended with %s", b)
		}
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if text := <-screen; strings.Count(text, "Stopped") > 1 { // the customer's own
			t.Errorf("bash was disturbed:\n%s", text)
		}
		killed(t, filepath.Join(dir, "pid"))
	})
}

func TestForksStandStill(t *testing.T) {
	everyWay(t, func(t *testing.T, f *Freezer) {
		cmd := run(t, f, Customer, `while :; do (/bin/true; echo x >>forks) & (setsid sh -c 'echo x >>forks' &); wait; done`)
		file := filepath.Join(cmd.Dir, "forks")
		for range 5 {
			was := size(file)
			eventually(t, "it forks", func() bool { return size(file) > was })
			if err := f.Freeze(t.Context(), Customer); err != nil {
				t.Fatal(err)
			}
			if !stands(file) {
				t.Fatal("something runs while frozen")
			}
			if err := f.Thaw(Customer); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// TestNoForkEscapes looks at the processes themselves: a signal may find one in
// the middle of a fork, whose child it does not reach.
func TestNoForkEscapes(t *testing.T) {
	everyWay(t, func(t *testing.T, f *Freezer) {
		run(t, f, Customer, `(while :; do (/bin/true; /bin/true) & (setsid sh -c /bin/true &); wait; done) & wait`) // who forks stops last
		for round := range 30 {
			if err := f.Freeze(t.Context(), Customer); err != nil {
				t.Fatal(err)
			}
			if s, ok := f.how.(*signals); ok {
				all, _ := s.members(Customer)
				for _, p := range all {
					if !still(p.process) {
						t.Errorf("round %d: %+v runs", round, p)
					}
				}
			}
			if err := f.Thaw(Customer); err != nil {
				t.Fatal(err)
			}
			was := forks(t)
			eventually(t, "it forks", func() bool { // each time to another moment
				now := forks(t)
				return now > was+3*round || now < was // numbers begin anew
			})
		}
	})
}

// forks is the newest process's number, in proc_loadavg(5).
func forks(t *testing.T) int {
	t.Helper()
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(b))
	n, err := strconv.Atoi(fields[len(fields)-1])
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// calm is a mechanism for tests of the gates: there is nothing to stop.
type calm struct{}

func (calm) place(Part, *exec.Cmd)              {}
func (calm) started(Part, int)                  {}
func (calm) freeze(context.Context, Part) error { return nil }
func (calm) thaw(Part) error                    { return nil }
func (calm) close() error                       { return nil }

func TestNothingStartsWhileShut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &Freezer{how: calm{}}
		leave, err := f.Enter(t.Context(), Customer)
		if err != nil {
			t.Fatal(err)
		}
		shut, entered := make(chan error, 1), make(chan error, 1)
		go func() { shut <- f.Shut(t.Context(), Customer) }()
		synctest.Wait()
		if len(shut) > 0 {
			t.Fatalf("shut while somebody is inside: %v", <-shut)
		}
		go func() { entered <- f.Await(t.Context(), Customer) }()
		leave()
		if err := errors.Join(<-shut, f.Freeze(t.Context(), Customer)); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if len(entered) > 0 {
			t.Fatal("entered while frozen")
		}
		if err := errors.Join(f.Thaw(Customer), <-entered); err != nil {
			t.Fatal(err)
		}
	})
}

func TestShutGivesUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := &Freezer{how: calm{}}
		leave, err := f.Enter(t.Context(), Customer)
		if err != nil {
			t.Fatal(err)
		}
		defer leave()
		began := time.Now()
		if err := f.Freeze(t.Context(), Customer); err == nil || time.Since(began) != Limit {
			t.Fatalf("work is under way, and after %v: %v", time.Since(began), err)
		}
		if err := f.Await(t.Context(), Customer); err != nil {
			t.Fatal(err)
		}
	})
}

func TestTimeoutStandsStill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const d = 50 * time.Millisecond
		f, cause := &Freezer{how: calm{}}, errors.New("time is up")
		ctx, cancel := f.WithTimeout(t.Context(), Customer, d, cause)
		defer cancel()
		time.Sleep(d / 5)
		if err := f.Freeze(t.Context(), Customer); err != nil {
			t.Fatal(err)
		}
		time.Sleep(3 * d)
		if ctx.Err() != nil {
			t.Fatal("the clock ran while frozen")
		}
		if err := f.Thaw(Customer); err != nil {
			t.Fatal(err)
		}
		began := time.Now()
		<-ctx.Done()
		if took := time.Since(began); context.Cause(ctx) != cause || took != d-d/5 {
			t.Fatalf("%v after %v", context.Cause(ctx), took)
		}
	})
}

func TestNilFreezerNeverFreezes(t *testing.T) {
	var f *Freezer
	ctx, cancel := f.WithTimeout(t.Context(), Customer, time.Nanosecond, context.DeadlineExceeded)
	defer cancel()
	<-ctx.Done()
	if err := errors.Join(f.Shut(t.Context(), Customer), f.Freeze(t.Context(), Customer), f.Await(t.Context(), Customer), f.Start(Customer, exec.Command("true")), f.Thaw(Customer), f.Close()); err != nil || f.Frozen(Customer) {
		t.Fatal(err)
	}
}

func openPTY() (ptm, pts *os.File, err error) {
	if ptm, err = os.OpenFile("/dev/ptmx", os.O_RDWR, 0); err != nil {
		return nil, nil, err
	}
	number, err := unix.IoctlGetInt(int(ptm.Fd()), unix.TIOCGPTN)
	if err == nil {
		err = unix.IoctlSetPointerInt(int(ptm.Fd()), unix.TIOCSPTLCK, 0)
	}
	if err == nil {
		pts, err = os.OpenFile("/dev/pts/"+strconv.Itoa(number), os.O_RDWR|syscall.O_NOCTTY, 0)
	}
	return ptm, pts, err
}
