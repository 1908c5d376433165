package api

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/wsframe"
)

// keepTimes lets a test change a socket's times.
func keepTimes(t *testing.T) {
	old := []time.Duration{pingAfter, deadAfter, closeTime, verdictTime}
	t.Cleanup(func() { pingAfter, deadAfter, closeTime, verdictTime = old[0], old[1], old[2], old[3] })
}

// shortTimes makes a socket's times short for one test, but for the time in
// which a client has to give a sign: a test may be held up for long.
func shortTimes(t *testing.T) {
	keepTimes(t)
	pingAfter, closeTime, verdictTime = 40*time.Millisecond, 500*time.Millisecond, 100*time.Millisecond
}

// shortLife makes short how long a silent client is kept, too.
func shortLife(t *testing.T) {
	shortTimes(t)
	deadAfter = 2500 * time.Millisecond
}

// longTimes makes who waits for a timeout fail the test.
func longTimes(t *testing.T) {
	keepTimes(t)
	closeTime, verdictTime = 4*patience, 4*patience
}

// echoAgent serves WebSockets that echo; closed gets how each ended.
func echoAgent(closed chan<- error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{Subprotocols: []string{"p"}, CompressionMode: websocket.CompressionContextTakeover})
		if err != nil {
			return
		}
		defer ws.CloseNow()
		ws.SetReadLimit(-1)
		for {
			typ, b, err := ws.Read(context.Background())
			if err == nil && string(b) == "bye" {
				err = ws.Close(4321, "agent's own")
				closed <- err
				return
			}
			if err == nil && string(b) == "die" {
				closed <- nil
				return
			}
			if err == nil {
				err = ws.Write(context.Background(), typ, b)
			}
			if err != nil {
				closed <- err
				return
			}
		}
	}
}

const connectPath = "/v1/connect?sessionId=" + goodID + "&token=c"

func (r *rig) dialWS(path string, opts *websocket.DialOptions) *websocket.Conn {
	r.t.Helper()
	ws, resp, err := websocket.Dial(context.Background(), "ws://"+r.addr+path, opts)
	if err != nil {
		r.t.Fatal(err)
	}
	if resp.Header.Get("X-Request-Id") == "" {
		r.t.Error("101 without x-request-id")
	}
	ws.SetReadLimit(-1)
	r.t.Cleanup(func() { ws.CloseNow() })
	return ws
}

func echo(t testing.TB, ws *websocket.Conn, msg []byte) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := ws.Write(ctx, websocket.MessageBinary, msg); err != nil {
		t.Fatal(err)
	}
	if _, got, err := ws.Read(ctx); err != nil || !bytes.Equal(got, msg) {
		t.Fatalf("%d of %d bytes: %v", len(got), len(msg), err)
	}
}

// closeOf reads until the socket closes.
func closeOf(t *testing.T, ws *websocket.Conn) websocket.CloseError {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	for {
		if _, _, err := ws.Read(ctx); err != nil {
			var ce websocket.CloseError
			if !errors.As(err, &ce) {
				t.Fatalf("no close frame: %v", err)
			}
			return ce
		}
	}
}

func TestSocketEchoes(t *testing.T) {
	r := newRig(t)
	closed := make(chan error, 1)
	var paths []string
	agent := echoAgent(closed)
	r.fake.serve(func(w http.ResponseWriter, req *http.Request) {
		paths = append(paths, req.URL.String())
		if req.Header.Get("Origin") != "" || req.Header.Get("X-Api-Key") != "" {
			t.Error("the machine sees the client's headers")
		}
		agent(w, req)
	})
	for _, path := range []string{connectPath, "/live/" + goodID + "/cdp?token=l", "/live/" + goodID + "/terminal?token=l", sessionPath("/terminal?token=t")} {
		ws := r.dialWS(path, &websocket.DialOptions{Subprotocols: []string{"p"}, CompressionMode: websocket.CompressionContextTakeover, HTTPHeader: http.Header{"Origin": {"http://elsewhere"}}})
		if ws.Subprotocol() != "p" {
			t.Errorf("%s: subprotocol %q", path, ws.Subprotocol())
		}
		for _, n := range []int{0, 1, 125, 126, 65536, 3 << 20} {
			echo(t, ws, bytes.Repeat([]byte("x"), n))
		}
		ws.Close(websocket.StatusNormalClosure, "done")
		var ce websocket.CloseError
		if err := soon(t, "the agent's end", closed); !errors.As(err, &ce) || ce.Code != 1000 || ce.Reason != "done" {
			t.Errorf("the agent saw %v", err)
		}
	}
	if want := "[/cdp /cdp?viewer=1 /terminal /terminal]"; fmt.Sprint(paths) != want {
		t.Errorf("paths %v, want %s", paths, want)
	}
}

