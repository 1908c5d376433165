package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/hostd/agent/browser"
	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
	"github.com/coder/websocket"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is an agent behind a unix socket, as hostd and gateway see it.
type rig struct {
	t       *testing.T
	socket  string
	control *http.Client
	link    *http.Client
	parts   parts
	mended  atomic.Int32
}

func (r *rig) mend(thaw agentlink.Thaw, asOf time.Time, _ *slog.Logger) error {
	r.mended.Add(1)
	if off := thaw.Now.Sub(asOf); off.Abs() > time.Minute {
		return fmt.Errorf("off by %v", off)
	}
	return nil
}

// testFreeze gives the agent cgroups of its own where there is cgroup v2, else
// signals to what it started.
func testFreeze(t *testing.T) freeze.Config {
	for _, root := range []string{"/sys/fs/cgroup", "/sys/fs/cgroup/unified"} {
		dir := filepath.Join(root, fmt.Sprintf("berth-agent-%d-%d", os.Getpid(), groups.Add(1)))
		if _, err := os.Stat(filepath.Join(root, "cgroup.controllers")); err != nil || os.Mkdir(dir, 0o755) != nil {
			continue
		}
		t.Cleanup(func() {
			if err := os.Remove(dir); err != nil {
				t.Error(err)
			}
		})
		return freeze.Config{Cgroup: dir, BrowserGID: 900}
	}
	return freeze.Config{BrowserGID: 900}
}

var groups atomic.Int32

func start(t *testing.T, kind session.Kind) *rig {
	t.Helper()
	return startWith(t, kind, testFreeze(t))
}

func startWith(t *testing.T, kind session.Kind, how freeze.Config) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-agent-") // short, for the socket's sake
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := parts{
		config: config{kind: kind, workspace: filepath.Join(dir, "workspace")}, account: account.Current(), state: filepath.Join(dir, "state"),
		browser: browser.Config{Binary: chromium(t, kind), Profile: filepath.Join(dir, "profile"), Home: dir, Downloads: filepath.Join(dir, "workspace", "downloads")},
	}
	p.root, p.freeze = filepath.Join(dir, "root"), how
	r := &rig{t: t, socket: filepath.Join(dir, "agent.sock"), parts: p}
	p.mend = r.mend // not the clock of the computer that runs the test
	if os.Getuid() == 0 {
		p.browser.UID, p.browser.GID, p.browser.Groups = 1000, 900, []int{1000}
		p.account = account.Account{Name: "user", Home: dir, UID: 1000, GID: 1000}
		_ = os.Chown(dir, 1000, 900)
	}
	if err := os.Mkdir(p.workspace, 0o755); err != nil {
		t.Fatal(err)
	}
	_ = p.account.Owns(func(uid, gid int) error { return os.Chown(p.workspace, uid, gid) })
	a, err := build(p, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", r.socket)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- a.run(ctx, l) }()
	r.control = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return r.dial(ctx, agentlink.PrefaceControl)
	}}}
	var streams []*link.Conn // of one goroutine: the test's requests come one by one
	r.link = &http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, err := link.Dial(ctx, func(ctx context.Context) (net.Conn, error) { return r.dial(ctx, agentlink.PrefaceLink) }, link.Options{})
		if err == nil {
			streams = append(streams, c)
		}
		return c, err
	}}}
	t.Cleanup(func() {
		r.control.CloseIdleConnections()
		r.link.CloseIdleConnections()
		for _, c := range streams {
			c.Abort() // Close would try for a minute to deliver to an agent that ends
		}
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	return r
}

// chromium is the real one; see package browser.
func chromium(t *testing.T, kind session.Kind) string {
	if !kind.HasBrowser() {
		return ""
	}
	binary := os.Getenv("BERTH_CHROMIUM")
	if binary == "" {
		binary = "/usr/lib/chromium/chromium"
	}
	if _, err := os.Stat(binary); err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	return binary
}

func (r *rig) dial(ctx context.Context, preface byte) (net.Conn, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", r.socket)
	if err != nil {
		return nil, err
	}
	_, err = conn.Write([]byte{preface})
	return conn, err
}

// do sends a request; wantStatus 0 takes any.
func (r *rig) do(c *http.Client, method, path string, body any, wantStatus int) []byte {
	r.t.Helper()
	var in io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			r.t.Fatal(err)
		}
		in = bytes.NewReader(b)
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, in)
	if err != nil {
		r.t.Fatal(err)
	}
	res, err := c.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	if wantStatus != 0 && res.StatusCode != wantStatus {
		r.t.Fatalf("%s %s: %d %s, want %d", method, path, res.StatusCode, b, wantStatus)
	}
	return b
}

func (r *rig) state(query string) agentlink.State {
	r.t.Helper()
	var s agentlink.State
	if err := json.Unmarshal(r.do(r.control, http.MethodGet, agentlink.ControlState+query, nil, 200), &s); err != nil {
		r.t.Fatal(err)
	}
	return s
}

// notices reads the stream until enough returns true.
func (r *rig) notices(enough func(agentlink.Notice) bool) (all []agentlink.Notice) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	req, _ := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+agentlink.ControlEvents+"?after=0", nil)
	res, err := r.control.Do(req)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	for lines := bufio.NewScanner(res.Body); lines.Scan(); {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var n agentlink.Notice
		if err := json.Unmarshal(lines.Bytes(), &n); err != nil {
			r.t.Fatal(err)
		}
		if all = append(all, n); enough(n) {
			return all
		}
	}
	r.t.Fatalf("the notice did not come; there were %+v", all)
	return nil
}

