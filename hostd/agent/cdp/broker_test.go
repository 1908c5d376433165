package cdp

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/coder/websocket"
)

func echo(msg string) []string { return []string{msg} }

func TestMessagesPassBothWaysUnchanged(t *testing.T) {
	chrome := newFakeChrome(t, echo)
	c := newRig(t, chrome).dial(t, "")
	for _, size := range []int{1, 125, 126, 4000, 65535, 65536, 1 << 20, 1<<20 + 1, 5 << 20} {
		want := strings.Repeat("0123456789abcdef", size/16+1)[:size]
		write(t, c, want)
		if got := read(t, c); got != want {
			t.Fatalf("%d bytes came back as %d, changed", size, len(got))
		}
	}
}

func TestManySmallMessagesKeepTheirOrder(t *testing.T) {
	chrome := newFakeChrome(t, func(msg string) []string {
		var all []string
		for i := range 300 {
			all = append(all, msg+strings.Repeat("x", i*7))
		}
		return all
	})
	c := newRig(t, chrome).dial(t, "")
	write(t, c, "m")
	for i := range 300 {
		if got := read(t, c); len(got) != 1+i*7 {
			t.Fatalf("message %d has %d bytes", i, len(got))
		}
	}
}

func TestFragmentsBecomeOneMessage(t *testing.T) {
	chrome := newFakeChrome(t, echo)
	conn := newRig(t, chrome).raw(t)
	send := func(fin bool, opcode byte, payload string) {
		f := appendHeader(nil, fin, opcode, true, int64(len(payload)))
		key := [4]byte{1, 2, 3, 4}
		copy(f[len(f)-4:], key[:])
		body := []byte(payload)
		unmask(body, key, 0)
		_, _ = conn.Write(append(f, body...))
	}
	big := strings.Repeat("b", maxLooked)
	send(false, opText, "a")
	send(true, opPing, "hello") // between the parts of a message (RFC 6455 5.4)
	send(false, opContinuation, big)
	send(true, opContinuation, "c")
	send(true, opText, "next")
	eventually(t, "both messages", func() bool { return len(chrome.messages()) == 2 })
	if got := chrome.messages(); got[0] != "a"+big+"c" || got[1] != "next" {
		t.Errorf("chrome got %d and %d bytes", len(got[0]), len(got[1]))
	}
}

func TestMalformedFramesEndTheClientOnly(t *testing.T) {
	for name, bytes := range map[string][]byte{
		"not masked":          {0x81, 1, 'x'},
		"reserved bits":       {0xF1, 0x80, 0, 0, 0, 0},
		"unknown opcode":      {0x83, 0x80, 0, 0, 0, 0},
		"stray continuation":  {0x80, 0x80, 0, 0, 0, 0},
		"long control frame":  {0x89, 0xFE, 0, 200, 0, 0, 0, 0},
		"control in parts":    {0x09, 0x80, 0, 0, 0, 0},
		"length out of range": {0x81, 0xFF, 0xFF, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0},
		"message too big":     {0x81, 0xFF, 0, 0, 0, 0, 0x10, 0, 0, 1, 0, 0, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, newFakeChrome(t, echo))
			conn := r.raw(t)
			_, _ = conn.Write(bytes)
			answer, err := io.ReadAll(conn)
			if err != nil {
				t.Fatal(err)
			}
			want := closeProtocol
			if name == "message too big" {
				want = closeTooBig
			}
			if len(answer) < 4 || answer[0] != 0x88 || int(answer[2])<<8|int(answer[3]) != want {
				t.Errorf("answer = %x, want Close %d", answer, want)
			}
			eventually(t, "the count to fall", func() bool { return r.Clients() == 0 })
		})
	}
}

