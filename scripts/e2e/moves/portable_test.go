package moves

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/cdpclient"
)

func dial(t *testing.T, url string) *cdpclient.Client {
	t.Helper()
	cdp, err := cdpclient.Dial(within(t, patient), url)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cdp.Close() })
	return cdp
}

// attach connects to a browser and takes its first page.
func attach(t *testing.T, url string) (*cdpclient.Client, *cdpclient.Page) {
	t.Helper()
	cdp := dial(t, url)
	p, err := cdp.FirstPage(within(t, patient))
	if err != nil {
		t.Fatal(err)
	}
	return cdp, p
}

// pageAt takes the page that shows a URL.
func pageAt(t *testing.T, cdp *cdpclient.Client, url string) *cdpclient.Page {
	t.Helper()
	for _, x := range targets(t, cdp) {
		if x.URL == url {
			p, err := cdp.Attach(within(t, time.Minute), x.TargetID)
			if err != nil {
				t.Fatal(err)
			}
			return p
		}
	}
	t.Fatalf("no page shows %s: %+v", url, targets(t, cdp))
	return nil
}

// ask evaluates an expression that gives a string.
func ask(t *testing.T, p *cdpclient.Page, expression string) (out string) {
	t.Helper()
	if err := p.Evaluate(within(t, time.Minute), expression, &out); err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	return out
}

// closed waits until a connection has ended, and wants a close code.
func closed(t *testing.T, cdp *cdpclient.Client, code int) {
	t.Helper()
	select {
	case <-cdp.Done():
	case <-time.After(20 * time.Second):
		t.Fatalf("the connection is still open, want close code %d", code)
	}
	if got := cdp.CloseStatus(); got != code {
		t.Errorf("the connection was closed with %d, want %d: %v", got, code, cdp.Err())
	}
}

// remember has a page keep something in each kind of storage; recall gives it.
const (
	remember = `(async () => {
		document.cookie = "session=c1"; document.cookie = "kept=c2; max-age=3600";
		localStorage.l = "l1"; sessionStorage.s = "s1"; scrollTo(0, 3210);
		await new Promise((done, fail) => {
			const open = indexedDB.open("db", 1);
			open.onupgradeneeded = () => open.result.createObjectStore("things");
			open.onerror = fail;
			open.onsuccess = () => {
				const t = open.result.transaction("things", "readwrite", {durability: "strict"});
				t.objectStore("things").put("i1", "key"); t.oncomplete = () => { open.result.close(); done() }; t.onerror = fail;
			};
		});
		return "";
	})()`
	recall = `(async () => {
		const things = await new Promise((done, fail) => {
			const open = indexedDB.open("db", 1);
			open.onupgradeneeded = () => open.transaction.abort();
			open.onerror = () => done("none");
			open.onsuccess = () => { const r = open.result.transaction("things").objectStore("things").get("key"); r.onsuccess = () => { open.result.close(); done(r.result) }; r.onerror = fail };
		});
		return [location.pathname, Math.round(scrollY), document.cookie.split("; ").sort(), localStorage.l, sessionStorage.s, things].join(" ");
	})()`
	recalled = "/tall 3210 kept=c2,session=c1 l1 s1 i1"
)

// Without its memory a session keeps what a person would miss: tabs where they
// were, what sites have stored, files, and where the shells stood. Clients are
// told to connect again, and the same URL works at once.
func TestMovesAndPausesWithoutMemory(t *testing.T) {
	env := portable.Start(t)
	c := env.Client(t, "Scale")
	web := env.AllowedWeb(t)
	s := create(t, c, testenv.Fields{"shell": true, "timeout": 3600})
	cdp, p := attach(t, *s.ConnectUrl)
	if err := p.Goto(within(t, time.Minute), "http://"+web.Addr+"/tall"); err != nil {
		t.Fatal(err)
	}
	ask(t, p, remember)
	var second struct{ TargetID string }
	if err := cdp.Call(within(t, time.Minute), "", "Target.createTarget", map[string]string{"url": "data:text/html,<title>second</title>"}, &second); err != nil {
		t.Fatal(err)
	}
	before := tabs(t, cdp)
	c.Output(s.Id, "mkdir -p a/b; head -c 3000000 /dev/urandom > a/b/data; ln -s a/b/data link; chmod 751 a/b; sha256sum a/b/data link > sums; cd a; export VAR='two words'; plain=gone")
	c.ExecWith(s.Id, testenv.Fields{"command": "cd /tmp; export VAR=other", "shell": "second"})

	for i, what := range []string{"move", "pause", "move", "pause"} {
		tty := terminal(t, env, *c.Get(s.Id).TerminalUrl, "echo on the screen")
		began := time.Now()
		if what == "move" {
			m := move(t, c, s.Id)
			if m.Session.Moves != i/2+1 {
				t.Errorf("after %d moves it says %d", i/2+1, m.Session.Moves)
			}
			if sum := m.Timings.CaptureMs + m.Timings.AcquireMs + m.Timings.RestoreMs; m.Timings.CaptureMs <= 0 || sum > m.Timings.TotalMs+5 {
				t.Errorf("timings %+v", m.Timings)
			}
			closed(t, cdp, 1012)
		} else {
			pause(c, s.Id)
			closed(t, cdp, 4001)
		}
		testenv.Wait(t, 20*time.Second, "the terminal ends", tty.ended)
		cdp = dial(t, *s.ConnectUrl) // a paused session resumes by it
		p = pageAt(t, cdp, "http://"+web.Addr+"/tall")
		t.Logf("%s, until the next client had its page: %s", what, time.Since(began).Round(time.Millisecond))
		if err := untilIs(within(t, 20*time.Second), p, recall, recalled); err != nil {
			t.Fatalf("after the %s: %v", what, err)
		}
		if got := tabs(t, cdp); !slices.Equal(got, before) {
			t.Errorf("after the %s the tabs are %q, before it they were %q", what, got, before)
		}
		if got := c.Output(s.Id, "pwd; echo $VAR; cd /workspace && sha256sum -c --quiet sums && readlink link && stat -c %a a/b; cd a"); got != "/workspace/a\ntwo words\na/b/data\n751" {
			t.Errorf("after the %s the shell says %q", what, got)
		}
		if got := c.ExecWith(s.Id, testenv.Fields{"command": "pwd; echo $VAR", "shell": "second"}).Stdout; got != "/tmp\nother\n" {
			t.Errorf("after the %s the second shell says %q", what, got)
		}
	}
	if got, _ := lifecycle(t, c, s.Id); got[len(got)-1] != "RUNNING resumed portable" {
		t.Errorf("the log says %q", got)
	}
}

// untilIs asks until an expression is what it should be: a page that has just
// been reopened may still load.
func untilIs(ctx context.Context, p *cdpclient.Page, expression, want string) error {
	for {
		var got string
		err := p.Evaluate(ctx, expression, &got)
		if err == nil && got == want {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("got %q (%w), want %q", got, err, want)
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// target is a page as the browser lists it.
type target struct{ TargetID, Type, URL string }

func targets(t *testing.T, cdp *cdpclient.Client) []target {
	t.Helper()
	var all struct{ TargetInfos []target }
	if err := cdp.Call(within(t, time.Minute), "", "Target.getTargets", nil, &all); err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(all.TargetInfos, func(x target) bool { return x.Type != "page" })
}

// tabs are the URLs of the pages, sorted: the browser lists them in no order.
func tabs(t *testing.T, cdp *cdpclient.Client) (out []string) {
	t.Helper()
	for _, x := range targets(t, cdp) {
		out = append(out, x.URL)
	}
	slices.Sort(out)
	return out
}
