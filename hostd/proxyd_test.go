package main

import (
	"bufio"
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/refusals"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// tier is an egress tier of real proxyds that share a secret.
type tier struct {
	t      *testing.T
	dir    string
	bin    string
	secret *trust.Secret
	region region
}

// real is one running proxyd.
type real struct {
	cmd           *exec.Cmd
	link, control string
}

func newTier(t *testing.T) *tier {
	t.Helper()
	dir := t.TempDir()
	bin := filepath.Join(dir, "proxyd")
	if out, err := exec.Command("go", "build", "-o", bin, "github.com/berth-dev/berth/proxyd").CombinedOutput(); err != nil {
		t.Fatalf("build proxyd: %v: %s", err, out)
	}
	secret, err := trust.LoadOrCreate(filepath.Join(dir, "secret"))
	if err != nil {
		t.Fatal(err)
	}
	tr := &tier{t: t, dir: dir, bin: bin, secret: secret}
	tr.region.set()
	return tr
}

// start runs a proxyd that may reach loopback; kill ends it.
func (tr *tier) start(name string) *real {
	tr.t.Helper()
	r := &real{link: deadAddr(tr.t), control: deadAddr(tr.t)}
	r.cmd = exec.Command(tr.bin, "--home", filepath.Join(tr.dir, name), "--name", name, "--listen", r.link, "--control", r.control,
		"--gossip-addr", deadAddr(tr.t), "--join", deadAddr(tr.t), "--cluster-secret", filepath.Join(tr.dir, "secret"),
		"--egress-allow", "127.0.0.0/8", "--drain", "1s", "--log-level", "error")
	if err := r.cmd.Start(); err != nil {
		tr.t.Fatal(err)
	}
	tr.t.Cleanup(r.kill)
	for end := time.Now().Add(30 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		resp, err := http.Get("http://" + r.control + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return r
			}
		}
		if time.Now().After(end) {
			tr.t.Fatalf("proxyd is not ready: %v", err)
		}
	}
}

// kill is kill -9; it waits until the process is gone.
func (r *real) kill() {
	_ = r.cmd.Process.Signal(syscall.SIGKILL)
	_ = r.cmd.Wait()
}

// members makes gossip know these proxyds and no others.
func (tr *tier) members(all ...*real) {
	tr.region.set()
	tr.region.mu.Lock()
	for _, r := range all {
		tr.region.proxyds = append(tr.region.proxyds, gossip.Member{Meta: gossip.Meta{Region: "local", Addr: r.link, Control: r.control}})
	}
	tr.region.mu.Unlock()
}

// pass seals what lets session s straight out.
func (tr *tier) pass(epoch, version uint64, life time.Duration) []byte {
	tr.t.Helper()
	b, err := proxylink.SealPass(tr.secret, proxylink.Pass{SessionID: "s", ProjectID: "p", Epoch: epoch, Version: version, Expires: time.Now().Add(life)})
	if err != nil {
		tr.t.Fatal(err)
	}
	return b
}

// connect asks for a tunnel and gives the status and reason of the answer.
func connect(t *testing.T, w *way, target string) (status int, reason egress.Reason) {
	t.Helper()
	conn := dialled(t, w)
	_ = conn.SetDeadline(time.Now().Add(30 * time.Second))
	fmt.Fprintf(conn, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", target)
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: http.MethodConnect})
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	return resp.StatusCode, egress.Reason(resp.Header.Get(egress.ReasonHeader))
}

// site accepts and closes.
func site(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	return ln.Addr().String()
}

// eventLog is the events of session s in epoch 5.
type eventLog chan event.Event

func (l eventLog) Record(_ context.Context, id string, epoch uint64, e event.Event) bool {
	if id == "s" && epoch == 5 {
		l <- e
	}
	return id == "s" && epoch == 5
}

// What hostd and a real proxyd say to each other: passes, refusals, and another
// proxyd where one was killed.
func TestWithARealProxyd(t *testing.T) {
	tr := newTier(t)
	first := tr.start("one")
	tr.members(first)
	w, to := wayTo(&tr.region, tr.secret), site(t)
	events := make(eventLog, 100)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		refusals.Run(ctx, refusals.Config{Host: "h1", Region: "local", Members: &tr.region, Sessions: events, Log: slog.New(slog.DiscardHandler),
			Open: func(addr string) refusals.Feed { return proxylink.NewClient(addr, tr.secret) }})
	}()
	defer func() { cancel(); <-done }()

	for i, step := range []struct {
		pass   []byte
		target string
		want   egress.Reason
	}{
		{tr.pass(5, 1, time.Hour), to, ""},
		{tr.pass(5, 1, 2*time.Hour), to, ""}, // renewed
		{tr.pass(5, 2, time.Hour), to, ""},   // another setting
		{tr.pass(5, 3, -time.Second), to, egress.TokenInvalid},
		{tr.pass(5, 1, time.Hour), to, egress.TokenInvalid}, // older than one that it saw
		{[]byte("not sealed"), to, egress.TokenInvalid},
		{tr.pass(5, 4, time.Hour), "example.com:25", egress.PortBlocked},
		{tr.pass(5, 4, time.Hour), "10.0.0.1:443", egress.BadTarget},
	} {
		w.Show(step.pass)
		status, reason := connect(t, w, step.target)
		if reason != step.want || (status == http.StatusOK) != (step.want == "") {
			t.Errorf("step %d: %d %q, want %q", i, status, reason, step.want)
		}
		if step.want == "" {
			continue
		}
		select {
		case e := <-events:
			if want := fmt.Sprintf(`"proxyError":"%s"`, step.want); e.Type != event.Network || !containsAll(string(e.Data), want, `"method":"CONNECT"`) {
				t.Errorf("step %d: event %s %s", i, e.Text, e.Data)
			}
		case <-time.After(30 * time.Second):
			t.Fatalf("step %d: no event", i)
		}
	}

	second := tr.start("two")
	tr.members(first, second)
	first.kill() // gossip still knows it
	for range 10 {
		if status, reason := connect(t, w, to); status != http.StatusOK {
			t.Fatalf("beside a dead proxyd: %d %q", status, reason)
		}
	}
	second.kill()
	waiting := make(chan error, 1)
	go func() {
		c, err := w.Dial(t.Context())
		if err == nil {
			c.Close()
		}
		waiting <- err
	}()
	third := tr.start("three")
	tr.members(third)
	if err := <-waiting; err != nil {
		t.Errorf("a connection that waited for a proxyd: %v", err)
	}
	if _, reason := connect(t, w, "example.com:587"); reason != egress.PortBlocked {
		t.Errorf("reason %q", reason)
	}
	select {
	case e := <-events:
		if !containsAll(e.Text, "example.com:587", "587 is closed") {
			t.Errorf("event %s", e.Text)
		}
	case <-time.After(30 * time.Second):
		t.Error("the feed of a proxyd that came later is not followed")
	}
}

func containsAll(text string, parts ...string) bool {
	for _, p := range parts {
		if !strings.Contains(text, p) {
			return false
		}
	}
	return true
}
