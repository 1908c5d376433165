package api

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/cdpclient"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/ws"
)

// chromium starts a browser and gives its DevTools WebSocket.
func chromium(t *testing.T) *url.URL {
	t.Helper()
	path, err := exec.LookPath("chromium")
	if err != nil {
		if os.Getenv("CI") != "" {
			t.Fatal("chromium is missing")
		}
		t.Skip("chromium is missing")
	}
	cmd := exec.Command(path, "--headless=new", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--user-data-dir="+t.TempDir(),
		"--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run", "--window-size=900,700", "about:blank")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	found := make(chan string, 1)
	read := make(chan struct{})
	go func() {
		defer close(read)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			if _, ws, ok := strings.Cut(lines.Text(), "DevTools listening on "); ok {
				found <- ws
			}
		}
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-read
		_ = cmd.Wait()
	})
	select {
	case ws := <-found:
		u, err := url.Parse(ws)
		if err != nil {
			t.Fatal(err)
		}
		return u
	case <-time.After(patience):
		t.Fatal("chromium did not start")
		return nil
	}
}

// tab is one page of a browser.
type tab struct {
	t       *testing.T
	browser *cdpclient.Client
	session string
}

func openTab(t *testing.T, ws, address string) *tab {
	t.Helper()
	ctx := context.Background()
	c, err := cdpclient.Dial(ctx, ws)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	var target struct{ TargetID, SessionID string }
	if err := c.Call(ctx, "", "Target.createTarget", map[string]any{"url": address}, &target); err != nil {
		t.Fatal(err)
	}
	if err := c.Call(ctx, "", "Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &target); err != nil {
		t.Fatal(err)
	}
	return &tab{t, c, target.SessionID}
}

func (p *tab) eval(expression string) any {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	var r struct{ Result struct{ Value any } }
	if err := p.browser.Call(ctx, p.session, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &r); err != nil {
		p.t.Fatal(err)
	}
	return r.Result.Value
}

// until polls an expression until it is true.
func (p *tab) until(what, expression string) {
	p.t.Helper()
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(30 * time.Millisecond) {
		if p.eval(expression) == true {
			return
		}
	}
	p.t.Fatalf("%s: not so after %s: %s", what, patience, expression)
}

func (p *tab) do(method string, params map[string]any) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := p.browser.Call(ctx, p.session, method, params, nil); err != nil {
		p.t.Fatal(err)
	}
}

func (p *tab) click(x, y float64) {
	for _, typ := range []string{"mousePressed", "mouseReleased"} {
		p.do("Input.dispatchMouseEvent", map[string]any{"type": typ, "x": x, "y": y, "button": "left", "clickCount": 1})
	}
}

// terminalAgent is a terminal that colours what it echoes.
func terminalAgent(w http.ResponseWriter, r *http.Request) {
	conn, err := ws.Accept(w, r)
	if err != nil {
		return
	}
	defer conn.CloseNow()
	var m struct {
		Type, Data string
		Cols, Rows int
	}
	for {
		_, b, err := conn.Read(context.Background())
		if err != nil || json.Unmarshal(b, &m) != nil {
			return
		}
		out := "\x1b]0;title\x07wrong\r\x1b[1;32m" + m.Data + "\x1b[0m\x1b[K|\r\n"
		if m.Data == "p" { // a prompt: half a line
			out = strings.Repeat("=", 80)
		}
		if m.Type == "resize" {
			out = fmt.Sprintf("size %dx%d\r\n", m.Cols, m.Rows)
		}
		if conn.Write(context.Background(), ws.Binary, []byte(out)) != nil {
			return
		}
	}
}

