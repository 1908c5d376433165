package testenv

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

// The daemons of a stack, in order of starting.
const (
	Gateway = "gateway"
	Proxyd  = "proxyd"
	Hostd   = "hostd"
)

// stopTime is longer than any daemon takes to drain.
const stopTime = 25 * time.Second

// process is one daemon, which can be killed and started again.
type process struct {
	name, binary, log string
	args              []string

	mu   sync.Mutex // guards what follows
	cmd  *exec.Cmd
	over chan struct{} // closed when cmd has ended; err is set then
	err  error
}

func (p *process) start() error {
	log, err := os.OpenFile(p.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.binary, p.args...)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.Env = environment()
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if err := onSteadyThread(cmd.Start); err != nil {
		return err
	}
	over := make(chan struct{})
	p.mu.Lock()
	defer p.mu.Unlock()
	p.cmd, p.over = cmd, over
	go func() {
		err := cmd.Wait()
		p.mu.Lock()
		p.err = err
		p.mu.Unlock()
		close(over)
	}()
	return nil
}

// environment is this process's without settings of a developer's own stack. A
// race is found in the log, so no process need wait a second at its end for it
// to be written.
func environment() []string {
	out := []string{"GORACE=atexit_sleep_ms=20"}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "BERTH_") {
			out = append(out, v)
		}
	}
	return out
}

// end sends a signal and waits; it kills what does not end in time.
func (p *process) end(sig syscall.Signal, within time.Duration) error {
	p.mu.Lock()
	cmd, over := p.cmd, p.over
	p.mu.Unlock()
	if cmd == nil {
		return nil
	}
	_ = cmd.Process.Signal(sig) // it may have ended
	select {
	case <-over:
		return nil
	case <-time.After(within):
	}
	// What it was doing tells why it did not stop.
	_ = cmd.Process.Signal(syscall.SIGQUIT)
	select {
	case <-over:
	case <-time.After(3 * time.Second):
		_ = cmd.Process.Kill()
		<-over
	}
	return fmt.Errorf("%s did not stop within %s of %s; its goroutines are in its log", p.name, within, sig)
}

// exited says how the process ended; ok is false while it runs.
func (p *process) exited() (err error, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.over:
		return p.err, true
	default:
		return nil, false
	}
}

func (p *process) pid() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.cmd.Process.Pid
}

// tail gives the last lines of the log after an offset.
func (p *process) tail(after int64, lines int) string {
	b, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	all := strings.SplitAfter(string(b[min(after, int64(len(b))):]), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "")
}

func (p *process) logSize() int64 {
	info, err := os.Stat(p.log)
	if err != nil {
		return 0
	}
	return info.Size()
}

// races gives the log from its first data race or panic on.
func (p *process) races() string {
	b, _ := os.ReadFile(p.log)
	for _, mark := range []string{"WARNING: DATA RACE", "\npanic: ", "\nfatal error: "} {
		if at := bytes.Index(b, []byte(mark)); at >= 0 {
			return string(b[at:min(len(b), at+6000)])
		}
	}
	return ""
}

// rss is a daemon's memory in bytes that is not shared with files.
func rss(pid int) (int64, error) {
	b, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, "RssAnon:"); ok {
			kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
			return kib << 10, err
		}
	}
	return 0, fmt.Errorf("no RssAnon of process %d", pid)
}

// onSteadyThread runs start on a thread that lives as long as this process:
// the kernel sends Pdeathsig when the thread that forked ends.
func onSteadyThread(start func() error) error {
	steady.Do(func() {
		go func() {
			runtime.LockOSThread()
			for job := range jobs {
				job()
			}
		}()
	})
	done := make(chan error, 1)
	jobs <- func() { done <- start() }
	return <-done
}

var (
	steady sync.Once
	jobs   = make(chan func())
)

// output runs a command and gives its standard output; the error tells all it said.
func output(ctx context.Context, name string, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Env = environment()
	out, err := cmd.Output()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = fmt.Errorf("%s %s: %w: %s%s", filepath.Base(name), strings.Join(args, " "), err, out, exit.Stderr)
	}
	return string(out), err
}