func TestBrowserCloseMeansThatThisClientLeaves(t *testing.T) {
	chrome := newFakeChrome(t, echo)
	r := newRig(t, chrome)
	leaver, other := r.dial(t, ""), r.dial(t, "")
	write(t, leaver, `{"id":7,"method":"Browser.close"}`)
	if got := read(t, leaver); got != `{"id":7,"result":{}}` {
		t.Errorf("answer = %s", got)
	}
	if _, _, err := leaver.Read(within(t, 10*time.Second)); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Errorf("then %v, want a normal close", err)
	}
	eventually(t, "one client to remain", func() bool { return r.Clients() == 1 })
	write(t, other, "still here")
	if got := read(t, other); got != "still here" {
		t.Errorf("other client got %q", got)
	}
	if slices.ContainsFunc(chrome.messages(), func(m string) bool { return strings.Contains(m, "Browser.close") }) {
		t.Error("Browser.close reached chrome")
	}
}

func TestProxyServerOfAContextIsRefused(t *testing.T) {
	chrome := newFakeChrome(t, echo)
	c := newRig(t, chrome).dial(t, "")
	write(t, c, `{"id":1,"method":"Target.createBrowserContext","params":{"proxyServer":"direct://"}}`)
	var got answer
	if err := json.Unmarshal([]byte(read(t, c)), &got); err != nil || got.Error == nil || !strings.Contains(got.Error.Message, "proxyServer") {
		t.Errorf("answer = %+v, %v", got, err)
	}
	plain := `{"id":2,"method":"Target.createBrowserContext","params":{"disposeOnDetach":true}}`
	write(t, c, plain)
	if got := read(t, c); got != plain {
		t.Errorf("a plain context was changed to %s", got)
	}
}

func TestDownloadsAreNamedBeforeTheClientHears(t *testing.T) {
	dir := t.TempDir()
	const guid = "2f1c-guid"
	chrome := newFakeChrome(t, func(msg string) []string {
		if !strings.Contains(msg, "go") {
			return nil
		}
		_ = os.WriteFile(filepath.Join(dir, guid), []byte("data"), 0o600)
		return []string{
			`{"method":"Browser.downloadWillBegin","params":{"frameId":"F","guid":"` + guid + `","url":"u","suggestedFilename":"../a.csv"}}`,
			`{"method":"Browser.downloadProgress","params":{"guid":"` + guid + `","totalBytes":4,"receivedBytes":4,"state":"completed","filePath":"x"}}`,
			`{"method":"Other.thing"}`,
		}
	})
	r := newRigAt(t, chrome, dir)
	c := r.dial(t, "")
	write(t, c, `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allowAndName","downloadPath":"/home/me/dl","eventsEnabled":true}}`)
	eventually(t, "the command", func() bool { return len(chrome.messages()) == 1 })
	if m := chrome.messages()[0]; strings.Contains(m, "/home/me") || !strings.Contains(m, dir) || !strings.Contains(m, "allowAndName") {
		t.Errorf("chrome was told %s", m)
	}
	write(t, c, "go")
	if got := read(t, c); !strings.Contains(got, "downloadWillBegin") {
		t.Errorf("first event = %s", got)
	}
	want := filepath.Join(dir, ".._a.csv")
	if got := read(t, c); !strings.Contains(got, `"completed"`) || !strings.Contains(got, want) {
		t.Errorf("second event = %s", got)
	}
	if b, err := os.ReadFile(want); err != nil || string(b) != "data" {
		t.Errorf("file = %q, %v", b, err)
	}
	if got := read(t, c); !strings.Contains(got, "Other") {
		t.Errorf("third event = %s", got)
	}

	quietly := r.dial(t, "") // one that did not ask for events
	write(t, quietly, `{"id":1,"method":"Browser.setDownloadBehavior","params":{"behavior":"allowAndName","downloadPath":"/x"}}`)
	write(t, quietly, "go")
	if got := read(t, quietly); !strings.Contains(got, "Other") {
		t.Errorf("a client without eventsEnabled got %s", got)
	}
	if _, err := os.Stat(filepath.Join(dir, ".._a (1).csv")); err != nil {
		t.Errorf("the second file of that name: %v", err)
	}
}

