package main

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
	"github.com/coder/websocket"
)

func (r *rig) freeze(f agentlink.Freeze) {
	r.t.Helper()
	r.do(r.control, http.MethodPost, agentlink.ControlFreeze, f, 204)
}

func (r *rig) thaw(fresh bool) {
	r.t.Helper()
	entropy := make([]byte, 64)
	_, _ = rand.Read(entropy)
	var clock agentlink.Clock
	now := time.Now()
	if err := json.Unmarshal(r.do(r.control, http.MethodGet, agentlink.ControlClock, nil, 200), &clock); err != nil || clock.Monotonic <= 0 {
		r.t.Fatalf("clock: %v, %+v", err, clock)
	}
	r.do(r.control, http.MethodPost, agentlink.ControlThaw, agentlink.Thaw{Now: now, AsOf: clock.Monotonic, Entropy: entropy, Fresh: fresh}, 204)
}

func (r *rig) exec(e agentlink.ExecRequest) agentlink.ExecResult {
	r.t.Helper()
	var res agentlink.ExecResult
	if err := json.Unmarshal(r.do(r.link, http.MethodPost, agentlink.PathExec, e, 200), &res); err != nil {
		r.t.Fatal(err)
	}
	return res
}

// run runs a command in a named shell.
func (r *rig) run(shell, command string) string {
	r.t.Helper()
	name, _ := json.Marshal(shell)
	res := r.exec(agentlink.ExecRequest{Command: command, Shell: name})
	if res.ExitCode == nil || *res.ExitCode != 0 {
		r.t.Fatalf("%s: %+v", command, res)
	}
	return res.Stdout
}

// session gives the machine to a session.
func (r *rig) session(s agentlink.Start) {
	r.t.Helper()
	r.state("?wait=1")
	s.SessionID = "s1"
	r.do(r.control, http.MethodPost, agentlink.ControlStart, s, 204)
}

func (r *rig) file(name string) string { return filepath.Join(r.parts.workspace, name) }

func (r *rig) size(name string) int64 {
	info, err := os.Stat(r.file(name))
	if err != nil {
		return 0
	}
	return info.Size()
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never: %s", what)
		}
	}
}

// export reads the whole stream.
func (r *rig) export() []byte {
	r.t.Helper()
	return r.do(r.control, http.MethodGet, agentlink.ControlExport, nil, 200)
}

// load sends a stream to be imported and gives the answer.
func (r *rig) load(body io.Reader) (int, string) {
	r.t.Helper()
	res, err := r.control.Post("http://agent"+agentlink.ControlImport, "application/x-tar", body)
	if err != nil {
		r.t.Fatal(err)
	}
	defer res.Body.Close()
	b, _ := io.ReadAll(res.Body)
	return res.StatusCode, string(b)
}

func TestFrozenShellMachine(t *testing.T) {
	r := start(t, session.Shell)
	r.session(agentlink.Start{Kind: session.Shell})
	r.run("default", `count() { while :; do echo x >>near; sleep 0.01; done; }; (setsid env -i bash -c 'while :; do echo x >>away; sleep 0.01; done' &>/dev/null &); count & V=kept`)
	// Under way when all is frozen, with a timeout that must not run meanwhile.
	var under sync.WaitGroup
	var res agentlink.ExecResult
	under.Go(func() {
		b, _ := json.Marshal(agentlink.ExecRequest{Command: `for i in 1 2 3 4 5 6; do echo $i >>steps; sleep 0.1; done; echo done`, Shell: json.RawMessage(`"other"`), TimeoutMs: 6000})
		a, err := r.fresh().Post("http://agent"+agentlink.PathExec, "application/json", bytes.NewReader(b))
		if err == nil {
			defer a.Body.Close()
			_ = json.NewDecoder(a.Body).Decode(&res)
		}
	})
	eventually(t, "all run", func() bool { return r.size("near") > 0 && r.size("away") > 0 && r.size("steps") > 0 })
	r.freeze(agentlink.Freeze{})
	r.freeze(agentlink.Freeze{})
	was := [3]int64{r.size("near"), r.size("away"), r.size("steps")}
	waits := make(chan int, 3)
	var asking sync.WaitGroup
	for _, req := range []struct{ method, path, body string }{
		{http.MethodPost, agentlink.PathExec, `{"command":"echo $V","shell":"default"}`},
		{http.MethodPost, agentlink.PathExec, `{"command":"true","shell":false}`},
		{http.MethodPut, agentlink.PathFiles + "?path=new", "text"},
	} {
		asking.Go(func() {
			q, _ := http.NewRequest(req.method, "http://agent"+req.path, strings.NewReader(req.body))
			a, err := r.fresh().Do(q)
			if err != nil {
				waits <- 0
				return
			}
			a.Body.Close()
			waits <- a.StatusCode
		})
	}
	select {
	case code := <-waits:
		t.Fatalf("a request was answered with %d while frozen", code)
	case <-time.After(6500 * time.Millisecond): // longer than the timeout of the command under way, which may wait for a processor beside
	}
	if now := [3]int64{r.size("near"), r.size("away"), r.size("steps")}; now != was {
		t.Errorf("files grew from %v to %v while frozen", was, now)
	}
	r.thaw(false)
	r.thaw(false)
	asking.Wait()
	for range 3 {
		if code := <-waits; code != 200 {
			t.Errorf("a request that waited was answered with %d", code)
		}
	}
	under.Wait()
	if res.Stdout != "done\n" || res.TimedOut {
		t.Errorf("the command under way: %+v", res)
	}
	for i, name := range []string{"near", "away"} {
		eventually(t, name+" goes on", func() bool { return r.size(name) > was[i] })
	}
	if got := r.run("default", "echo $V"); got != "kept\n" {
		t.Errorf("the shell lost its state: %q", got)
	}
}

