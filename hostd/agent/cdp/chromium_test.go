package cdp

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/agent/browser"
	"github.com/coder/websocket"
)

// supervised adapts the supervisor as main does.
type supervised struct{ *browser.Browser }

func (s supervised) Endpoint(ctx context.Context) (Endpoint, error) {
	e, err := s.Browser.Endpoint(ctx)
	return Endpoint(e), err
}

// chromium runs the real one (see package browser) behind a broker.
func chromium(t testing.TB) (*rig, supervised) {
	t.Helper()
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
	dir, err := os.MkdirTemp("", "berth-cdp-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	cfg := browser.Config{Binary: binary, Profile: filepath.Join(dir, "p"), Home: dir, Downloads: filepath.Join(dir, "d")}
	if os.Getuid() == 0 {
		cfg.UID, cfg.GID = 1000, 900
		if err := os.Chown(dir, 1000, 900); err != nil {
			t.Fatal(err)
		}
	}
	s := supervised{browser.New(cfg, quiet)}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = s.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	up, stop := context.WithTimeout(ctx, time.Minute)
	defer stop()
	if err := s.Await(up); err != nil {
		t.Fatal(err)
	}
	return newRigAt(t, s, cfg.Downloads), s
}

// page opens a page and returns a session attached to it.
func page(t *testing.T, c *websocket.Conn, url string) string {
	t.Helper()
	var target, session string
	_ = json.Unmarshal(ask(t, c, 101, "", "Target.createTarget", map[string]any{"url": url})["targetId"], &target)
	_ = json.Unmarshal(ask(t, c, 102, "", "Target.attachToTarget", map[string]any{"targetId": target, "flatten": true})["sessionId"], &session)
	if session == "" {
		t.Fatal("no session on the page")
	}
	return session
}

func TestRealChromeTakesWhatTheBrokerSends(t *testing.T) {
	r, _ := chromium(t)
	c := r.dial(t, "")
	session := page(t, c, "about:blank")
	for _, size := range []int{10, maxLooked / 2, maxLooked + 1, 20 << 20} {
		code := `"` + strings.Repeat("x", size) + `".length`
		got := ask(t, c, 1, session, "Runtime.evaluate", map[string]any{"expression": code})
		if !strings.Contains(string(got["result"]), `"type":"number"`) {
			t.Errorf("%d bytes: %s", size, got["result"])
		}
	}
	got := ask(t, c, 2, session, "Runtime.evaluate", map[string]any{"expression": `"y".repeat(30 << 20)`, "returnByValue": true})
	if len(got["result"]) < 30<<20 {
		t.Errorf("30 MiB came back as %d bytes", len(got["result"]))
	}
}

func TestRealChromeTakesFragments(t *testing.T) {
	r, _ := chromium(t)
	conn := r.raw(t)
	msg := []byte(`{"id":1,"method":"Browser.getVersion","params":{"pad":"` + strings.Repeat("p", 2*maxLooked) + `"}}`)
	for rest, opcode := msg, byte(opText); len(rest) > 0; opcode = opContinuation {
		part := rest[:min(len(rest), 700_000)]
		rest = rest[len(part):]
		_, _ = conn.Write(append(appendHeader(nil, len(rest) == 0, opcode, true, int64(len(part))), part...))
	}
	answer := make([]byte, 64)
	if _, err := io.ReadFull(conn, answer); err != nil || !strings.Contains(string(answer), `{"id":1,"result"`) {
		t.Errorf("answer = %q, %v", answer, err)
	}
}

func TestRealDownloadsGetTheirNames(t *testing.T) {
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Disposition", `attachment; filename="report.csv"`)
		_, _ = io.WriteString(w, "a,b\n")
	}))
	defer web.Close()
	r, _ := chromium(t)
	c := r.dial(t, "")
	ask(t, c, 1, "", "Browser.setDownloadBehavior", map[string]any{"behavior": "allowAndName", "downloadPath": "/nowhere/on/the/client", "eventsEnabled": true})
	session := page(t, c, "about:blank")
	write(t, c, `{"id":5,"method":"Page.navigate","sessionId":"`+session+`","params":{"url":"`+web.URL+`"}}`)
	for {
		if msg := read(t, c); strings.Contains(msg, `"completed"`) {
			break
		}
	}
	if b, err := os.ReadFile(filepath.Join(r.downloads, "report.csv")); err != nil || string(b) != "a,b\n" {
		t.Errorf("when the client hears, the file is %q, %v", b, err)
	}
	// The client's leaving gives the default back: saved by name, no GUID.
	_ = c.Close(websocket.StatusNormalClosure, "")
	next := r.dial(t, "")
	page(t, next, web.URL)
	second := filepath.Join(r.downloads, "report (1).csv")
	eventually(t, "the second download", func() bool { _, err := os.Stat(second); return err == nil })
}

func TestRealContextsWithTheirOwnProxyAreRefused(t *testing.T) {
	r, _ := chromium(t)
	c := r.dial(t, "")
	write(t, c, `{"id":1,"method":"Target.createBrowserContext","params":{"proxyServer":"direct://"}}`)
	if got := read(t, c); !strings.Contains(got, `"error"`) {
		t.Errorf("answer = %s", got)
	}
	ask(t, c, 2, "", "Target.createBrowserContext", map[string]any{"disposeOnDetach": true})
}

func TestRealCrashGives1012AndTheSameAddressWorksAgain(t *testing.T) {
	r, _ := chromium(t)
	c := r.dial(t, "")
	write(t, c, `{"id":1,"method":"Browser.crash"}`)
	for {
		if _, _, err := c.Read(within(t, 20*time.Second)); err != nil {
			if code := websocket.CloseStatus(err); code != closeRestart {
				t.Errorf("close = %d (%v), want 1012", code, err)
			}
			break
		}
	}
	again := r.dial(t, "")
	if v := ask(t, again, 1, "", "Browser.getVersion", nil); len(v) == 0 {
		t.Error("the new chrome does not answer")
	}
}