// Chrome's death is no client's leave: its place is kept until it is back.
func TestRestartClosesClientsWith1012(t *testing.T) {
	chrome := newFakeChrome(t, echo)
	r := newRig(t, chrome)
	c := r.dial(t, "")
	close(chrome.gone)
	_, _, err := c.Read(within(t, 10*time.Second))
	var ce websocket.CloseError
	if !errors.As(err, &ce) || ce.Code != closeRestart || ce.Reason != "chrome restarted" {
		t.Errorf("close = %v", err)
	}
	chrome.gone = make(chan struct{})
	back := r.dial(t, "")
	write(t, back, "x") // its counting is done
	_ = read(t, back)
	if n := r.Clients(); n != 1 {
		t.Errorf("clients = %d, want 1: it took its old place", n)
	}
	_ = back.Close(websocket.StatusNormalClosure, "")
	eventually(t, "no client", func() bool { return r.Clients() == 0 })
	r.mu.Lock()
	defer r.mu.Unlock()
	if want := []int{1, 0}; !slices.Equal(r.counts, want) {
		t.Errorf("told %v, want %v", r.counts, want)
	}
}

func TestClientsAreCounted(t *testing.T) {
	r := newRig(t, newFakeChrome(t, echo))
	_ = r.dial(t, "?viewer=1").Close(websocket.StatusNormalClosure, "")
	if r.HadClients() {
		t.Error("a viewer was counted")
	}
	a, b := r.dial(t, ""), r.dial(t, "")
	viewer := r.dial(t, "?viewer=1")
	if !r.HadClients() {
		t.Error("had no clients")
	}
	if n := r.Clients(); n != 2 {
		t.Errorf("clients = %d, want 2 without the viewer", n)
	}
	_ = viewer.Close(websocket.StatusNormalClosure, "")
	_ = a.Close(websocket.StatusNormalClosure, "")
	eventually(t, "one client", func() bool { return r.Clients() == 1 })
	_ = b.Close(agentlink.PlatformClose, "")
	again := r.dial(t, "")
	write(t, again, "x") // its counting is done
	_ = read(t, again)
	if n := r.Clients(); n != 1 {
		t.Errorf("clients = %d, want 1: a returning client takes its old place", n)
	}
	_ = again.CloseNow()
	eventually(t, "no client", func() bool { return r.Clients() == 0 })
	r.mu.Lock()
	defer r.mu.Unlock()
	if want := []int{1, 2, 1, 0}; !slices.Equal(r.counts, want) {
		t.Errorf("told %v, want %v", r.counts, want)
	}
}

func TestSlowClientDoesNotHoldUpClose(t *testing.T) {
	flood := strings.Repeat("f", 1<<20)
	chrome := newFakeChrome(t, func(string) []string { return slices.Repeat([]string{flood}, 64) })
	r := newRig(t, chrome)
	c := r.dial(t, "")
	write(t, c, "go") // and never read
	eventually(t, "the flood", func() bool { return len(chrome.messages()) == 1 })
	began := time.Now()
	r.Close()
	if took := time.Since(began); took > 3*closeWait {
		t.Errorf("close took %v", took)
	}
}

func TestDiscoveryShowsTheConnectURLOnly(t *testing.T) {
	r := newRig(t, newFakeChrome(t, echo))
	for _, path := range []string{agentlink.PathJSONVersion, agentlink.PathJSONList} {
		req, _ := http.NewRequestWithContext(within(t, 10*time.Second), http.MethodGet, r.url+path, nil)
		req.Header.Set(agentlink.ConnectURLHeader, "wss://berth.example/v1/connect?sessionId=1&token=t")
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if bytes.Contains(body, []byte("127.0.0.1")) || bytes.Contains(body, []byte("devtoolsFrontendUrl")) {
			t.Errorf("%s leaks: %s", path, body)
		}
		if !strings.Contains(string(body), `"webSocketDebuggerUrl":"wss://berth.example/v1/connect?sessionId=1&token=t"`) {
			t.Errorf("%s = %s", path, body)
		}
	}
	http.DefaultClient.CloseIdleConnections()
}

type noChrome struct{}

func (noChrome) Endpoint(ctx context.Context) (Endpoint, error) {
	return Endpoint{}, errors.New("none")
}