// fresh is a client of its own, for requests beside others.
func (r *rig) fresh() *http.Client {
	return &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return r.stream(ctx)
	}}}
}

// stream opens a session link that does not outlive the test.
func (r *rig) stream(ctx context.Context) (*link.Conn, error) {
	c, err := link.Dial(ctx, func(ctx context.Context) (net.Conn, error) { return r.dial(ctx, agentlink.PrefaceLink) }, link.Options{})
	if err == nil {
		r.t.Cleanup(c.Abort)
	}
	return c, err
}

func TestHeldMachine(t *testing.T) {
	r := start(t, session.Shell)
	r.session(agentlink.Start{Kind: session.Shell, Held: true, Setup: []string{"echo setup >>order"}})
	answered := make(chan error, 1)
	go func() {
		a, err := r.fresh().Post("http://agent"+agentlink.PathExec, "application/json", strings.NewReader(`{"command":"echo exec >>order"}`))
		if err == nil {
			a.Body.Close()
		}
		answered <- err
	}()
	select {
	case err := <-answered:
		t.Fatalf("a held machine ran a command: %v", err)
	case <-time.After(200 * time.Millisecond):
	}
	if r.size("order") != 0 {
		t.Fatal("a held machine ran something")
	}
	r.thaw(false)
	if err := <-answered; err != nil {
		t.Fatal(err)
	}
	if b, _ := os.ReadFile(r.file("order")); string(b) != "setup\nexec\n" {
		t.Errorf("order = %q", b)
	}
	if code, _ := r.load(strings.NewReader("")); code != 400 {
		t.Errorf("an import after the thaw: %d", code)
	}
}

func TestOrdersOutOfPlace(t *testing.T) {
	r := start(t, session.Shell)
	r.do(r.control, http.MethodGet, agentlink.ControlExport, nil, 400) // neither taken nor frozen
	r.thaw(true)                                                       // before it is taken: fine, any number of times
	r.thaw(true)
	r.session(agentlink.Start{Kind: session.Shell})
	r.do(r.control, http.MethodGet, agentlink.ControlExport, nil, 400)
	if code, _ := r.load(strings.NewReader("")); code != 400 {
		t.Errorf("an import into a machine that was not held: %d", code)
	}
	if e := apierr.Parse(400, r.do(r.control, http.MethodPost, agentlink.ControlThaw, agentlink.Thaw{Now: time.Now(), Fresh: true}, 400)); !strings.Contains(e.Message, "session") {
		t.Error(e)
	}
	r.do(r.control, http.MethodGet, agentlink.ControlFreeze, nil, 405)
}

