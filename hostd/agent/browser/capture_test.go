package browser

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/berth-dev/berth/hostd/agent/procfs"
	"github.com/berth-dev/berth/shared/session"
	"github.com/go-rod/rod/lib/proto"
)

// site sets cookies that scripts cannot, and serves a tall page.
func site(t *testing.T) *httptest.Server {
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/set" {
			http.SetCookie(w, &http.Cookie{Name: "session", Value: "s1", Path: "/"})
			http.SetCookie(w, &http.Cookie{Name: "kept", Value: "k1", Path: "/", MaxAge: 86400, SameSite: http.SameSiteLaxMode})
			http.SetCookie(w, &http.Cookie{Name: "hidden", Value: "h1", Path: "/", HttpOnly: true, SameSite: http.SameSiteStrictMode})
			http.SetCookie(w, &http.Cookie{Name: "deep", Value: "d1", Path: "/deep"})
			w.Header().Add("Set-Cookie", "parted=p1; Path=/; Secure; SameSite=None; Partitioned")
		}
		w.Header().Set("Content-Type", "text/html")
		_, _ = io.WriteString(w, `<!doctype html><title>`+r.URL.Path+`</title><link rel="icon" href="data:,"><body style="height:9000px;width:5000px">cookies=`+r.Header.Get("Cookie"))
	}))
	t.Cleanup(s.Close)
	return s
}

