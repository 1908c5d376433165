package shell

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/procfs"
	"github.com/berth-dev/berth/hostd/agent/procfs/procfstest"
)

// until polls ok for half a minute.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within 30 s: %s", what)
		}
	}
}

// TestTimeout: whatever a command does, its processes are gone after the
// timeout, nothing that follows in it runs, and the shell has its state.
func TestTimeout(t *testing.T) {
	for name, c := range map[string]struct {
		text  string
		fresh bool // bash itself hangs and is replaced
	}{
		"sleep":         {"sleep 4321; touch after", false},
		"list":          {"sleep 4321 || touch after; touch after", false},
		"pipeline":      {"sleep 4321 | cat; touch after", false},
		"subshell":      {"(sleep 4321; touch after); touch after", false},
		"substitution":  {"x=$(sleep 4321; touch after); touch after", false},
		"function":      {"f() { while :; do sleep 4321; done; }; f; touch after", false},
		"builtin loop":  {"while :; do :; done; touch after", false},
		"shell loop":    {"(while :; do :; done); touch after", false},
		"daemon":        {"(setsid sleep 4321 &) ; sleep 4321; touch after", false},
		"double fork":   {"( ( while :; do sleep 4321; done & ) & ); sleep 4321; touch after", false},
		"no mark":       {"env -i /bin/sleep 4321; touch after", false},
		"ignores INT":   {"trap '' INT TERM HUP; sleep 4321; touch after", false},
		"own INT trap":  {"trap 'touch after' INT; sleep 4321; touch after", false},
		"wait":          {"sleep 4321 & wait; touch after", false},
		"nested bash":   {"bash -c 'sleep 4321; touch after'; touch after", false},
		"stopped":       {"sleep 4321 & kill -STOP $!; wait $!; touch after", false},
		"errexit":       {"set -e; sleep 4321; touch after", false},
		"python":        {"python3 -c 'import signal,time; signal.signal(2,signal.SIG_IGN); time.sleep(4321)'; touch after", false},
		"read a fifo":   {"mkfifo ff; read x <ff; touch after", true},
		"no execution":  {"set -n; sleep 4321; touch after", false},
		"stopped shell": {"kill -STOP $$; touch after", true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			gate := freeze.Open(freeze.Config{}, slog.New(slog.DiscardHandler))
			s := newShells(t, func(c *Config) { c.Freezer = gate })
			sh(t, s, "keep=yes; sleep 999 & job=$!")
			if err := gate.Shut(t.Context(), freeze.Customer); err != nil { // the timeout's clock stands still
				t.Fatal(err)
			}
			began := time.Now()
			cmd := Command{Text: "echo before; " + c.text, Shell: Default, Timeout: 300 * time.Millisecond}
			if c.fresh {
				cmd.Timeout = 3 * time.Second // bash has to come to where it hangs
			}
			var stderr bytes.Buffer
			stdout := &heard{first: make(chan struct{})}
			time.AfterFunc(time.Minute, stdout.hear) // it never began: the answer lacks what it should say
			go func() {
				<-stdout.first
				_ = gate.Thaw(freeze.Customer)
			}()
			o, err := s.Exec(t.Context(), &cmd, Sinks{Stdout: stdout, Stderr: &stderr})
			if err != nil {
				t.Fatal(err)
			}
			got := ran{out: stdout.String(), err: stderr.String(), code: -1, timedOut: o.TimedOut}
			if o.ExitCode != nil {
				got.code = *o.ExitCode
			}
			if got.out != "before\n" || got.code != -1 || !got.timedOut {
				t.Errorf("answer: %+v", got)
			}
			if took := time.Since(began); took > time.Minute {
				t.Errorf("took %s", took)
			}
			want := "yes alive\n"
			if c.fresh {
				want = "\n"
			}
			if next := sh(t, s, `echo $keep $(kill -0 $job 2>/dev/null && echo alive)`); next.out != want {
				t.Errorf("next command: %+v, want %q", next, want)
			}
			if left := s.left(); left != 0 {
				t.Errorf("%d processes left", left)
			}
			if _, err := os.Stat(filepath.Join(s.cfg.Workspace.Dir, "after")); err == nil {
				t.Error("a command after the stopped one ran")
			}
		})
	}
}

// heard tells when something was written to it.
type heard struct {
	bytes.Buffer
	first chan struct{}
	once  sync.Once
}

func (h *heard) hear() { h.once.Do(func() { close(h.first) }) }

func (h *heard) Write(p []byte) (int, error) {
	defer h.hear()
	return h.Buffer.Write(p)
}