// TestFreshThaw: what a clone of a template must not share with its siblings.
func TestFreshThaw(t *testing.T) {
	r := start(t, session.Both)
	id := filepath.Join(r.parts.root, "etc/machine-id")
	if err := os.MkdirAll(filepath.Dir(id), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(id, nil, 0o444); err != nil {
		t.Fatal(err)
	}
	r.state("?wait=1")
	old, err := r.stream(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(old, "GET / HTTP/1.1\r\nHost: agent\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if _, err := old.Read(make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if os.Getuid() != 0 {
		t.Skip("only root may write the memory of Chrome")
	}
	began := time.Now()
	r.thaw(true)
	t.Logf("a fresh thaw took %v", time.Since(began))
	one, _ := os.ReadFile(id)
	r.thaw(true)
	two, _ := os.ReadFile(id)
	if len(one) != 33 || bytes.Equal(one, two) {
		t.Errorf("machine-ids %q and %q", one, two)
	}
	if _, err := io.Copy(io.Discard, old); err == nil || !strings.Contains(err.Error(), "lineage") {
		t.Errorf("a stream of the template: %v", err)
	}
	if r.mended.Load() != 2 || !r.state("").Ready {
		t.Errorf("mended %d times, %+v", r.mended.Load(), r.state(""))
	}
	r.session(agentlink.Start{Kind: session.Both})
	if got := r.run("default", "echo fine"); got != "fine\n" {
		t.Error(got)
	}
}

// TestTemplate: a machine that clones are made of has nothing that they would
// have to end, and each makes its own.
func TestTemplate(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root may write the memory of Chrome")
	}
	r := start(t, session.Both)
	r.state("?wait=1")
	r.freeze(agentlink.Freeze{Template: true})
	if line := r.commandLines(); strings.Contains(line, "--type=renderer") || strings.Contains(line, "--norc") {
		t.Errorf("a template runs %s", line)
	}
	r.freeze(agentlink.Freeze{Template: true})
	r.thaw(true)
	r.session(agentlink.Start{Kind: session.Both, Viewport: session.Viewport{Width: 801, Height: 603}})
	var list []struct{ Type, URL string }
	if err := json.Unmarshal(r.do(r.link, http.MethodGet, agentlink.PathJSONList, nil, 200), &list); err != nil || len(list) != 1 || list[0].Type != "page" || list[0].URL != "about:blank" {
		t.Errorf("a client sees %+v, %v", list, err)
	}
	r.do(r.control, http.MethodPost, agentlink.ControlWhole, struct{}{}, 204)
	if line := r.commandLines(); !strings.Contains(line, "--type=renderer") || !strings.Contains(line, "--norc") {
		t.Errorf("a whole machine runs %s", line)
	}
	if got := r.run("default", "echo fine"); got != "fine\n" {
		t.Error(got)
	}
	r.do(r.control, http.MethodPost, agentlink.ControlFreeze, agentlink.Freeze{Template: true}, 400)
}

// commandLines are those of the processes that this rig's agent started, which
// are this process's descendants.
func (r *rig) commandLines() string {
	r.t.Helper()
	out, err := exec.Command("ps", "-ww", "-e", "--sort=start_time", "-o", "pid=,ppid=,args=").Output()
	if err != nil {
		r.t.Fatal(err)
	}
	own := map[string]bool{fmt.Sprint(os.Getpid()): true}
	var lines []string
	for grown := true; grown; {
		grown = false
		for line := range strings.Lines(string(out)) {
			if f := strings.Fields(line); own[f[1]] && !own[f[0]] && f[2] != "ps" {
				own[f[0]], grown = true, true
				lines = append(lines, line)
			}
		}
	}
	return strings.Join(lines, "")
}

func TestPortable(t *testing.T) {
	t.Run("cgroups", func(t *testing.T) { testPortable(t, testFreeze) })
	t.Run("signals", func(t *testing.T) {
		testPortable(t, func(*testing.T) freeze.Config { return freeze.Config{BrowserGID: 900} })
	})
}

func testPortable(t *testing.T, how func(*testing.T) freeze.Config) {
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, `<!doctype html><link rel="icon" href="data:,"><body style="height:9000px">`)
	}))
	defer site.Close()
	a := startWith(t, session.Both, how(t))
	a.session(agentlink.Start{Kind: session.Both, Env: map[string]string{"GIVEN": "g"}})
	a.run("default", `mkdir -p deep/empty && cd deep && export MADE="two
lines" && f() { echo from f; } && export -f f && unexported=1`)
	a.run("build", `cd /tmp && export ONLY=here; (exit 0)`)
	large := make([]byte, 8<<20)
	_, _ = rand.Read(large)
	if err := os.WriteFile(a.file("large"), large, 0o640); err != nil {
		t.Fatal(err)
	}
	a.run("default", `cd .. ; ln -s deep/none link; echo '#!/bin/sh' >run.sh; chmod 755 run.sh; cd deep`)
	// A shell that is busy when the capture comes.
	busy := make(chan struct{})
	go func() {
		defer close(busy)
		res, err := a.fresh().Post("http://agent"+agentlink.PathExec, "application/json", strings.NewReader(`{"shell":"busy","command":"cd deep; export BUSY=yes; echo started >../started; sleep 1000; echo ended >../ended"}`))
		if err == nil {
			res.Body.Close()
		}
	}()
	eventually(t, "the busy shell", func() bool { return a.size("started") > 0 })
	page := a.cdp()
	page.open(site.URL + "/first")
	page.evaluate(`document.cookie = "kept=1; max-age=1000"; localStorage.setItem("a", "b"); sessionStorage.setItem("c", "d"); scrollTo(0, 3000); ""`)
	page.close()

	a.freeze(agentlink.Freeze{Portable: true})
	began := time.Now()
	stream := a.export()
	t.Logf("an export of %d bytes took %v", len(stream), time.Since(began))
	again := a.export() // a first try may have been lost
	if len(again) < len(large) {
		t.Errorf("a second export has %d bytes", len(again))
	}
	if bytes.Contains(stream, []byte("BERTH_EXEC")) {
		t.Error("the agent's marks are in the stream")
	}

	b := startWith(t, session.Both, how(t))
	b.session(agentlink.Start{Kind: session.Both, Held: true, Env: map[string]string{"GIVEN": "g"}})
	began = time.Now()
	if code, text := b.load(bytes.NewReader(stream)); code != 204 {
		t.Fatalf("import: %d %s", code, text)
	}
	t.Logf("an import took %v", time.Since(began))
	if code, _ := b.load(bytes.NewReader(stream)); code != 400 {
		t.Errorf("a second import: %d", code)
	}
	began = time.Now()
	b.thaw(false)
	t.Logf("a thaw took %v", time.Since(began))

	// The workspace of a real machine is called the same everywhere; here the
	// shell goes on in the source's.
	want := a.parts.workspace + "/deep|g|two\nlines|from f||"
	got := b.run("default", `printf '%s|%s|%s|%s|%s|' "$PWD" "$GIVEN" "$MADE" "$(f)" "$unexported"`)
	if got != want {
		t.Errorf("default shell:\n%q, want\n%q", got, want)
	}
	if got := b.run("build", `echo $PWD $ONLY`); got != "/tmp here\n" {
		t.Errorf("named shell: %q", got)
	}
	if got := b.run("busy", `echo $BUSY`); got != "yes\n" {
		t.Errorf("busy shell: %q", got)
	}
	moved, err := os.ReadFile(b.file("large"))
	if err != nil || sha256.Sum256(moved) != sha256.Sum256(large) {
		t.Errorf("the large file: %v", err)
	}
	if info, err := os.Stat(b.file("run.sh")); err != nil || info.Mode().Perm() != 0o755 || os.Getuid() == 0 && info.Sys().(*syscall.Stat_t).Uid != 1000 {
		t.Errorf("run.sh: %+v, %v", info, err)
	}
	if to, err := os.Readlink(b.file("link")); err != nil || to != "deep/none" {
		t.Errorf("link: %q, %v", to, err)
	}
	if _, err := os.Stat(b.file("deep/empty")); err != nil {
		t.Error(err)
	}
	page = b.cdp()
	page.attach(site.URL)
	eventually(t, "the page is as it was", func() bool {
		return page.evaluate(`[location.href, document.cookie, localStorage.getItem("a"), sessionStorage.getItem("c"), scrollY].join(" ")`) == site.URL+"/first kept=1 b d 3000"
	})
	page.close()

	// The other verdict: the source goes on as if nothing had been.
	a.thaw(false)
	page = a.cdp()
	page.attach(site.URL)
	if got := page.evaluate(`sessionStorage.getItem("c")`); got != "d" {
		t.Errorf("the source's page: %q", got)
	}
	page.close()
	if got := a.run("default", `echo $MADE $unexported`); got != "two lines 1\n" {
		t.Errorf("the source's shell: %q", got)
	}
	a.do(a.link, http.MethodPost, agentlink.PathShellRestart, map[string]string{"shell": "busy"}, 204)
	<-busy
}