// terminal types input and reads the screen until it shows want.
func (r *rig) terminal(input, want string) (screen string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 30*time.Second)
	defer cancel()
	c, _, err := websocket.Dial(ctx, "ws://agent"+agentlink.PathTerminal, &websocket.DialOptions{HTTPClient: r.link})
	if err != nil {
		r.t.Fatal(err)
	}
	defer c.CloseNow()
	msg, _ := json.Marshal(map[string]string{"type": "input", "data": input})
	if err := c.Write(ctx, websocket.MessageText, msg); err != nil {
		r.t.Fatal(err)
	}
	for !strings.Contains(screen, want) {
		_, out, err := c.Read(ctx)
		if err != nil {
			r.t.Errorf("terminal: %v", err)
			return screen
		}
		screen += string(out)
	}
	return screen
}

func TestShellMachine(t *testing.T) {
	r := start(t, session.Shell)
	if s := r.state("?wait=1"); !s.Ready || s.Failed != "" || s.SessionID != "" {
		t.Fatalf("state = %+v", s)
	}
	exec := agentlink.ExecRequest{Command: "echo $GREETING; cat made"}
	if e := apierr.Parse(503, r.do(r.link, http.MethodPost, agentlink.PathExec, exec, 503)); e.Code != apierr.Unavailable {
		t.Errorf("before start: %v", e)
	}
	s := agentlink.Start{SessionID: "s1", Kind: session.Shell, Env: map[string]string{"GREETING": "hello"}, Setup: []string{"echo made-by-setup > made", "false", "echo never"}}
	r.do(r.control, http.MethodPost, agentlink.ControlStart, s, 204)
	r.do(r.control, http.MethodPost, agentlink.ControlStart, s, 204) // again: nothing
	other := s
	other.SessionID = "s2"
	r.do(r.control, http.MethodPost, agentlink.ControlStart, other, 400)

	var res agentlink.ExecResult
	if err := json.Unmarshal(r.do(r.link, http.MethodPost, agentlink.PathExec, exec, 200), &res); err != nil || res.Stdout != "hello\nmade-by-setup\n" {
		t.Errorf("exec = %+v, %v: it must wait for setup and see the environment", res, err)
	}
	if got := r.terminal("echo greeting=$GREETING\n", "greeting=hello"); !strings.Contains(got, "greeting=hello") {
		t.Errorf("terminal shows %q", got)
	}
	for _, p := range []string{agentlink.PathCDP, agentlink.PathJSONVersion} {
		if e := apierr.Parse(400, r.do(r.link, http.MethodGet, p, nil, 400)); !strings.Contains(e.Message, "no browser") {
			t.Errorf("%s: %v", p, e)
		}
	}
	all := r.notices(func(n agentlink.Notice) bool { return n.Event != nil && n.Event.Type == "exec" })
	var story []string
	for i, n := range all {
		if n.N != uint64(i+1) {
			t.Errorf("notice %d has number %d", i+1, n.N)
		}
		switch {
		case n.Setup != nil:
			story = append(story, string(n.Setup.Status))
		case n.Event != nil:
			story = append(story, string(n.Event.Type)+n.Event.Level)
		}
	}
	if got := strings.Join(story, " "); got != "running lifecycle lifecyclewarn failed exec" {
		t.Errorf("notices tell %q", got)
	}
}

func TestBrowserMachine(t *testing.T) {
	r := start(t, session.Browser)
	if s := r.state("?wait=1"); !s.Ready || s.Failed != "" {
		t.Fatalf("state = %+v", s)
	}
	began := time.Now()
	r.do(r.control, http.MethodPost, agentlink.ControlStart, agentlink.Start{SessionID: "s1", Kind: session.Browser, Viewport: browser.DefaultViewport}, 204)
	t.Logf("start took %v", time.Since(began))
	if b := r.do(r.link, http.MethodGet, agentlink.PathJSONVersion, nil, 200); !bytes.Contains(b, []byte("Chrome/")) {
		t.Errorf("version = %s", b)
	}
	if e := apierr.Parse(400, r.do(r.link, http.MethodPost, agentlink.PathExec, agentlink.ExecRequest{Command: "true"}, 400)); !strings.Contains(e.Message, "no shell") {
		t.Errorf("exec: %v", e)
	}
	if b := r.do(r.link, http.MethodGet, agentlink.PathFiles+"?path=.&list=1", nil, 200); !bytes.Contains(b, []byte(`"downloads"`)) {
		t.Errorf("a browser machine's folder = %s", b)
	}
	r.do(r.link, http.MethodGet, "/nowhere", nil, 404)
	r.do(r.control, http.MethodGet, "/nowhere", nil, 404)
}

func TestStartIsChecked(t *testing.T) {
	r := start(t, session.Shell)
	for name, s := range map[string]agentlink.Start{
		"no id":      {Kind: session.Shell},
		"wrong kind": {SessionID: "s", Kind: session.Browser},
	} {
		if e := apierr.Parse(400, r.do(r.control, http.MethodPost, agentlink.ControlStart, s, 400)); e.Code != apierr.InvalidRequest {
			t.Errorf("%s: %v", name, e)
		}
	}
	r.do(r.control, http.MethodGet, agentlink.ControlStart, nil, 405)
	r.do(r.control, http.MethodGet, agentlink.ControlEvents+"?after=x", nil, 400)
}

func TestUnknownPrefaceIsDropped(t *testing.T) {
	r := start(t, session.Shell)
	conn, err := r.dial(context.Background(), 'X')
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	_ = conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("read = %v, want EOF", err)
	}
}