// TestForkBomb ends one, in a shell and without, at its timeout. It runs as a
// user of its own, whose processes are limited.
func TestForkBomb(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can give the bomb a user of its own")
	}
	s := newShells(t, func(c *Config) { c.Account.UID = 61234 })
	for _, name := range []string{Default, ""} {
		began := time.Now()
		got := run(t, s, Command{Text: "ulimit -u 150; :(){ :|:& };: ; sleep 4321", Shell: name, Timeout: 500 * time.Millisecond})
		if !got.timedOut || time.Since(began) > time.Minute {
			t.Errorf("shell %q: %+v after %s", name, got, time.Since(began))
		}
		if left := s.left(); left != 0 {
			t.Errorf("shell %q: %d processes left", name, left)
		}
		if got := sh(t, s, "echo alive"); got.out != "alive\n" {
			t.Errorf("afterwards: %+v", got)
		}
	}
}

// left counts live processes in the workspace other than the shells and the
// job that TestTimeout leaves running on purpose.
func (s *Shells) left() int {
	n := 0
	for _, p := range processes() {
		var cwd string
		procfs.AsOwner(p.pid, func() { cwd, _ = os.Readlink(procfs.Path(p.pid, "cwd")) })
		args, _ := os.ReadFile(procfs.Path(p.pid, "cmdline"))
		if !p.dead && cwd == s.cfg.Workspace.Dir && !strings.Contains(string(args), "--noediting") && string(args) != "sleep\x00999\x00" {
			n++
		}
	}
	return n
}

func TestTimeoutOfFreshProcess(t *testing.T) {
	s := newShells(t)
	began := time.Now()
	got := run(t, s, Command{Text: "echo before; (setsid sleep 4321 &); env -i /bin/sleep 4321; :", Timeout: 3 * time.Second}) // bash itself begins in that time
	if got.out != "before\n" || got.code != -1 || !got.timedOut || time.Since(began) > time.Minute {
		t.Errorf("answer: %+v after %s", got, time.Since(began))
	}
	if left := s.left(); left != 0 {
		t.Errorf("%d processes left", left)
	}
}

// TestClientLeaves: a cancelled context stops the command as a timeout does.
func TestClientLeaves(t *testing.T) {
	s := newShells(t)
	sh(t, s, "keep=yes")
	for _, name := range []string{Default, ""} {
		ctx, cancel := context.WithCancelCause(t.Context())
		gone := errors.New("gone")
		started := make(chan struct{})
		go func() {
			<-started
			cancel(gone)
		}()
		_, err := s.Exec(ctx, &Command{Text: "sleep 4321; touch after", Shell: name, Timeout: time.Minute},
			Sinks{Stdout: discard{}, Stderr: discard{}, Begin: func() { close(started) }})
		if !errors.Is(err, gone) {
			t.Errorf("shell %q: %v, want the context's cause", name, err)
		}
	}
	if got := sh(t, s, "echo $keep; ls"); got.out != "yes\n" || s.left() != 0 {
		t.Errorf("afterwards: %+v, %d processes", got, s.left())
	}
}

type discard struct{}

func (discard) Write(p []byte) (int, error) { return len(p), nil }

// TestQueue: commands of one shell run in their order, a waiting one can
// leave, and the wait is no run time.
func TestQueue(t *testing.T) {
	s := newShells(t)
	sh(t, s, "mkfifo go")
	first := make(chan ran)
	go func() { r, _ := try(s, Command{Text: "cat go >/dev/null; echo 1 >>order", Shell: Default}); first <- r }()
	until(t, "first runs", func() bool { return s.users(Default) == 1 })
	ctx, cancel := context.WithCancel(t.Context())
	left := make(chan error)
	go func() {
		_, err := s.Exec(ctx, &Command{Text: "echo no >>order", Shell: Default, Timeout: time.Second}, Sinks{Stdout: discard{}, Stderr: discard{}})
		left <- err
	}()
	until(t, "second waits", func() bool { return s.users(Default) == 2 })
	third := make(chan ran)
	go func() {
		r, _ := try(s, Command{Text: "echo 3 >>order", Shell: Default, Timeout: 10 * time.Second})
		third <- r
	}()
	until(t, "third waits", func() bool { return s.users(Default) == 3 })
	cancel()
	if err := <-left; !errors.Is(err, context.Canceled) {
		t.Errorf("who left the queue: %v", err)
	}
	if got := run(t, s, Command{Text: "echo x >go"}); got.code != 0 { // a fresh process does not queue
		t.Errorf("fresh: %+v", got)
	}
	<-first
	<-third
	if got := sh(t, s, "cat order"); got.out != "1\n3\n" {
		t.Errorf("order: %+v", got)
	}
}