// TestClientsWaitWhileFrozen: what a CDP client asks is not done after an export
// has told how things were, and is done after all when the machine goes on.
func TestClientsWaitWhileFrozen(t *testing.T) {
	r := start(t, session.Browser)
	r.session(agentlink.Start{Kind: session.Browser})
	page := r.cdp()
	defer page.close()
	page.attach("about:blank")
	for _, f := range []agentlink.Freeze{{Portable: true}, {}} {
		r.freeze(f)
		answered := make(chan string, 1)
		go func() { answered <- page.evaluate(`"answer"`) }()
		select {
		case <-answered:
			t.Errorf("%+v: answered while frozen", f)
		case <-time.After(200 * time.Millisecond):
		}
		r.thaw(false)
		if got := <-answered; got != "answer" {
			t.Errorf("%+v: %q", f, got)
		}
	}
}

func TestABadImportIsAnError(t *testing.T) {
	r := start(t, session.Shell)
	r.session(agentlink.Start{Kind: session.Shell, Held: true})
	if code, text := r.load(strings.NewReader(strings.Repeat("noise", 1000))); code != 400 {
		t.Errorf("noise: %d %s", code, text)
	}
}

// client is a CDP client on one page.
type client struct {
	t       *testing.T
	conn    *websocket.Conn
	id      int
	session string
}

