package browser

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/session"
	"github.com/go-rod/rod/lib/proto"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a supervised Chrome in a folder of its own.
type rig struct {
	*Browser
	cfg Config

	mu     sync.Mutex
	events []string
}

// testConfig gives a configuration for the real Chromium: $BERTH_CHROMIUM, else
// Debian's. Without one the test fails in CI and is skipped on a laptop.
func testConfig(t *testing.T) Config {
	t.Helper()
	binary, err := findBinary(os.Getenv("BERTH_CHROMIUM"))
	if err != nil {
		if os.Getenv("CI") == "true" {
			t.Fatal(err)
		}
		t.Skip(err)
	}
	dir, err := os.MkdirTemp("", "berth-browser-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cfg := Config{Binary: binary, Profile: filepath.Join(dir, "profile"), Home: filepath.Join(dir, "home"), Downloads: filepath.Join(dir, "downloads")}
	if os.Getuid() == 0 {
		cfg.UID, cfg.GID, cfg.Groups = 1000, 900, []int{1000}
	}
	if err := cfg.ownDir(cfg.Home); err != nil {
		t.Fatal(err)
	}
	return cfg
}

func start(t *testing.T, cfg Config) *rig {
	t.Helper()
	r := &rig{cfg: cfg}
	cfg.Event = func(level, text string) {
		r.mu.Lock()
		r.events = append(r.events, level+": "+text)
		r.mu.Unlock()
	}
	r.Browser = New(cfg, slog.New(slog.NewTextHandler(io.Discard, nil)))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
		if left := processesOf(cfg.Profile); len(left) > 0 {
			t.Errorf("processes left: %v", left)
		}
	})
	if _, err := r.Endpoint(within(t, 60*time.Second)); err != nil {
		t.Fatalf("chrome did not come up: %v (%s)", err, r.Failed())
	}
	return r
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// processesOf lists the living processes that name the profile.
func processesOf(profile string) (pids []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, f := range files {
		line, _ := os.ReadFile(f)
		if strings.Contains(string(line), "--user-data-dir="+profile) {
			pids = append(pids, filepath.Base(filepath.Dir(f)))
		}
	}
	return pids
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(10 * time.Millisecond) {
		if ok() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
	}
}