// The terminal shows plain text of what the session sends and sends keys.
func TestLiveTerminalInChromium(t *testing.T) {
	if testing.Short() {
		t.Skip("a browser")
	}
	viewer := chromium(t)
	r := newRig(t)
	r.fake.view.Session.Kind = session.Shell
	r.fake.serve(terminalAgent)
	live := openTab(t, viewer.String(), "http://"+r.addr+"/live/"+goodID+"?token=l")
	live.until("the size is told", "/^size [0-9]+x[0-9]+\\n$/.test(document.getElementById('output').textContent)")
	size, _ := live.eval("document.getElementById('output').textContent").(string)
	live.do("Input.dispatchKeyEvent", map[string]any{"type": "keyDown", "key": "x", "text": "x"})
	live.until("the echo is plain", fmt.Sprintf("document.getElementById('output').textContent === %q", size+"x|\n"))
	live.do("Input.dispatchKeyEvent", map[string]any{"type": "keyDown", "key": "c", "modifiers": 2})
	live.until("control keys go on", "document.getElementById('output').textContent.split('\\n').length === 4")
	live.do("Input.dispatchKeyEvent", map[string]any{"type": "keyDown", "key": "p", "text": "p"})
	live.until("a prompt is there", "document.getElementById('output').textContent.endsWith('====')")
	live.eval("dispatchEvent(new Event('resize'))")
	live.until("the size is the same beside a prompt", fmt.Sprintf("document.getElementById('output').textContent.endsWith(%q)", "="+size))
	r.fake.ends <- sessions.Ended{CloseCode: 4000, Reason: "timeout", At: t0}
	live.until("the end shows", "document.getElementById('detail').textContent === 'its time was up'")
}

// The page, in a real Chromium, shows another real Chromium live, hands mouse
// and keys on, and says how the session ended.
func TestLiveViewInChromium(t *testing.T) {
	if testing.Short() {
		t.Skip("two browsers")
	}
	shown, viewer := chromium(t), chromium(t)
	r := newRig(t)
	r.fake.view.Session.Kind = session.Browser
	r.fake.agent = &httputil.ReverseProxy{Rewrite: func(p *httputil.ProxyRequest) {
		p.SetURL(&url.URL{Scheme: "http", Host: shown.Host})
		p.Out.URL.Path, p.Out.URL.RawQuery = shown.Path, ""
	}, ErrorHandler: func(http.ResponseWriter, *http.Request, error) {}}
	page := openTab(t, shown.String(), "data:text/html,<title>Shown</title><body style='margin:0;background:rgb(200,30,30)'><input id=i style='position:absolute;left:0;top:0;width:100vw;height:100vh;opacity:.01'>")
	page.until("the page loads", "!!document.getElementById('i')")
	live := openTab(t, viewer.String(), "http://"+r.addr+"/live/"+goodID+"?token=l")
	live.until("the live view finds the tab", "[...document.querySelectorAll('#tabs button')].some(b => b.textContent === 'Shown')")
	live.eval("[...document.querySelectorAll('#tabs button')].find(b => b.textContent === 'Shown').click()")
	live.until("the picture is there", `(() => { const c = document.getElementById('view'), p = c.getContext('2d').getImageData(c.width / 2, c.height / 2, 1, 1).data;
		return p[0] > 150 && p[1] < 90 })()`)
	if got, _ := live.eval("document.getElementById('url').value").(string); !strings.HasPrefix(got, "data:text/html") {
		t.Errorf("the address shows %q", got)
	}

	var at struct{ X, Y float64 }
	b, _ := json.Marshal(live.eval("(() => { const b = document.getElementById('view').getBoundingClientRect(); return {x: b.x + b.width / 2, y: b.y + b.height / 2} })()"))
	if err := json.Unmarshal(b, &at); err != nil {
		t.Fatal(err)
	}
	live.click(at.X, at.Y)
	page.until("the click arrives", "document.activeElement && document.activeElement.id === 'i'")
	for _, key := range "hi" {
		for _, typ := range []string{"keyDown", "keyUp"} {
			params := map[string]any{"type": typ, "key": string(key), "windowsVirtualKeyCode": int(key) - 32}
			if typ == "keyDown" {
				params["text"] = string(key)
			}
			live.do("Input.dispatchKeyEvent", params)
		}
	}
	page.until("the keys arrive", "document.getElementById('i').value === 'hi'")

	r.fake.ends <- sessions.Ended{CloseCode: 1000, Reason: "released", At: t0}
	live.until("the end shows", "!document.getElementById('curtain').hidden && document.getElementById('headline').textContent === 'The session has ended'")
}