func (r *rig) cdp() *client {
	r.t.Helper()
	conn, _, err := websocket.Dial(r.t.Context(), "ws://agent"+agentlink.PathCDP, &websocket.DialOptions{HTTPClient: r.link})
	if err != nil {
		r.t.Fatal(err)
	}
	conn.SetReadLimit(-1)
	return &client{t: r.t, conn: conn}
}

func (c *client) close() { _ = c.conn.Close(websocket.StatusNormalClosure, "") }

func (c *client) call(method string, params, out any) {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(c.t.Context(), 30*time.Second)
	defer cancel()
	c.id++
	msg, _ := json.Marshal(map[string]any{"id": c.id, "method": method, "params": params, "sessionId": c.session})
	if c.session == "" {
		msg, _ = json.Marshal(map[string]any{"id": c.id, "method": method, "params": params})
	}
	if err := c.conn.Write(ctx, websocket.MessageText, msg); err != nil {
		c.t.Fatal(err)
	}
	for {
		_, b, err := c.conn.Read(ctx)
		if err != nil {
			c.t.Fatalf("%s: %v", method, err)
		}
		var a struct {
			ID     int
			Result json.RawMessage
			Error  json.RawMessage
		}
		if err := json.Unmarshal(b, &a); err != nil {
			c.t.Fatal(err)
		}
		if a.ID != c.id {
			continue
		}
		if len(a.Error) > 0 {
			c.t.Fatalf("%s: %s", method, a.Error)
		}
		if out != nil {
			_ = json.Unmarshal(a.Result, out)
		}
		return
	}
}

// attach attaches to the first page whose URL begins so.
func (c *client) attach(url string) {
	c.t.Helper()
	eventually(c.t, "a page at "+url, func() bool {
		var got struct {
			TargetInfos []struct{ TargetID, Type, URL string }
		}
		c.call("Target.getTargets", struct{}{}, &got)
		for _, i := range got.TargetInfos {
			if i.Type == "page" && strings.HasPrefix(i.URL, url) {
				var a struct{ SessionID string }
				c.call("Target.attachToTarget", map[string]any{"targetId": i.TargetID, "flatten": true}, &a)
				c.session = a.SessionID
				return true
			}
		}
		return false
	})
}

// open brings the first page to a URL.
func (c *client) open(url string) {
	c.t.Helper()
	c.attach("about:blank")
	c.call("Page.navigate", map[string]string{"url": url}, nil)
	eventually(c.t, "loaded", func() bool { return c.evaluate("document.readyState") == "complete" })
}

func (c *client) evaluate(expression string) string {
	c.t.Helper()
	var a struct {
		Result           struct{ Value string }
		ExceptionDetails json.RawMessage
	}
	c.call("Runtime.evaluate", map[string]string{"expression": expression}, &a)
	if len(a.ExceptionDetails) > 0 {
		c.t.Fatalf("%s: %s", expression, a.ExceptionDetails)
	}
	return a.Result.Value
}