// However a session ends, the client reads the code, and the agent the
// platform's own, which the client never sees.
func TestPlatformCloses(t *testing.T) {
	for _, e := range []sessions.Ended{
		{CloseCode: 1000, Reason: "released", At: t0}, {CloseCode: 4000, Reason: "timeout", At: t0},
		{CloseCode: 1008, Reason: "rotated", At: t0}, {CloseCode: 4001, Reason: "paused", At: t0},
	} {
		t.Run(e.Reason, func(t *testing.T) {
			longTimes(t)
			r := newRig(t)
			closed := make(chan error, 1)
			r.fake.serve(echoAgent(closed))
			ws := r.dialWS(connectPath, nil)
			echo(t, ws, []byte("hello"))
			r.fake.ends <- e
			if ce := closeOf(t, ws); int(ce.Code) != e.CloseCode || ce.Reason != e.Reason {
				t.Errorf("the client saw %v", ce)
			}
			var ce websocket.CloseError
			if err := soon(t, "the agent's end", closed); !errors.As(err, &ce) || ce.Code != agentlink.PlatformClose {
				t.Errorf("the agent saw %v", err)
			}
		})
	}
}

func TestShutdownCloses1001(t *testing.T) {
	r := newRig(t)
	closed := make(chan error, 1)
	r.fake.serve(echoAgent(closed))
	ws := r.dialWS(connectPath, nil)
	echo(t, ws, []byte("hello"))
	shut := make(chan error, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		shut <- r.srv.Shutdown(ctx)
	}()
	if ce := closeOf(t, ws); ce.Code != websocket.StatusGoingAway {
		t.Errorf("the client saw %v", ce)
	}
	var ce websocket.CloseError
	if err := soon(t, "the agent's end", closed); !errors.As(err, &ce) || ce.Code != agentlink.PlatformClose {
		t.Errorf("the agent saw %v", err)
	}
	if err := soon(t, "shutdown", shut); err != nil {
		t.Error(err)
	}
}

func TestAgentsOwnClosePasses(t *testing.T) {
	r := newRig(t)
	r.fake.serve(echoAgent(make(chan error, 1)))
	ws := r.dialWS(connectPath, nil)
	_ = ws.Write(context.Background(), websocket.MessageText, []byte("bye"))
	if ce := closeOf(t, ws); ce.Code != 4321 || ce.Reason != "agent's own" {
		t.Errorf("the client saw %v", ce)
	}
}

// A stream that breaks without a word becomes the session's verdict, or 1011.
func TestAgentBreaksSocket(t *testing.T) {
	shortTimes(t)
	r := newRig(t)
	r.fake.serve(echoAgent(make(chan error, 2)))
	ws := r.dialWS(connectPath, nil)
	_ = ws.Write(context.Background(), websocket.MessageText, []byte("die"))
	if ce := closeOf(t, ws); ce.Code != 1011 || ce.Reason != "machine lost" {
		t.Errorf("the client saw %v", ce)
	}
}

// A client that vanishes is told to the agent by a close frame.
func TestClientVanishes(t *testing.T) {
	r := newRig(t)
	closed := make(chan error, 1)
	r.fake.serve(echoAgent(closed))
	ws := r.dialWS(connectPath, nil)
	echo(t, ws, []byte("hello"))
	ws.CloseNow()
	var ce websocket.CloseError
	if err := soon(t, "the agent's end", closed); !errors.As(err, &ce) || ce.Code != websocket.StatusGoingAway {
		t.Errorf("the agent saw %v", err)
	}
}