func (r *rig) chrome(t *testing.T) *chrome {
	t.Helper()
	c, err := r.wait(within(t, 30*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// open makes a page with the parameters and returns its id.
func (r *rig) open(t *testing.T, req proto.TargetCreateTarget) proto.TargetTargetID {
	t.Helper()
	var res proto.TargetCreateTargetResult
	if err := r.chrome(t).call(within(t, 10*time.Second), req, &res); err != nil {
		t.Fatal(err)
	}
	return res.TargetID
}

func (r *rig) close(t *testing.T, id proto.TargetTargetID) {
	t.Helper()
	if err := r.chrome(t).call(within(t, 10*time.Second), proto.TargetCloseTarget{TargetID: id}, nil); err != nil {
		t.Fatal(err)
	}
}

func (r *rig) area(t *testing.T, id proto.TargetTargetID) session.Viewport {
	t.Helper()
	v, err := r.chrome(t).pageArea(within(t, 10*time.Second), id)
	if err != nil {
		t.Fatal(err)
	}
	return v
}

func TestFirstPageHasTheDefaultSize(t *testing.T) {
	r := start(t, testConfig(t))
	pages := r.chrome(t).pages.ids()
	if len(pages) != 1 {
		t.Fatalf("pages = %v, want one", pages)
	}
	if got := r.area(t, pages[0]); got != DefaultViewport {
		t.Errorf("page area = %v, want %v", got, DefaultViewport)
	}
	if f := r.chrome(t).frame.Load(); f != frameHeight {
		t.Logf("this Chrome's frame is %d high; flags.go assumes %d, which costs a resize at each start", f, frameHeight)
	}
}

func TestSetViewport(t *testing.T) {
	r := start(t, testConfig(t))
	first := r.chrome(t).pages.ids()[0]
	for _, want := range []session.Viewport{{Width: 1920, Height: 1080}, {Width: 200, Height: 200}, {Width: 3840, Height: 2160}, {Width: 801, Height: 603}} {
		began := time.Now()
		if err := r.SetViewport(within(t, 10*time.Second), want); err != nil {
			t.Fatal(err)
		}
		t.Logf("%v took %v", want, time.Since(began))
		if got := r.area(t, first); got != want {
			t.Errorf("open page = %v, want %v", got, want)
		}
		tab := r.open(t, proto.TargetCreateTarget{URL: "about:blank"})
		if got := r.area(t, tab); got != want {
			t.Errorf("new tab = %v, want %v", got, want)
		}
		window := r.open(t, proto.TargetCreateTarget{URL: "about:blank", NewWindow: true})
		eventually(t, "a new window of the wanted size", func() bool { return r.area(t, window) == want })
		r.close(t, tab) // the page behind it is sized when it shows again
		r.close(t, window)
	}
}

func TestDefaultContextNeverWithoutPage(t *testing.T) {
	r := start(t, testConfig(t))
	want := session.Viewport{Width: 900, Height: 600}
	if err := r.SetViewport(within(t, 10*time.Second), want); err != nil {
		t.Fatal(err)
	}
	c := r.chrome(t)
	old := c.pages.ids()[0]
	if err := c.call(within(t, 10*time.Second), proto.TargetCloseTarget{TargetID: old}, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "another page", func() bool { ids := c.pages.ids(); return len(ids) == 1 && ids[0] != old })
	next := c.pages.ids()[0]
	eventually(t, "its size", func() bool { return r.area(t, next) == want })
}

func TestDeadChromeIsStartedAgain(t *testing.T) {
	r := start(t, testConfig(t))
	want := session.Viewport{Width: 900, Height: 600}
	if err := r.SetViewport(within(t, 10*time.Second), want); err != nil {
		t.Fatal(err)
	}
	before, err := r.Endpoint(within(t, time.Second))
	if err != nil {
		t.Fatal(err)
	}
	old := processesOf(r.cfg.Profile)
	if err := syscall.Kill(r.chrome(t).proc.cmd.Process.Pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-before.Gone
	eventually(t, "another chrome", func() bool {
		e, err := r.Endpoint(within(t, 30*time.Second))
		return err == nil && e.Path != before.Path
	})
	for _, pid := range processesOf(r.cfg.Profile) {
		for _, was := range old {
			if pid == was {
				t.Errorf("process %s of the dead chrome lives on", pid)
			}
		}
	}
	if got := r.area(t, r.chrome(t).pages.ids()[0]); got != want {
		t.Errorf("page area after the restart = %v, want %v", got, want)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.events) == 0 || !strings.HasPrefix(r.events[0], "warn: Chrome died") {
		t.Errorf("events = %q, want a warning that Chrome died", r.events)
	}
}

func TestChromeRunsAsItsUserWithoutNewPrivileges(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can run Chrome as another user")
	}
	r := start(t, testConfig(t))
	status, err := os.ReadFile("/proc/" + strconv.Itoa(r.chrome(t).proc.cmd.Process.Pid) + "/status")
	if err != nil {
		t.Fatal(err)
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(status)) {
		k, v, _ := strings.Cut(line, ":")
		fields[k] = strings.Join(strings.Fields(v), " ")
	}
	for k, want := range map[string]string{"Uid": "1000 1000 1000 1000", "Gid": "900 900 900 900", "Groups": "1000", "NoNewPrivs": "1", "CapEff": "0000000000000000"} {
		if fields[k] != want {
			t.Errorf("%s = %q, want %q", k, fields[k], want)
		}
	}
	if note := r.Note(); note != "" {
		t.Errorf("note = %q; this kernel gives Chrome its sandbox", note)
	}
}

func TestDownloadLandsInTheDownloadsFolder(t *testing.T) {
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Disposition", `attachment; filename="report.csv"`)
		_, _ = io.WriteString(w, "a,b\n1,2\n")
	}))
	defer web.Close()
	r := start(t, testConfig(t))
	r.open(t, proto.TargetCreateTarget{URL: web.URL})
	file := filepath.Join(r.cfg.Downloads, "report.csv")
	eventually(t, "the download", func() bool { b, err := os.ReadFile(file); return err == nil && string(b) == "a,b\n1,2\n" })
	if left := r.chrome(t).pages.ids(); len(left) == 0 {
		t.Error("no page is left")
	}
}

