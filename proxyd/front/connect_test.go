package front

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// readEstablished reads the answer to CONNECT and nothing behind it.
func readEstablished(t *testing.T, conn net.Conn) {
	t.Helper()
	head := make([]byte, len(established))
	if _, err := io.ReadFull(conn, head); err != nil || !bytes.HasPrefix(head, []byte("HTTP/1.1 200 ")) {
		t.Fatalf("%q %v", head, err)
	}
}

func TestConnectTunnelsAndCounts(t *testing.T) {
	r := newRig(t, 512, time.Second)
	target := echo(t)
	conn := r.dial("s")
	// The client need not wait for the answer: bytes behind the head count and pass.
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: x\r\nProxy-Connection: keep-alive\r\n\r\nearly", target)
	readEstablished(t, conn)
	body := bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // 1 MiB
	go func() {
		_, _ = conn.Write(body)
		_ = conn.CloseWrite()
	}()
	got, err := io.ReadAll(conn) // ends by the half-close, echoed
	if err != nil || !bytes.Equal(got, append([]byte("early"), body...)) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	n := int64(len(body) + 5)
	if c := r.settled("s"); c != (meter.Counts{Up: n, Down: n, Connections: 1}) {
		t.Errorf("%+v, want %d both ways", c, n)
	}
}

func TestRefusalsOverHTTP(t *testing.T) {
	r := newRig(t, 512, time.Second)
	for target, want := range map[string]struct {
		status int
		reason egress.Reason
	}{
		"127.0.0.1:25":                    {403, egress.PortBlocked},
		"127.0.0.1:2525":                  {403, egress.PortBlocked},
		"127.0.0.2:80":                    {403, egress.BadTarget},
		"[::1]:80":                        {403, egress.BadTarget},
		"169.254.169.254:80":              {403, egress.BadTarget},
		"2130706433:80":                   {403, egress.BadTarget},
		"no-port":                         {403, egress.BadTarget},
		"host:port":                       {403, egress.BadTarget},
		"":                                {403, egress.BadTarget},
		strings.Repeat("a", 5000) + ":80": {403, egress.BadTarget},
		nobody(t):                         {502, egress.UpstreamUnreachable},
	} {
		resp := send(t, r.dial("s"), "CONNECT "+target+" HTTP/1.1\r\nHost: x\r\n\r\n")
		body, err := io.ReadAll(resp.Body)
		if err != nil || resp.StatusCode != want.status || resp.Header.Get(egress.ReasonHeader) != string(want.reason) || len(body) < 10 || !resp.Close {
			t.Errorf("CONNECT %.60q: %s, %v, %q, %v", target, resp.Status, resp.Header, body, err)
		}
	}
}

// A refusal gets through although the client has sent more.
func TestRefusalSurvivesUnreadBytes(t *testing.T) {
	r := newRig(t, 512, time.Second)
	conn := r.dial("s")
	resp := send(t, conn, "CONNECT 127.0.0.1:25 HTTP/1.1\r\n\r\n"+strings.Repeat("x", 100<<10))
	if _, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 403 {
		t.Fatalf("%s %v", resp.Status, err)
	}
}

func TestTooManyConnections(t *testing.T) {
	r := newRig(t, 2, time.Second)
	target := echo(t)
	ask := func(session string) *http.Response {
		return send(t, r.dial(session), "CONNECT "+target+" HTTP/1.1\r\n\r\n")
	}
	for range 2 {
		if resp := ask("s"); resp.StatusCode != 200 {
			t.Fatal(resp.Status)
		}
	}
	resp := ask("s")
	if resp.StatusCode != 503 || resp.Header.Get(egress.ReasonHeader) != "too_many_connections" {
		t.Fatalf("third: %s %v", resp.Status, resp.Header)
	}
	if resp := ask("other"); resp.StatusCode != 200 {
		t.Fatalf("another session: %s", resp.Status)
	}
	plain := send(t, r.dial("s"), "GET http://"+target+"/ HTTP/1.1\r\nHost: x\r\n\r\n")
	if plain.StatusCode != 503 || plain.Header.Get(egress.ReasonHeader) != "too_many_connections" {
		t.Fatalf("plain: %s %v", plain.Status, plain.Header)
	}
	socks := r.dial("s")
	if code := socksConnect(t, socks, socksName("127.0.0.1", portOf(t, target))); code != 1 {
		t.Fatalf("SOCKS reply %d", code)
	}
}