// rawSocket is a client that speaks frames by hand.
func (r *rig) rawSocket(early string) (net.Conn, *bufio.Reader) {
	r.t.Helper()
	c := r.raw("GET " + connectPath + " HTTP/1.1\r\nHost: h\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n" + early)
	br := bufio.NewReader(c)
	resp, err := http.ReadResponse(br, nil)
	if err != nil || resp.StatusCode != 101 || resp.Header.Get("Sec-WebSocket-Accept") != "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=" { // RFC 6455 section 1.3
		r.t.Fatalf("%v %v", resp, err)
	}
	return c, br
}

// A silent client is pinged, and one that never answers is dropped.
func TestPingAndDeath(t *testing.T) {
	shortLife(t)
	r := newRig(t)
	closed := make(chan error, 1)
	r.fake.serve(echoAgent(closed))
	_, br := r.rawSocket("")
	ping := make([]byte, 7)
	if _, err := io.ReadFull(br, ping); err != nil || string(ping) != "\x89\x05berth" {
		t.Fatalf("%q %v", ping, err)
	}
	if _, err := io.Copy(io.Discard, br); err != nil {
		t.Errorf("the dead client's connection: %v", err)
	}
	if err := soon(t, "the agent's end", closed); err == nil {
		t.Error("the agent was not told")
	}
}

// The answer to a ping is seen at the next look only; that must not put off
// the next ping.
func TestPingsKeepTheirPace(t *testing.T) {
	start := time.Now()
	l, answered := life{heard: start, looked: start}, false
	var at []time.Duration
	for now := start; now.Sub(start) <= 2*time.Minute; now = now.Add(pingAfter / 4) {
		ping, dead := l.due(now, answered)
		if dead {
			t.Fatalf("given up after %s", now.Sub(start))
		}
		if answered = ping; ping {
			l.pings++
			at = append(at, now.Sub(start))
		}
	}
	want := []time.Duration{20 * time.Second, 40 * time.Second, 60 * time.Second, 80 * time.Second, 100 * time.Second, 120 * time.Second}
	if !slices.Equal(at, want) {
		t.Errorf("pings at %v, want %v", at, want)
	}
}

// A client that answers pings stays, however silent otherwise.
func TestPongKeepsAlive(t *testing.T) {
	shortLife(t)
	r := newRig(t)
	r.fake.serve(echoAgent(make(chan error, 1)))
	c, br := r.rawSocket("")
	until := time.Now().Add(deadAfter + time.Second)
	ping := make([]byte, 7)
	for time.Now().Before(until) {
		if _, err := io.ReadFull(br, ping); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(wsframe.AppendPong(nil, ping[2:], true)); err != nil {
			t.Fatal(err)
		}
	}
}

// Frames sent right behind the handshake are not lost; what is no frame is
// answered with 1002 and goes no further.
func TestEarlyAndBadFrames(t *testing.T) {
	r := newRig(t)
	closed := make(chan error, 1)
	r.fake.serve(echoAgent(closed))
	hello := "\x81\x85\x00\x00\x00\x00hello"
	c, br := r.rawSocket(hello)
	got := make([]byte, 7)
	if _, err := io.ReadFull(br, got); err != nil || string(got) != "\x81\x05hello" {
		t.Fatalf("%q %v", got, err)
	}
	_, _ = c.Write([]byte{0x83, 0x80, 0, 0, 0, 0})
	if _, err := io.ReadFull(br, got[:4]); err != nil || got[0] != 0x88 || got[2] != 1002>>8 || got[3] != 1002&0xff {
		t.Errorf("%q %v", got[:4], err)
	}
	soon(t, "the agent's end", closed)
}