func TestErrorsBeforeTheUpgradeAreEnvelopes(t *testing.T) {
	r := newRig(t, noChrome{})
	res, err := http.Get(r.url + agentlink.PathCDP)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(res.Body)
	_ = res.Body.Close()
	if e := apierr.Parse(res.StatusCode, body); res.StatusCode != 400 || e.Code != apierr.InvalidRequest {
		t.Errorf("plain GET: %d %s", res.StatusCode, body)
	}
	_, res, err = websocket.Dial(within(t, 10*time.Second), "ws"+strings.TrimPrefix(r.url, "http")+agentlink.PathCDP, nil)
	if err == nil || res == nil || res.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("without chrome: %v, %v", res, err)
	}
	http.DefaultClient.CloseIdleConnections()
}

// late is a Chrome whose page is there when somebody lets it.
type late struct {
	*fakeChrome
	asked chan struct{} // gets one for each that waits
	page  chan struct{}
}

func (l late) Endpoint(ctx context.Context) (Endpoint, error) {
	e, err := l.fakeChrome.Endpoint(ctx)
	e.Page = func(ctx context.Context) error {
		l.asked <- struct{}{}
		select {
		case <-l.page:
			return nil
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return e, err
}

// Before Chrome has a page a client may ask what Chrome it is, and all else
// waits, in order.
func TestNobodySeesChromeWithoutPage(t *testing.T) {
	chrome := late{newFakeChrome(t, func(m string) []string { return []string{m} }), make(chan struct{}, 4), make(chan struct{})}
	r := newRig(t, chrome)
	c := r.dial(t, "")
	version, targets := `{"id":1,"method":"Browser.getVersion"}`, `{"id":2,"method":"Target.getTargets"}`
	write(t, c, version)
	if got := read(t, c); got != version {
		t.Fatal(got)
	}
	large := `{"id":4,"method":"Browser.getVersion","params":"` + strings.Repeat("x", maxLooked) + `"}`
	for _, m := range []string{targets, `{"id":3,"method":"Browser.getVersion"}`, large} {
		write(t, c, m)
	}
	list := make(chan int, 1)
	go func() {
		a, err := http.Get(r.url + agentlink.PathJSONList)
		if err != nil {
			list <- 0
			return
		}
		a.Body.Close()
		list <- a.StatusCode
	}()
	<-chrome.asked
	<-chrome.asked
	if got := chrome.messages(); len(got) != 1 {
		t.Errorf("chrome got %q before it had a page", got)
	}
	select {
	case code := <-list:
		t.Errorf("the list was answered with %d", code)
	default:
	}
	close(chrome.page)
	for _, want := range []string{targets, `{"id":3,"method":"Browser.getVersion"}`, large} {
		if got := read(t, c); got != want {
			t.Errorf("got %.100q, want %.100q", got, want)
		}
	}
	if code := <-list; code != 200 {
		t.Errorf("the list was answered with %d", code)
	}
}

func TestPageless(t *testing.T) {
	for msg, want := range map[string]bool{
		`{"id":1,"method":"Browser.getVersion"}`:                                           true,
		`{"id":1,"method":"Browser.getVersion","params":{}}`:                               true,
		`{"id":1,"method":"Browser.getVersion","sessionId":"A"}`:                           false,
		`{"id":1,"method":"Target.getTargets"}`:                                            false,
		`{"id":1,"method":"Target.sendMessageToTarget","params":"Browser.getVersion"}`:     false,
		`{"id":1,"method":"Target.getTargets","params":{"method":"Browser.getVersion"}}`:   false,
		`{"id":1,"method":"Browser.getVersion"`:                                            false,
		``:                                                                                 false,
		`[{"id":1,"method":"Browser.getVersion"},{"id":2,"method":"Target.createTarget"}]`: false,
		`{"id":1,"method":"Browser.getVersion","method":"Target.setDiscoverTargets"}`:      false,
	} {
		if got := pageless([]byte(msg)); got != want {
			t.Errorf("%s: %v", msg, got)
		}
	}
}