func (s *Shells) users(name string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	if l := s.lanes[name]; l != nil {
		return l.users
	}
	return 0
}

func TestRestart(t *testing.T) {
	s := newShells(t)
	sh(t, s, "x=1; sleep 4321 & (setsid sleep 4321 &) ; env -i /bin/sleep 4321 &")
	busy := make(chan ran)
	go func() { r, _ := try(s, Command{Text: "echo on; sleep 4321", Shell: Default}); busy <- r }()
	until(t, "it sleeps", func() bool { return s.left() == 4 })
	if err := s.Restart(t.Context(), Default); err != nil {
		t.Fatal(err)
	}
	if got := <-busy; got.out != "on\n" || got.code != 137 {
		t.Errorf("the command under way: %+v", got)
	}
	if got := sh(t, s, "echo ${x-fresh}"); got.out != "fresh\n" || s.left() != 0 {
		t.Errorf("afterwards: %+v, %d processes", got, s.left())
	}
	if err := s.Restart(t.Context(), "never used"); err == nil {
		t.Error("a bad name was accepted")
	}
}

// TestBackground: a job neither holds the answer up nor loses its shell, and
// what it writes later troubles nobody, itself included.
func TestBackground(t *testing.T) {
	s := newShells(t)
	sh(t, s, "mkfifo go")
	got := sh(t, s, `echo early; { cat go >/dev/null; for i in $(seq 20000); do echo late $i; done; echo done >finished; } & echo end`)
	if got.out != "early\nend\n" || got.code != 0 {
		t.Errorf("answer: %+v", got)
	}
	if got := sh(t, s, "echo x >go; wait; cat finished"); got.out != "done\n" {
		t.Errorf("next: %+v", got)
	}
	got = sh(t, s, "yes & sleep 0.05; echo $! >pid; head -c 3000000 /dev/zero | tr '\\0' z")
	if n := strings.Count(got.out, "z"); n != 3000000 {
		t.Errorf("foreground output is incomplete: %d of 3000000", n)
	}
	if got := sh(t, s, "kill $(cat pid) && echo killed"); got.out != "killed\n" {
		t.Errorf("the job did not live on: %+v", got)
	}
}

func TestSetupGoesFirst(t *testing.T) {
	s := newShells(t)
	release := s.Hold()
	other := make(chan ran)
	go func() { r, _ := try(s, Command{Text: "cat made", Shell: "other"}); other <- r }()
	var steps []Step
	err := s.RunSetup(t.Context(), []string{"v=1; sleep 0.1; echo $v >made", "cd /"}, func(st Step) { steps = append(steps, st) })
	release()
	if err != nil || len(steps) != 2 || *steps[1].ExitCode != 0 || steps[1].Index != 2 {
		t.Errorf("setup: %v, %+v", err, steps)
	}
	if got := <-other; got.out != "1\n" {
		t.Errorf("a command did not wait for setup: %+v", got)
	}
	if got := sh(t, s, "echo $v $PWD"); got.out != "1 /\n" {
		t.Errorf("setup's state: %+v", got)
	}
	err = s.RunSetup(t.Context(), []string{":", "echo oh dear >&2; false", "touch no"}, nil)
	if err == nil || err.Error() != "setup step 2 (echo oh dear >&2; false) failed with exit code 1: oh dear" {
		t.Errorf("failing setup: %v", err)
	}
	if got := sh(t, s, "ls /workspace/no 2>&1; pwd"); got.out == "" {
		t.Errorf("commands after a failed setup: %+v", got)
	}
}

func TestClose(t *testing.T) {
	s := newShells(t)
	sh(t, s, "sleep 4321 &")
	busy := make(chan error)
	go func() { _, err := try(s, Command{Text: "sleep 4321", Shell: Default}); busy <- err }()
	fresh := make(chan error)
	go func() { _, err := try(s, Command{Text: "sleep 4321"}); fresh <- err }()
	until(t, "all sleep", func() bool { return s.left() == 3 })
	s.Close()
	for _, c := range []chan error{busy, fresh} {
		if err := <-c; err != errClosed {
			t.Errorf("a command at Close: %v", err)
		}
	}
	if _, err := try(s, Command{Text: ":", Shell: Default}); err != errClosed {
		t.Errorf("a command after Close: %v", err)
	}
	if n := s.left(); n != 0 {
		t.Errorf("%d processes left", n)
	}
}

// TestAsInAMachine: what the tests of stopping find must be found without the
// right to look into everything.
func TestAsInAMachine(t *testing.T) {
	procfstest.WithoutPtrace(t, "^(TestTimeout|TestTimeoutOfFreshProcess|TestClientLeaves|TestRestart)$/^(sleep|daemon|double_fork|no_mark)$")
}