func TestHelloIsChecked(t *testing.T) {
	r := newRig(t, 512, time.Second)
	for name, wire := range map[string]func(net.Conn){
		"wrong proof": func(c net.Conn) {
			_ = proxylink.WriteHello(c, proxylink.Hello{Proof: strings.Repeat("0", 64), SessionID: "s"})
		},
		"no proof": func(c net.Conn) { _ = proxylink.WriteHello(c, proxylink.Hello{SessionID: "s"}) },
		"no hello": func(c net.Conn) { _, _ = io.WriteString(c, "CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n") },
	} {
		conn, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		wire(conn)
		_, _ = io.WriteString(conn, "CONNECT 127.0.0.1:80 HTTP/1.1\r\n\r\n")
		if b, err := io.ReadAll(conn); len(b) > 0 || err != nil && !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: %q %v", name, b, err)
		}
	}
	if c := r.meter.Session("s"); c.Connections != 0 {
		t.Errorf("counted: %+v", c)
	}
}

func TestResetOfTheSiteReachesTheClient(t *testing.T) {
	r := newRig(t, 512, time.Second)
	target := serveTCP(t, func(c *net.TCPConn) {
		_, _ = io.ReadFull(c, make([]byte, 1))
		_ = c.SetLinger(0)
	})
	conn := r.dial("s")
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\n\r\n", target)
	readEstablished(t, conn)
	_, _ = conn.Write([]byte("x"))
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
	r.settled("s")
}

// At a stop, open tunnels finish within the drain time; what waits for its
// first request is closed at once, and no new connection is taken.
func TestDrainLetsOpenOnesFinish(t *testing.T) {
	r := newRig(t, 512, 20*time.Second)
	target := echo(t)
	busy, idle := r.dial("s"), r.dial("s")
	fmt.Fprintf(busy, "CONNECT %s HTTP/1.1\r\n\r\n", target)
	readEstablished(t, busy)
	r.until("s", func(c meter.Counts) bool { return c.Open == 2 })
	r.stop()
	if _, err := idle.Read(make([]byte, 1)); err == nil {
		t.Error("an idle connection got bytes")
	}
	if _, err := busy.Write([]byte("still")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(busy, make([]byte, 5)); err != nil {
		t.Fatalf("the open tunnel was cut: %v", err)
	}
	if conn, err := net.Dial("tcp", r.addr); err == nil {
		conn.Close()
		t.Error("a new connection was taken")
	}
	busy.Close()
	select {
	case <-r.ended:
	case <-time.After(10 * time.Second):
		t.Fatal("Serve waits although all is over")
	}
}

func TestDrainTimeIsBounded(t *testing.T) {
	r := newRig(t, 512, 50*time.Millisecond)
	conn := r.dial("s")
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\n\r\n", echo(t))
	readEstablished(t, conn)
	r.stop()
	<-r.ended
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want a reset", err)
	}
}

func FuzzReadConnect(f *testing.F) {
	f.Add([]byte("CONNECT a:1 HTTP/1.1\r\nA: b\r\n\r\nrest"))
	f.Add([]byte("CONNECT a:1 HTTP/1.0\n\nrest"))
	f.Add(append([]byte("CONNECT a:1 HTTP/1.1\r\nX: "), bytes.Repeat([]byte("y"), 5000)...))
	f.Fuzz(func(t *testing.T, wire []byte) {
		in := bytes.NewReader(wire)
		r := bufio.NewReader(in)
		target, err := readConnect(r)
		if err != nil {
			return
		}
		used := wire[:len(wire)-in.Len()-r.Buffered()]
		if !bytes.HasPrefix(used, []byte("CONNECT ")) || !bytes.HasSuffix(used, []byte("\n")) || len(used) > maxHead {
			t.Fatalf("took %q", used)
		}
		if strings.ContainsAny(target, " \n") {
			t.Fatalf("target %q", target)
		}
	})
}
