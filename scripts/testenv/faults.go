package testenv

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/trust"
)

// Kill9 ends a daemon as a crash would.
func (e *Env) Kill9(t testing.TB, daemon string) {
	t.Helper()
	if err := e.daemons[daemon].end(syscall.SIGKILL, stopTime); err != nil {
		t.Fatal(err)
	}
}

// Terminate ends a daemon as an operator would.
func (e *Env) Terminate(t testing.TB, daemon string) {
	t.Helper()
	if err := e.daemons[daemon].end(syscall.SIGTERM, stopTime); err != nil {
		t.Fatal(err)
	}
}

// AwaitEnd waits until a daemon that was told to stop has ended.
func (e *Env) AwaitEnd(t testing.TB, daemon string) {
	t.Helper()
	if err := e.daemons[daemon].end(syscall.Signal(0), stopTime); err != nil { // asks whether it is there, and does nothing
		t.Fatal(err)
	}
}

// Restart starts daemons that were ended and waits until the stack is ready.
func (e *Env) Restart(t testing.TB, daemon ...string) {
	t.Helper()
	for _, name := range daemon {
		if err := e.daemons[name].start(); err != nil {
			t.Fatal(err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), startTime)
	defer cancel()
	if err := e.ready(ctx); err != nil {
		t.Fatalf("after the restart of %s: %v", daemon, err)
	}
}

// ready waits until the API can serve and all daemons run.
func (e *Env) ready(ctx context.Context) error {
	last := "nothing yet"
	for {
		for name, p := range e.daemons {
			if err, ended := p.exited(); ended {
				return fmt.Errorf("%s has ended: %v", name, err)
			}
		}
		status, body, err := get(ctx, e.BaseURL+"/readyz")
		if err == nil && status == http.StatusOK {
			return nil
		}
		if err == nil {
			last = body
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("not ready: %s: %w", last, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// Anon is a daemon's own memory in bytes (RssAnon).
func (e *Env) Anon(t testing.TB, daemon string) int64 {
	t.Helper()
	n, err := rss(e.daemons[daemon].pid())
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// Log is what a daemon has written so far.
func (e *Env) Log(daemon string) string { return e.daemons[daemon].tail(0, 1<<30) }

// Metrics are a daemon's, in Prometheus text form.
func (e *Env) Metrics(t testing.TB, daemon string) string {
	t.Helper()
	url := map[string]string{Gateway: e.BaseURL, Hostd: "http://" + e.num.hostPort(0, 0), HostName(1): "http://" + e.num.hostPort(1, 0), Proxyd: "http://" + e.num.proxydPort(0, 2), ProxydName(1): "http://" + e.num.proxydPort(1, 2)}[daemon] + "/metrics"
	status, body, err := get(context.Background(), url)
	if err != nil || status != http.StatusOK {
		t.Fatalf("%s: %d %v", url, status, err)
	}
	return body
}

// Process is a process of a machine as the host sees it.
type Process struct {
	PID    int
	Slot   string // name of its network namespace
	Parent int
}

// PID is a daemon's process.
func (e *Env) PID(daemon string) int { return e.daemons[daemon].pid() }

// Signal sends a daemon a signal and does not wait for what comes of it.
func (e *Env) Signal(t testing.TB, daemon string, sig syscall.Signal) {
	t.Helper()
	if err := syscall.Kill(e.PID(daemon), sig); err != nil {
		t.Fatal(err)
	}
}

// FindProcess waits for the process of a machine whose command line is exactly
// argv (a session runs something unmistakable first).
func (e *Env) FindProcess(t testing.TB, argv ...string) Process {
	t.Helper()
	want := strings.Join(argv, "\x00") + "\x00"
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		for _, pid := range pids() {
			line, _ := os.ReadFile(procPath(pid, "cmdline"))
			if string(line) == want && e.ours(pid) {
				return Process{PID: pid, Slot: e.slotOf(t, pid), Parent: parentOf(pid)}
			}
		}
	}
	t.Fatalf("no process %q in any machine", argv)
	return Process{}
}

// MachineProcesses are the processes of all machines, agents included.
func (e *Env) MachineProcesses() []int {
	return slices.DeleteFunc(pids(), func(pid int) bool { return !e.ours(pid) })
}

// Agent is the first process of the machine that p belongs to.
func (e *Env) Agent(t testing.TB, p Process) int {
	t.Helper()
	pid := p.PID
	for e.ours(parentOf(pid)) {
		pid = parentOf(pid)
	}
	return pid
}

// KillProcess ends a process of a machine from outside.
func (e *Env) KillProcess(t testing.TB, pid int) {
	t.Helper()
	if !e.ours(pid) {
		t.Fatalf("process %d is of no machine of this stack", pid)
	}
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
}

// Alive says whether a machine still has the process.
func (e *Env) Alive(pid int) bool {
	status, err := os.ReadFile(procPath(pid, "status"))
	return err == nil && e.ours(pid) && !strings.Contains(string(status), "State:\tZ")
}

// slotOf finds the slot whose namespace a process is in.
func (e *Env) slotOf(t testing.TB, pid int) string {
	t.Helper()
	mine, err := os.Stat(procPath(pid, "ns/net"))
	if err != nil {
		t.Fatal(err)
	}
	var found []string
	for i := range e.hosts() {
		some, _ := filepath.Glob("/run/netns/" + e.num.prefix(i) + "-*")
		found = append(found, some...)
	}
	for _, path := range found {
		if other, err := os.Stat(path); err == nil && os.SameFile(mine, other) {
			return filepath.Base(path)
		}
	}
	t.Fatalf("process %d is in no slot", pid)
	return ""
}

// ours says whether a process runs under an id of this stack's machines.
func (e *Env) ours(pid int) bool { return e.hostOf(pid) != "" }

// hostOf is the daemon whose machine a process is of, by the process's user
// id; empty when it is of none of this stack.
func (e *Env) hostOf(pid int) string {
	b, _ := os.ReadFile(procPath(pid, "status"))
	_, rest, ok := strings.Cut(string(b), "\nUid:\t")
	var uid uint64
	if !ok {
		return ""
	}
	if _, err := fmt.Sscan(rest, &uid); err != nil {
		return ""
	}
	for i, name := range e.hosts() {
		if base := uint64(e.num.uidBase(i)); uid >= base && uid < base+slots<<16 {
			return name
		}
	}
	return ""
}

func parentOf(pid int) int {
	b, _ := os.ReadFile(procPath(pid, "status"))
	_, rest, _ := strings.Cut(string(b), "\nPPid:\t")
	var ppid int
	_, _ = fmt.Sscan(rest, &ppid) // 0, nobody's, when the process has ended
	return ppid
}

func procPath(pid int, name string) string { return filepath.Join("/proc", strconv.Itoa(pid), name) }

func pids() []int {
	entries, _ := os.ReadDir("/proc")
	var out []int
	for _, e := range entries {
		if pid, err := strconv.Atoi(e.Name()); err == nil {
			out = append(out, pid)
		}
	}
	return out
}

// SlotAddr is the address of a slot that its neighbours would dial.
func (e *Env) SlotAddr(t testing.TB, slot string) string {
	t.Helper()
	out, err := output(context.Background(), "ip", "-n", slot, "-4", "-br", "addr", "show", "dev", "eth0")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range strings.Fields(out) {
		if addr, _, ok := strings.Cut(f, "/"); ok {
			return addr
		}
	}
	t.Fatalf("slot %s has no address: %s", slot, out)
	return ""
}

// Secret is the cluster's.
func (e *Env) Secret(t testing.TB) *trust.Secret {
	t.Helper()
	secret, err := trust.LoadOrCreate(filepath.Join(e.Home, "secret"))
	if err != nil {
		t.Fatal(err)
	}
	return secret
}

// NewSecret gives the cluster another secret; the daemons must be down.
func (e *Env) NewSecret(t testing.TB) {
	t.Helper()
	if err := os.Remove(filepath.Join(e.Home, "secret")); err != nil {
		t.Fatal(err)
	}
}

// HostLinks are what a gateway uses to order hosts, by the hosts' daemon names.
func (e *Env) HostLinks(t testing.TB) map[string]*hostlink.Client {
	t.Helper()
	links := map[string]*hostlink.Client{}
	for i, name := range e.hosts() {
		c := hostlink.NewClient(e.num.hostPort(i, 0), e.Secret(t))
		t.Cleanup(c.Close)
		links[name] = c
	}
	return links
}

// Counts is what proxyd has moved for a session.
type Counts struct {
	Up, Down    int64 // bytes from and to the session
	Connections int64
	Open        int
}

// ProxydCounts asks proxyd for a session's counters.
func (e *Env) ProxydCounts(t testing.TB, session string) (c Counts) {
	t.Helper()
	secret := e.Secret(t)
	req, err := http.NewRequest(http.MethodGet, "http://"+e.num.port(7)+"/v1/counters?sessionId="+session, nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set(trust.Header, secret.Proof())
	resp, err := bare.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&c); err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("counters: %d %v", resp.StatusCode, err)
	}
	return c
}
