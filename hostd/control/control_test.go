package control

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// agent serves handle behind the preface byte, as a machine's socket does.
func agent(t *testing.T, handle http.HandlerFunc) *Agent {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	srv := httptest.NewUnstartedServer(handle)
	srv.Listener.Close()
	srv.Listener = prefaced{ln}
	srv.Start()
	a := New(func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", ln.Addr().String())
	})
	t.Cleanup(func() {
		a.Close()
		srv.CloseClientConnections()
		srv.Close()
	})
	return a
}

type prefaced struct{ net.Listener }

func (p prefaced) Accept() (net.Conn, error) {
	c, err := p.Listener.Accept()
	if err != nil {
		return nil, err
	}
	b := make([]byte, 1)
	if _, err := io.ReadFull(c, b); err != nil || b[0] != agentlink.PrefaceControl {
		c.Close()
	}
	return c, nil
}

func TestHonestAgent(t *testing.T) {
	var got string
	a := agent(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.Method + " " + r.URL.RequestURI() {
		case "GET /control/state?wait=1":
			fmt.Fprint(w, `{"ready":true}`)
		case "GET /control/state":
			fmt.Fprint(w, `{"ready":true,"sessionId":"s","clients":2}`)
		case "POST /control/start":
			b, _ := io.ReadAll(r.Body)
			got = string(b)
			w.WriteHeader(http.StatusNoContent)
		case "GET /control/events?after=7":
			fmt.Fprint(w, "\n{\"n\":8,\"clients\":1}\n\n{\"n\":9}\n")
		default:
			http.NotFound(w, r)
		}
	})
	if err := a.Ready(t.Context()); err != nil {
		t.Error(err)
	}
	if st, err := a.State(t.Context()); err != nil || st.SessionID != "s" || st.Clients != 2 {
		t.Errorf("%+v %v", st, err)
	}
	if err := a.Start(t.Context(), agentlink.Start{SessionID: "s", Setup: []string{"a b"}}); err != nil || !strings.Contains(got, `"setup":["a b"]`) {
		t.Errorf("sent %s, %v", got, err)
	}
	var seen []uint64
	var end error
	for n, err := range a.Notices(t.Context(), 7) {
		if end = err; err == nil {
			seen = append(seen, n.N)
		}
	}
	if fmt.Sprint(seen) != "[8 9]" || !errors.Is(end, io.ErrUnexpectedEOF) {
		t.Errorf("notices %v, then %v", seen, end)
	}
}

// Every answer here is one that a customer who has taken the agent over might
// give: an error, soon, with bounded text and no code of ours.
func TestHostileAnswers(t *testing.T) {
	long := strings.Repeat("x", 3<<20)
	for name, answer := range map[string]http.HandlerFunc{
		"not JSON":      func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "hello") },
		"endless body":  func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"failed":"`+long) },
		"long sentence": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"failed":"`+long[:1<<19]+`"}`) },
		"not ready":     func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{}`) },
		"long header":   func(w http.ResponseWriter, _ *http.Request) { w.Header().Set("X", long) },
		"redirect":      func(w http.ResponseWriter, r *http.Request) { http.Redirect(w, r, "/control/state", http.StatusFound) },
		"error with code": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, `{"error":{"code":"no_capacity","message":"`+long+`"}}`, http.StatusServiceUnavailable)
		},
		"cut":         func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
		"wrong types": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, `{"ready":"yes","clients":1e99}`) },
		"compressed": func(w http.ResponseWriter, _ *http.Request) {
			w.Header().Set("Content-Encoding", "gzip")
			fmt.Fprint(w, "x")
		},
	} {
		t.Run(name, func(t *testing.T) {
			err := agent(t, answer).Ready(t.Context())
			if err == nil {
				t.Fatal("believed")
			}
			if apierr.Is(err, apierr.NoCapacity) || len(err.Error()) > 2*maxError {
				t.Errorf("%d bytes: %.200s", len(err.Error()), err)
			}
		})
	}
}

func TestHostileNotices(t *testing.T) {
	for name, line := range map[string]string{
		"not JSON": "hello\n",
		"too long": strings.Repeat("y", maxLine+1),
		"negative": `{"n":-1}` + "\n",
	} {
		t.Run(name, func(t *testing.T) {
			a := agent(t, func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, line) })
			n := 0
			var end error
			for _, err := range a.Notices(t.Context(), 0) {
				n, end = n+1, err
			}
			if n != 1 || end == nil {
				t.Errorf("%d items, then %v", n, end)
			}
		})
	}
}

func TestFloodIsReadSlowly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		near, far := net.Pipe()
		go func() { // an agent that sends heartbeats as fast as it can
			defer far.Close()
			buf := make([]byte, 4096)
			_, _ = far.Read(buf[:1])
			_, _ = far.Read(buf)
			_, err := io.WriteString(far, "HTTP/1.1 200 OK\r\n\r\n")
			for err == nil {
				_, err = io.WriteString(far, "{}\n")
			}
		}()
		a := New(func(context.Context) (net.Conn, error) { return near, nil })
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		n := 0
		for _, err := range a.Notices(ctx, 0) {
			if err == nil {
				n++
			}
		}
		if most := burstLines + 60*linesPerSecond + 1; n > most || n < most/2 {
			t.Errorf("%d notices in a minute, want up to %d", n, most)
		}
		near.Close()
	})
}

func TestPaceCountsBytesToo(t *testing.T) {
	now := time.Now()
	p := pace{lines: burstLines, bytes: burstBytes, at: now}
	if owed := p.take(now, burstBytes); owed != 0 {
		t.Errorf("the first burst waits %s", owed)
	}
	if owed := p.take(now, 10*bytesPerSecond); owed != 10*time.Second {
		t.Errorf("owes %s", owed)
	}
	if owed := p.take(now.Add(time.Hour), 1); owed != 0 {
		t.Errorf("after an hour it owes %s", owed)
	}
}

func TestTunnelWritesItsPreface(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	a := New(func(context.Context) (net.Conn, error) { return near, nil })
	go func() {
		if c, err := a.Tunnel(context.Background()); err == nil {
			c.Close()
		}
	}()
	b, err := io.ReadAll(far)
	if err != nil || len(b) != 1 || b[0] != agentlink.PrefaceLink {
		t.Errorf("%q %v", b, err)
	}
}