// Whoever types into a form is nobody's business: what passes the proxy is
// billed to the customer.
func TestChromeDialsNothingByItself(t *testing.T) {
	var mu sync.Mutex
	var asked []string
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Host != "accounts.google.com:443" { // see flags.go
			mu.Lock()
			asked = append(asked, r.Method+" "+r.Host)
			mu.Unlock()
		}
		w.WriteHeader(http.StatusBadGateway)
	}))
	defer proxy.Close()
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, "<form><textarea autofocus></textarea><input name=email><input type=password name=p></form>")
	}))
	defer site.Close()
	cfg := testConfig(t)
	cfg.Proxy = proxy.URL
	r := start(t, cfg)
	ctx := within(t, 60*time.Second)
	page := r.open(t, proto.TargetCreateTarget{URL: site.URL})
	var at proto.TargetAttachToTargetResult
	if err := r.chrome(t).call(ctx, proto.TargetAttachToTarget{TargetID: page, Flatten: true}, &at); err != nil {
		t.Fatal(err)
	}
	for i := range 20 { // four seconds: without the flags the first call comes within one
		key := proto.InputDispatchKeyEvent{Type: proto.InputDispatchKeyEventTypeKeyDown, Text: string(rune('a' + i)), Key: string(rune('a' + i))}
		if err := r.chrome(t).callOn(ctx, string(at.SessionID), key, nil); err != nil {
			t.Fatal(err)
		}
		time.Sleep(200 * time.Millisecond)
	}
	mu.Lock()
	defer mu.Unlock()
	if len(asked) > 0 {
		t.Errorf("Chrome asked for %v", asked)
	}
}

func TestWebGLWorks(t *testing.T) {
	r := start(t, testConfig(t))
	c := r.chrome(t)
	var attached proto.TargetAttachToTargetResult
	if err := c.call(within(t, 10*time.Second), proto.TargetAttachToTarget{TargetID: c.pages.ids()[0], Flatten: true}, &attached); err != nil {
		t.Fatal(err)
	}
	var answer struct {
		Result struct{ Value json.RawMessage }
	}
	ask := proto.RuntimeEvaluate{Expression: `(() => { const g = document.createElement("canvas").getContext("webgl"); return g ? g.getParameter(g.VERSION) : "" })()`}
	if err := c.callOn(within(t, 20*time.Second), string(attached.SessionID), ask, &answer); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(answer.Result.Value), "WebGL") {
		t.Errorf("WebGL version = %s", answer.Result.Value)
	}
}

func TestMissingChromeFails(t *testing.T) {
	b := New(Config{Binary: "/nowhere/chrome"}, slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err := b.Run(context.Background()); err == nil || b.Failed() == "" || b.Ready() {
		t.Errorf("Run = %v, Failed = %q, Ready = %v", err, b.Failed(), b.Ready())
	}
}

func TestWithoutASandboxChromeRunsAndSaysSo(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("as root Chrome refuses its sandbox, which is what this test needs")
	}
	cfg := testConfig(t)
	cfg.UID, cfg.GID, cfg.Groups = 0, 0, nil
	r := start(t, cfg)
	if note := r.Note(); !strings.Contains(note, "without its own sandbox") {
		t.Errorf("note = %q", note)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if len(r.events) != 1 || !strings.HasPrefix(r.events[0], "warn: Chrome runs without its own sandbox") {
		t.Errorf("events = %q", r.events)
	}
}
