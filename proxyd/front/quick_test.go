package front

import (
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/proxyd/guard"
	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// known makes a session known, so that its next connections are a loop's.
func (r *rig) known(session, target string) []byte {
	r.t.Helper()
	sealed := r.pass(proxylink.Pass{SessionID: session})
	conn := r.dialWith(session, sealed)
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\n\r\n", target)
	readEstablished(r.t, conn)
	conn.Close()
	r.settled(session)
	return sealed
}

// However a client's first bytes are cut into pieces, and whoever serves it
// then, it gets the same answer and the same bytes count.
func TestPiecesOfARequestAreOneRequest(t *testing.T) {
	r := newRig(t, 512, time.Second)
	target := echo(t)
	sealed := r.known("s", target)
	hello, err := proxylink.AppendHello(nil, proxylink.Hello{Proof: r.secret.Proof(), Host: "host", SessionID: "s", Epoch: 1, Pass: sealed})
	if err != nil {
		t.Fatal(err)
	}
	request := "CONNECT " + target + " HTTP/1.1\r\nHost: x\r\n\r\n"
	wire := string(hello) + request + "early"
	for name, pieces := range map[string][]string{
		"one":                  {wire},
		"hello and request":    {string(hello), request + "early"},
		"within the hello":     {wire[:20], wire[20:]},
		"within the request":   {wire[:len(hello)+12], wire[len(hello)+12:]},
		"before the last line": {string(hello), request[:len(request)-2], "\r\nearly"},
	} {
		before := r.meter.Session("s")
		conn, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		for _, piece := range pieces {
			if _, err := io.WriteString(conn, piece); err != nil {
				t.Fatal(err)
			}
			untilRead(t, conn)
		}
		readEstablished(t, conn)
		_ = conn.(*net.TCPConn).CloseWrite()
		if got, err := io.ReadAll(conn); err != nil || string(got) != "early" {
			t.Errorf("%s: %q %v", name, got, err)
		}
		conn.Close()
		after := r.settled("s")
		if got := (meter.Counts{Up: after.Up - before.Up, Down: after.Down - before.Down, Connections: after.Connections - before.Connections}); got != (meter.Counts{Up: 5, Down: 5, Connections: 1}) {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// untilRead waits until the other end has acknowledged what was written: it is a
// piece of its own then, or read together with what follows; both must do.
func untilRead(t *testing.T, conn net.Conn) {
	t.Helper()
	raw, err := conn.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		left := 0
		_ = raw.Control(func(fd uintptr) { left = outstanding(int(fd)) })
		if left == 0 {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are not acknowledged", left)
		}
	}
}

// A site where nobody listens is refused by a loop as by a goroutine.
func TestARefusedSiteOfAKnownSession(t *testing.T) {
	r := newRig(t, 512, time.Second)
	sealed := r.known("s", echo(t))
	resp := send(t, r.dialWith("s", sealed), "CONNECT "+nobody(t)+" HTTP/1.1\r\n\r\n")
	if body, err := io.ReadAll(resp.Body); err != nil || resp.StatusCode != 502 || resp.Header.Get(egress.ReasonHeader) != string(egress.UpstreamUnreachable) {
		t.Errorf("%s %q %v", resp.Status, body, err)
	}
	if c := r.settled("s"); c.Connections != 2 || c.Up != 0 || c.Down != 0 {
		t.Errorf("%+v", c)
	}
}

// silent is an address that answers nothing: its listener's queue is full.
func silent(t *testing.T) string {
	t.Helper()
	s, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(s) })
	if err := errors.Join(syscall.Bind(s, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}), syscall.Listen(s, 0)); err != nil {
		t.Fatal(err)
	}
	bound, err := syscall.Getsockname(s)
	if err != nil {
		t.Fatal(err)
	}
	addr := fmt.Sprintf("127.0.0.1:%d", bound.(*syscall.SockaddrInet4).Port)
	for range 16 { // until one waits
		conn, err := net.DialTimeout("tcp", addr, 200*time.Millisecond)
		var timed net.Error
		if errors.As(err, &timed) && timed.Timeout() {
			return addr
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
	}
	t.Fatal("the queue is never full")
	return ""
}

// A site that does not answer is given up, and the client told so.
func TestASiteThatNeverAnswersTimesOut(t *testing.T) {
	r := newRig(t, 512, time.Second)
	sealed, target := r.known("s", echo(t)), silent(t)
	conn := r.dialWith("s", sealed)
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\n\r\n", target)
	got := make(chan string, 1)
	go func() { b, _ := io.ReadAll(conn); got <- string(b) }()
	for {
		select {
		case answer := <-got:
			if !strings.HasPrefix(answer, "HTTP/1.1 504 ") || !strings.Contains(answer, string(egress.UpstreamTimeout)) {
				t.Errorf("%q", answer)
			}
			if c := r.settled("s"); c.Up != 0 || c.Down != 0 {
				t.Errorf("%+v", c)
			}
			return
		case <-time.After(time.Millisecond): // as the watch does once the time is over
			if r.meter.Session("s").Open == 1 { // booked: what is awaited from here on is the site
				for c := range r.connections("s") {
					c.overdue(time.Now().Add(guard.DialTimeout + time.Second))
				}
			}
		}
	}
}

// The drain's end cuts what still waits for a site.
func TestDrainCutsWhatConnects(t *testing.T) {
	r := newRig(t, 512, 50*time.Millisecond)
	sealed, target := r.known("s", echo(t)), silent(t)
	conn := r.dialWith("s", sealed)
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\n\r\n", target)
	r.until("s", func(c meter.Counts) bool { return c.Open == 1 })
	r.stop()
	<-r.ended
	if b, err := io.ReadAll(conn); len(b) > 0 {
		t.Errorf("%q %v", b, err)
	}
}

// SOCKS5 and plain HTTP of a known session begin in a loop and end in a goroutine.
func TestOtherProtocolsOfAKnownSession(t *testing.T) {
	r := newRig(t, 512, time.Second)
	site := newRawSite(t, okAnswer)
	sealed := r.known("s", echo(t))
	for name, want := range map[string]int{"CONNECT": http.StatusOK, "GET": http.StatusOK, "SOCKS5": 0} {
		if code, reason := asks[name](t, r.dialWith("s", sealed), site.addr); code != want {
			t.Errorf("%s: %d %s", name, code, reason)
		}
	}
}

// A session's later connections stay a loop's, also through a proxy; what is
// inside TLS does not. Bytes and counts are those of its first one.
func TestProxiesOfAKnownSession(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, ok200+"banner")
		_, _ = io.Copy(conn, rw)
	}))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	pool := x509.NewCertPool()
	pool.AddCert(srv.Certificate())
	r := newRigWith(t, 512, time.Second, upstream.Config{Roots: pool})
	secure := route(srv.Listener.Addr().String())
	secure.Server = strings.Replace(secure.Server, "http:", "https:", 1)
	for session, way := range map[string]proxylink.Route{"http": route(tunnels(t, "banner").addr), "https": secure} {
		sealed := r.pass(proxylink.Pass{SessionID: session, Routes: []proxylink.Route{way}})
		for i := range int64(3) {
			conn := r.dialWith(session, sealed)
			fmt.Fprintf(conn, "CONNECT site.test:443 HTTP/1.1\r\n\r\nearly")
			readEstablished(t, conn)
			r.until(session, func(c counts) bool { return c.Open == 1 })
			for c := range r.connections(session) {
				if in := c.quick.Load() != nil; in != (session == "http" && i > 0) {
					t.Errorf("%s, connection %d: in a loop: %v", session, i, in)
				}
			}
			_ = conn.CloseWrite()
			if got, err := io.ReadAll(conn); err != nil || string(got) != "bannerearly" {
				t.Errorf("%s, connection %d: %q %v", session, i, got, err)
			}
			if c := r.settled(session); c != (counts{Up: 5 * (i + 1), Down: 11 * (i + 1), Connections: i + 1}) {
				t.Errorf("%s, connection %d: %+v", session, i, c)
			}
		}
	}
}

// Refusals of a known session come as those of a new one.
func TestRefusalsOfAKnownSession(t *testing.T) {
	r := newRig(t, 512, time.Second)
	sealed := r.known("s", echo(t))
	for target, want := range map[string]string{"127.0.0.1:25": "port_blocked", "169.254.169.254:80": "bad_target", "name.test:443": "bad_target", "x": "bad_target"} {
		if code, reason := asks["CONNECT"](t, r.dialWith("s", sealed), target); code != 403 || reason != want {
			t.Errorf("%s: %d %s", target, code, reason)
		}
	}
}

// outstanding is how many bytes the other end has not acknowledged.
func outstanding(fd int) int {
	n, _ := unix.IoctlGetInt(fd, unix.SIOCOUTQ)
	return n
}
