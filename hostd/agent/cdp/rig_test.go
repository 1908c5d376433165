package cdp

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/coder/websocket"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// fakeChrome answers every message with what answer returns and keeps what it got.
type fakeChrome struct {
	server *httptest.Server
	answer func(msg string) []string
	gone   chan struct{}

	mu    sync.Mutex
	got   []string
	conns []*websocket.Conn
}

func newFakeChrome(t *testing.T, answer func(string) []string) *fakeChrome {
	f := &fakeChrome{answer: answer, gone: make(chan struct{})}
	f.server = httptest.NewServer(http.HandlerFunc(f.serve))
	t.Cleanup(f.server.Close)
	return f
}

func (f *fakeChrome) serve(w http.ResponseWriter, r *http.Request) {
	switch r.URL.Path {
	case "/json/version":
		_, _ = io.WriteString(w, `{"Browser":"Chrome/1","webSocketDebuggerUrl":"ws://127.0.0.1:1/devtools/browser/x"}`)
		return
	case "/json/list":
		_, _ = io.WriteString(w, `[{"id":"A","type":"page","url":"about:blank","devtoolsFrontendUrl":"https://x/?ws=127.0.0.1:1/a","webSocketDebuggerUrl":"ws://127.0.0.1:1/devtools/page/A"}]`)
		return
	}
	c, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	defer c.CloseNow()
	c.SetReadLimit(maxMessage)
	f.mu.Lock()
	f.conns = append(f.conns, c)
	f.mu.Unlock()
	for {
		_, msg, err := c.Read(context.Background())
		if err != nil {
			return
		}
		f.mu.Lock()
		f.got = append(f.got, string(msg))
		f.mu.Unlock()
		for _, a := range f.answer(string(msg)) {
			if c.Write(context.Background(), websocket.MessageText, []byte(a)) != nil {
				return
			}
		}
	}
}

func (f *fakeChrome) messages() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]string(nil), f.got...)
}

func (f *fakeChrome) Endpoint(context.Context) (Endpoint, error) {
	return Endpoint{Addr: f.server.Listener.Addr().String(), Path: "/devtools/browser/x", Gone: f.gone}, nil
}

// rig is a broker behind a real HTTP server.
type rig struct {
	*Broker
	url       string
	downloads string

	mu     sync.Mutex
	counts []int
}

func newRig(t *testing.T, chrome Chrome) *rig { return newRigAt(t, chrome, t.TempDir()) }

func newRigAt(t testing.TB, chrome Chrome, downloads string) *rig {
	r := &rig{downloads: downloads}
	r.Broker = New(Config{Chrome: chrome, Downloads: downloads, OnClients: func(n int) {
		r.mu.Lock()
		r.counts = append(r.counts, n)
		r.mu.Unlock()
	}}, quiet)
	mux := http.NewServeMux()
	r.Register(mux)
	server := httptest.NewServer(mux)
	r.url = server.URL
	t.Cleanup(func() {
		r.Close()
		server.Close()
	})
	return r
}

// dial connects a client that is closed with the test.
func (r *rig) dial(t *testing.T, query string) *websocket.Conn {
	t.Helper()
	c, _, err := websocket.Dial(within(t, 30*time.Second), "ws"+strings.TrimPrefix(r.url, "http")+agentlink.PathCDP+query, nil)
	if err != nil {
		t.Fatal(err)
	}
	c.SetReadLimit(-1)
	t.Cleanup(func() { _ = c.CloseNow() })
	return c
}

// raw connects a client whose frames the test writes itself.
func (r *rig) raw(t *testing.T) net.Conn {
	t.Helper()
	conn, err := net.Dial("tcp", strings.TrimPrefix(r.url, "http://"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_, _ = io.WriteString(conn, "GET /cdp HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n")
	_ = conn.SetReadDeadline(time.Now().Add(20 * time.Second))
	head := make([]byte, 0, 512)
	for b := make([]byte, 1); !strings.HasSuffix(string(head), "\r\n\r\n"); head = append(head, b[0]) {
		if _, err := conn.Read(b); err != nil {
			t.Fatalf("upgrade: %v after %q", err, head)
		}
	}
	if !strings.HasPrefix(string(head), "HTTP/1.1 101 ") {
		t.Fatalf("upgrade answered %q", head)
	}
	return conn
}

func within(t *testing.T, d time.Duration) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

func write(t *testing.T, c *websocket.Conn, msg string) {
	t.Helper()
	if err := c.Write(within(t, 20*time.Second), websocket.MessageText, []byte(msg)); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, c *websocket.Conn) string {
	t.Helper()
	_, msg, err := c.Read(within(t, 30*time.Second))
	if err != nil {
		t.Fatal(err)
	}
	return string(msg)
}

// ask sends a command and returns its answer, events in between left out.
func ask(t *testing.T, c *websocket.Conn, id int, sessionID, method string, params any) map[string]json.RawMessage {
	t.Helper()
	msg, err := json.Marshal(map[string]any{"id": id, "method": method, "params": params, "sessionId": sessionID})
	if sessionID == "" {
		msg, err = json.Marshal(map[string]any{"id": id, "method": method, "params": params})
	}
	if err != nil {
		t.Fatal(err)
	}
	write(t, c, string(msg))
	for {
		var got struct {
			ID     int                        `json:"id"`
			Result map[string]json.RawMessage `json:"result"`
			Error  json.RawMessage            `json:"error"`
		}
		if err := json.Unmarshal([]byte(read(t, c)), &got); err != nil {
			t.Fatal(err)
		}
		if got.ID == id {
			if got.Error != nil {
				t.Fatalf("%s: %s", method, got.Error)
			}
			return got.Result
		}
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if ok() {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("not in time: %s", what)
		}
	}
}