// script evaluates an expression that gives a string or a promise of one.
func (r *rig) script(t *testing.T, id proto.TargetTargetID, expression string) string {
	t.Helper()
	ctx := within(t, 20*time.Second)
	tab, err := r.chrome(t).attachTab(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	defer tab.detach(ctx)
	out, err := tab.evaluate(ctx, proto.RuntimeEvaluate{Expression: expression, AwaitPromise: true})
	if err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	return out
}

func (r *rig) visit(t *testing.T, id proto.TargetTargetID, at string) {
	t.Helper()
	ctx := within(t, 20*time.Second)
	tab, err := r.chrome(t).attachTab(ctx, id)
	if err != nil {
		t.Fatal(err)
	}
	defer tab.detach(ctx)
	if err := tab.call(ctx, proto.PageEnable{}, nil); err != nil {
		t.Fatal(err)
	}
	tab.drop()
	if err := tab.call(ctx, proto.PageNavigate{URL: at}, nil); err != nil {
		t.Fatal(err)
	}
	if err := tab.next(ctx, &proto.PageLoadEventFired{}); err != nil {
		t.Fatal(err)
	}
}

const idbPut = `new Promise((ok, bad) => { const q = indexedDB.open("db", 1);
	q.onupgradeneeded = () => q.result.createObjectStore("s"); q.onerror = () => bad(q.error);
	q.onsuccess = () => { const x = q.result.transaction("s", "readwrite"); x.objectStore("s").put({deep: [1, new Uint8Array([7, 8])]}, "k"); x.oncomplete = () => ok("") } })`

const idbGet = `new Promise((ok, bad) => { const q = indexedDB.open("db", 1); q.onerror = () => bad(q.error);
	q.onsuccess = () => { const g = q.result.transaction("s").objectStore("s").get("k"); g.onsuccess = () => ok(JSON.stringify([g.result.deep[0], ...g.result.deep[1]])); g.onerror = () => bad(g.error) } })`

// copyStorage takes the storage folders of one profile into another, as files.
func copyStorage(from, to *Browser) error {
	for _, name := range StorageFolders {
		src := filepath.Join(from.cfg.Profile, "Default", name)
		if _, err := os.Stat(src); err != nil {
			continue
		}
		dst := filepath.Join(to.cfg.Profile, "Default", name)
		_ = os.RemoveAll(dst)
		if err := os.CopyFS(dst, os.DirFS(src)); err != nil {
			return err
		}
		err := filepath.Walk(dst, func(p string, _ os.FileInfo, err error) error {
			if err != nil {
				return err
			}
			return to.OwnStorage(func(uid, gid int) error { return os.Lchown(p, uid, gid) })
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func TestStateIsCarried(t *testing.T) {
	one, two := site(t), site(t)
	a := start(t, testConfig(t))
	want := session.Viewport{Width: 1000, Height: 700}
	if err := a.SetViewport(within(t, 10*time.Second), want); err != nil {
		t.Fatal(err)
	}
	first := a.chrome(t).pages.ids()[0]
	a.visit(t, first, one.URL+"/set")
	a.visit(t, first, one.URL+"/one")
	second := a.open(t, proto.TargetCreateTarget{URL: "about:blank"})
	a.visit(t, second, two.URL+"/two?q=1#part")
	third := a.open(t, proto.TargetCreateTarget{URL: "about:blank", NewWindow: true})
	a.visit(t, third, "data:text/html,<title>third</title>")
	closed := a.open(t, proto.TargetCreateTarget{URL: "about:blank"})
	three := site(t)
	a.visit(t, closed, three.URL+"/closed")
	a.script(t, closed, `localStorage.setItem("closed", "page"); ""`)
	a.script(t, first, idbPut)
	a.script(t, first, `localStorage.setItem("half", "\ud800x"); localStorage.setItem("q", "\"'\\</script>\u2028"); sessionStorage.setItem("tab", "1"); scrollTo(300, 4000); ""`)
	a.script(t, second, `sessionStorage.setItem("tab", "2"); document.cookie = "js=j1; max-age=1000"; ""`)
	a.close(t, closed)
	if err := a.chrome(t).call(within(t, 5*time.Second), proto.TargetActivateTarget{TargetID: second}, nil); err != nil {
		t.Fatal(err)
	}
	eventually(t, "what was closed is on the disk", func() bool {
		found := false
		_ = filepath.Walk(filepath.Join(a.cfg.Profile, "Default", "Local Storage"), func(p string, info os.FileInfo, err error) error {
			b, _ := os.ReadFile(p)
			found = found || strings.Contains(string(b), "closed")
			return nil
		})
		return found
	})
	began := time.Now()
	s, err := a.State(within(t, 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	raw, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("state of %d bytes took %v", len(raw), time.Since(began))

	b := start(t, testConfig(t))
	began = time.Now()
	if err := b.Replace(within(t, 30*time.Second), func() error { return copyStorage(a.Browser, b.Browser) }); err != nil {
		t.Fatal(err)
	}
	t.Logf("replacing chrome took %v", time.Since(began))
	var got State
	if err := json.Unmarshal(raw, &got); err != nil {
		t.Fatal(err)
	}
	if err := got.Check(); err != nil {
		t.Fatal(err)
	}
	began = time.Now()
	if err := b.Prepare(within(t, 30*time.Second), got); err != nil {
		t.Fatal(err)
	}
	t.Logf("preparing took %v", time.Since(began))
	began = time.Now()
	if err := b.Open(within(t, 30*time.Second)); err != nil {
		t.Fatal(err)
	}
	t.Logf("opening took %v", time.Since(began))

	ids := b.chrome(t).pages.ofDefault()
	if len(ids) != 3 {
		t.Fatalf("%d pages", len(ids))
	}
	for i, want := range []string{one.URL + "/one", two.URL + "/two?q=1#part", "data:text/html,<title>third</title>"} {
		eventually(t, want, func() bool { return b.script(t, ids[i], `location.href`) == want })
	}
	eventually(t, "scrolled", func() bool { return b.script(t, ids[0], `scrollX + "," + scrollY`) == "300,4000" })
	if got := b.script(t, ids[1], `document.visibilityState`); got != "visible" {
		t.Errorf("the active tab is %s", got)
	}
	for expression, want := range map[string]string{
		`JSON.stringify(localStorage.getItem("half"))`: `"\ud800x"`,
		`localStorage.getItem("q")`:                    "\"'\\</script>\u2028",
		`sessionStorage.getItem("tab")`:                "1",
		idbGet:                                         "[1,7,8]",
	} {
		if got := b.script(t, ids[0], expression); got != want {
			t.Errorf("%s = %q, want %q", expression, got, want)
		}
	}
	if got := b.script(t, ids[1], `sessionStorage.getItem("tab") + document.cookie.match(/js=j1/)[0]`); got != "2js=j1" {
		t.Errorf("second tab has %q", got)
	}
	var past proto.PageGetNavigationHistoryResult
	tab, err := b.chrome(t).attachTab(within(t, 5*time.Second), ids[0])
	if err != nil {
		t.Fatal(err)
	}
	if err := tab.call(within(t, 5*time.Second), proto.PageGetNavigationHistory{}, &past); err != nil || len(past.Entries) != 1 {
		t.Errorf("history = %+v, %v", past.Entries, err)
	}
	tab.detach(t.Context())
	extra := b.open(t, proto.TargetCreateTarget{URL: "about:blank"})
	b.visit(t, extra, three.URL+"/again")
	if got := b.script(t, extra, `localStorage.getItem("closed")`); got != "page" {
		t.Errorf("storage of an origin without a page = %q", got)
	}
	b.close(t, extra)
	if got := b.area(t, ids[1]); got != want {
		t.Errorf("viewport = %v", got)
	}
	again, err := b.State(within(t, 20*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	if x, y := named(s.Cookies), named(again.Cookies); x != y {
		t.Errorf("cookies were\n%s\nare\n%s", x, y)
	}
	if s.Tabs[0].Window != s.Tabs[1].Window || again.Tabs[2].Window == again.Tabs[0].Window || again.Tabs[0].Window != again.Tabs[1].Window {
		t.Errorf("windows: %+v, were %+v", again.Tabs, s.Tabs)
	}
}

// named lists cookies by name.
func named(list []Cookie) string {
	slices.SortFunc(list, func(a, b Cookie) int { return strings.Compare(a.Name, b.Name) })
	b, _ := json.MarshalIndent(list, "", " ")
	return string(b)
}

func TestABusyPageKeepsItsURL(t *testing.T) {
	s := site(t)
	r := start(t, testConfig(t))
	id := r.chrome(t).pages.ids()[0]
	r.visit(t, id, s.URL+"/busy")
	r.script(t, id, `setTimeout(() => { while (true); }, 0); ""`)
	got, err := r.State(within(t, 20*time.Second))
	if err != nil || len(got.Tabs) != 1 || got.Tabs[0].URL != s.URL+"/busy" {
		t.Errorf("state = %+v, %v", got, err)
	}
}

func TestForeignStatesAreChecked(t *testing.T) {
	v := DefaultViewport
	for name, s := range map[string]State{
		"viewport": {},
		"tabs":     {Viewport: v, Tabs: make([]Tab, maxTabs+1)},
		"origin":   {Viewport: v, Local: map[string]Items{"javascript:alert(1)": nil}},
		"path":     {Viewport: v, Tabs: []Tab{{URL: "about:blank", Origin: "http://a/b"}}},
		"user":     {Viewport: v, Tabs: []Tab{{URL: "about:blank", Origin: "http://u@a"}}},
	} {
		if s.Check() == nil {
			t.Errorf("%s: taken", name)
		}
	}
	s := State{Viewport: v, Tabs: []Tab{{URL: "javascript:alert(1)"}, {URL: "https://a/b"}}}
	if err := s.Check(); err != nil || s.Tabs[0].URL != "about:blank" || s.Tabs[1].URL != "https://a/b" {
		t.Errorf("%+v, %v", s.Tabs, err)
	}
}

// flag reads the byte by which BoringSSL sees that its process forked.
func flag(t *testing.T, pid int) byte {
	t.Helper()
	areas, err := wiped(pid)
	if err != nil || len(areas) == 0 {
		t.Fatalf("no area is wiped on fork: %v", err)
	}
	mem, err := os.Open(procfs.Path(pid, "mem"))
	if err != nil {
		t.Fatal(err)
	}
	defer mem.Close()
	var b [1]byte
	if _, err := mem.ReadAt(b[:], areas[0].start); err != nil {
		t.Fatal(err)
	}
	return b[0]
}

// What is to be wiped is known whole or not at all.
func TestWipedIsReadToTheEnd(t *testing.T) {
	const two = "1000-2000 rw-p 0 0:0 0\nVmFlags: rd wr wf sd \n3000-4000 rw-p 0 0:0 0\nVmFlags: rd wr sd \n5000-6000 rw-p 0 0:0 0\nVmFlags: rd wf\n"
	got, err := wipedIn(strings.NewReader(two))
	if err != nil || !slices.Equal(got, []area{{0x1000, 0x2000}, {0x5000, 0x6000}}) {
		t.Errorf("%x, %v", got, err)
	}
	if _, err := wipedIn(io.MultiReader(strings.NewReader(two[:60]), iotest.ErrReader(syscall.EIO))); !errors.Is(err, syscall.EIO) {
		t.Errorf("half of it was read: %v", err)
	}
}

func TestRenew(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root may write the memory of other processes")
	}
	r := start(t, testConfig(t))
	c := r.chrome(t)
	old := c.pages.ids()
	was := r.script(t, old[0], `String(Math.random())`)
	before := map[int]bool{}
	for _, pid := range c.renderers() {
		before[pid] = true
	}
	var known proto.SystemInfoGetProcessInfoResult
	if err := c.call(within(t, 5*time.Second), proto.SystemInfoGetProcessInfo{}, &known); err != nil {
		t.Fatal(err)
	}
	for _, p := range known.ProcessInfo { // Renew waits until Chrome names none of them
		if p.Type == "renderer" && !before[p.ID] {
			t.Errorf("chrome calls a renderer %d; there are %v", p.ID, before)
		}
	}
	began := time.Now()
	if err := r.Renew(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	t.Logf("renewing took %v", time.Since(began))
	if ids, alive := c.pages.ids(), c.renderers(); len(ids) > 0 || len(alive) > 0 {
		t.Errorf("pages %v and renderers %v before anybody wants a page", ids, alive)
	}
	if err := r.Page(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	ids := c.pages.ids()
	if len(ids) != 1 || ids[0] == old[0] || r.chrome(t) != c {
		t.Fatalf("pages %v, were %v", ids, old)
	}
	if got := r.area(t, ids[0]); got != DefaultViewport {
		t.Errorf("the new page has %v", got)
	}
	if now := r.script(t, ids[0], `String(Math.random())`); now == was {
		t.Error("the same random number")
	}
	t.Logf("with its page usable: %v", time.Since(began))
	for _, pid := range c.renderers() {
		if before[pid] {
			t.Errorf("renderer %d lives on", pid)
		}
	}
	// That the generators look at the flag: wiped it says so when they next draw.
	main := c.proc.cmd.Process.Pid
	areas, err := wiped(main)
	if err != nil {
		t.Fatal(err)
	}
	if err := wipe(main, areas); err != nil {
		t.Fatal(err)
	}
	s := httptest.NewTLSServer(http.NotFoundHandler())
	defer s.Close()
	s.Config.ErrorLog = nil
	ctx := within(t, 20*time.Second)
	tab, err := c.attachTab(ctx, ids[0])
	if err != nil {
		t.Fatal(err)
	}
	defer tab.detach(context.WithoutCancel(ctx))
	var nav proto.PageNavigateResult
	if err := tab.call(ctx, proto.PageNavigate{URL: s.URL}, &nav); err != nil || !strings.Contains(nav.ErrorText, "CERT") {
		t.Fatalf("a handshake: %+v, %v", nav, err)
	}
	if flag(t, main) != 1 {
		t.Error("chrome did not look whether it had forked")
	}
}

// Whoever needs a page while Chrome is being stripped gets one after that, not
// one whose renderer is killed.
func TestNoPageWhileChromeIsStripped(t *testing.T) {
	cfg := testConfig(t)
	cfg.Calm = time.Hour
	r := start(t, cfg)
	c := r.chrome(t)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	stripped := make(chan struct{})
	go func() {
		defer close(stripped)
		_ = r.Strip(ctx, true) // stopped below
	}()
	eventually(t, "all renderers end", func() bool { return len(c.pages.ids()) == 0 && len(c.renderers()) == 0 })
	if err := r.Page(within(t, time.Second)); err == nil {
		t.Error("a page was opened meanwhile")
	}
	stop()
	<-stripped
	if err := r.Page(within(t, 20*time.Second)); err != nil {
		t.Fatal(err)
	}
	if ids := c.pages.ids(); len(ids) != 1 || r.chrome(t) != c || r.script(t, ids[0], `String(6*7)`) != "42" {
		t.Errorf("pages %v", ids)
	}
}

// A Chrome that never opens its page is replaced: nobody waits for ever.
func TestChromeThatOpensNoPage(t *testing.T) {
	r := start(t, testConfig(t))
	c := r.chrome(t)
	if err := r.Strip(within(t, 20*time.Second), false); err != nil {
		t.Fatal(err)
	}
	old := pageTimeout
	pageTimeout = 200 * time.Millisecond
	t.Cleanup(func() { pageTimeout = old })
	if err := syscall.Kill(c.proc.cmd.Process.Pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	if err := r.Page(within(t, 60*time.Second)); err != nil {
		t.Fatal(err)
	}
	if now := r.chrome(t); now == c || len(now.pages.ids()) != 1 {
		t.Errorf("the same chrome: %v, pages %v", now == c, now.pages.ids())
	}
}