// Cut inside a frame nothing is put there: the connection just ends.
func TestCutInsideFrame(t *testing.T) {
	shortTimes(t)
	r := newRig(t)
	half := make(chan struct{})
	r.fake.serve(func(w http.ResponseWriter, req *http.Request) {
		conn, rw, _ := w.(http.Hijacker).Hijack()
		defer conn.Close()
		fmt.Fprintf(rw, "HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n\x82\x7e\x10\x00half")
		rw.Flush()
		<-half
		_, _ = io.Copy(io.Discard, conn)
	})
	_, br := r.rawSocket("")
	got := make([]byte, 8)
	if _, err := io.ReadFull(br, got); err != nil || string(got[4:]) != "half" {
		t.Fatalf("%q %v", got, err)
	}
	close(half)
	r.fake.ends <- sessions.Ended{CloseCode: 1000, Reason: "released", At: t0}
	if rest, err := io.ReadAll(br); len(rest) > 0 {
		t.Errorf("%q after half a frame, %v", rest, err)
	}
}

func TestUpgradeRefusals(t *testing.T) {
	r := newRig(t)
	r.fake.serve(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(409)
		io.WriteString(w, `{"error":{"code":"session_not_running","message":"chrome is gone"}}`)
	})
	upgrade := []string{"Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version", "13"}
	for _, tt := range []struct {
		path   string
		header []string
		kind   session.Kind
		status int
	}{
		{connectPath, nil, session.Both, 400},
		{connectPath, upgrade, session.Both, 409},
		{connectPath, upgrade, session.Shell, 400},
		{"/v1/connect?sessionId=" + goodID + "&token=x", upgrade, session.Both, 401},
		{"/v1/connect?token=c", upgrade, session.Both, 400},
		{sessionPath("/terminal"), upgrade, session.Both, 401},
		{sessionPath("/terminal?token=c"), upgrade, session.Both, 401},
		{sessionPath("/terminal?token=t"), upgrade, session.Browser, 400},
		{"/live/" + goodID + "/cdp?token=l", upgrade, session.Shell, 400},
	} {
		r.fake.view.Session.Kind = tt.kind
		a := r.do("GET", tt.path, nil, append([]string{"X-Api-Key", ""}, tt.header...)...)
		if a.status != tt.status || a.code() == "" {
			t.Errorf("%s: %d %s", tt.path, a.status, a.body)
		}
	}
	r.fake.view.Session.Kind = session.Browser
	if a := r.do("POST", sessionPath("/exec"), `{"command":"x"}`); a.status != 400 || !strings.HasPrefix(a.message(), "shell:") {
		t.Errorf("exec without shell: %d %s", a.status, a.body)
	}
}

func TestBrowserResolves(t *testing.T) {
	r := newRig(t)
	r.fake.serve(func(w http.ResponseWriter, req *http.Request) {
		url := req.Header.Get(agentlink.ConnectURLHeader)
		if strings.HasSuffix(req.URL.Path, "list") {
			fmt.Fprintf(w, `[{"webSocketDebuggerUrl":%q}]`, url)
			return
		}
		fmt.Fprintf(w, `{"Browser":"Chrome/1","webSocketDebuggerUrl":%q}`, url)
	})
	for _, path := range []string{"/json/version", "/json/list"} {
		a := r.do("GET", path+"?sessionId="+goodID+"&token=c", nil, "X-Api-Key", "")
		if a.status != 200 || !strings.Contains(string(a.body), r.fake.view.URLs.Connect) {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
}

func BenchmarkRoundTrip(b *testing.B) {
	r := newRig(b)
	r.fake.serve(echoAgent(make(chan error, 2)))
	for _, direct := range []bool{true, false} {
		name, addr := "gateway", r.addr
		if direct {
			name, addr = "direct", r.fake.agentLn.Addr().String()
		}
		b.Run(name, func(b *testing.B) {
			ws, _, err := websocket.Dial(context.Background(), "ws://"+addr+connectPath, nil)
			if err != nil {
				b.Fatal(err)
			}
			defer ws.CloseNow()
			msg := bytes.Repeat([]byte("x"), 200)
			b.ReportAllocs()
			for b.Loop() {
				echo(b, ws, msg)
			}
		})
	}
}
