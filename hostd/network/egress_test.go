package network

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// localEcho is an echo server on the host's loopback, in proxyd's place.
func localEcho(t *testing.T) DialEgress {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go echoTCP(ln)
	return func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "tcp", ln.Addr().String())
	}
}

var egressAt = net.JoinHostPort(agentlink.SlotAddr, fmt.Sprint(agentlink.EgressPort))

func wantReset(t *testing.T, conn net.Conn) {
	t.Helper()
	_ = conn.SetReadDeadline(time.Now().Add(30 * time.Second)) // an earlier one may be over: closing a slot takes long on a busy computer
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read: %v, want a reset", err)
	}
}

// wantRefusal connects to the listener and gets a reset, then or right after.
func wantRefusal(t *testing.T, s *Slot) {
	t.Helper()
	conn, err := tryInside(s, "tcp", egressAt)
	if err == nil {
		t.Cleanup(func() { conn.Close() })
		wantReset(t, conn)
	} else if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("dial: %v, want a reset", err)
	}
}

// wantNoWay says something to the listener, which finds no proxyd for it.
func wantNoWay(t *testing.T, s *Slot) {
	t.Helper()
	conn := dialInside(t, s, "tcp", egressAt)
	if _, err := conn.Write([]byte{5}); err != nil {
		t.Fatal(err)
	}
	wantReset(t, conn)
}

func TestEgressListener(t *testing.T) {
	n := openNet(t, nil)
	s := makeSlot(t, n)
	wantRefusal(t, s) // nobody to dial yet
	s.SetEgress(localEcho(t))
	conn := dialInside(t, s, "tcp", egressAt)
	if err := echoed(conn, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil { // the half-close comes back as one
		t.Fatal(err)
	}
	if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
		t.Errorf("after a half-close: %v", err)
	}
	s.SetEgress(func(context.Context) (net.Conn, error) { return nil, errors.New("proxyd is away") })
	wantNoWay(t, s)
	s.SetEgress(nil)
	wantRefusal(t, s)
}

// Open connections end with the slot, by a reset, at both ends.
func TestCloseCutsConnections(t *testing.T) {
	n := openNet(t, nil)
	s := makeSlot(t, n)
	far := make(chan net.Conn, 1)
	dial := localEcho(t)
	s.SetEgress(func(ctx context.Context) (net.Conn, error) {
		conn, err := dial(ctx)
		far <- conn
		return conn, err
	})
	conn := dialInside(t, s, "tcp", egressAt)
	if err := echoed(conn, 5*time.Second); err != nil {
		t.Fatal(err)
	}
	if err := s.Close(context.Background()); err != nil {
		t.Fatal(err)
	}
	wantReset(t, conn)
	if _, err := (<-far).Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("hostd's end: %v", err)
	}
}

// One connection too many is reset; those that are open live on.
func TestEgressConnectionsAreBounded(t *testing.T) {
	n := openNet(t, nil)
	s := makeSlot(t, n)
	s.SetEgress(localEcho(t))
	var open []net.Conn
	for range maxEgress {
		conn := dialInside(t, s, "tcp", egressAt)
		open = append(open, conn)
	}
	if err := echoed(open[maxEgress-1], 10*time.Second); err != nil { // all before it are accepted
		t.Fatal(err)
	}
	wantRefusal(t, s)
	if err := echoed(open[0], 5*time.Second); err != nil {
		t.Error(err)
	}
}

// The whole way: Chrome's group, the slot's listener, a real proxyd, a web host.
func TestEgressThroughProxyd(t *testing.T) {
	n := openNet(t, nil)
	newWeb(t, n, echoPort, 25)
	p := startProxyd(t)
	s := makeSlot(t, n)
	pass, err := proxylink.SealPass(p.secret, proxylink.Pass{SessionID: "one", Epoch: 1, Version: 1, Expires: time.Now().Add(time.Hour)})
	if err != nil {
		t.Fatal(err)
	}
	s.SetEgress(func(ctx context.Context) (net.Conn, error) {
		return proxylink.Dial(ctx, p.link, proxylink.Hello{Proof: p.secret.Proof(), Host: "h1", SessionID: "one", Epoch: 1, Pass: pass})
	})
	for _, gid := range []uint32{agentlink.BrowserGID, agentlink.UserGID} {
		expect(t, s, gid, map[string]string{
			"connect=" + webAddr + ":4007":    "ok",
			"connect=" + publicAddr + ":4007": "ok",
			"connect=" + webAddr + ":25":      "port_blocked",
			"connect=" + metaAddr + ":4007":   "bad_target",
			"connect=" + privAddr + ":4007":   "bad_target",
			"connect=127.0.0.1:4007":          "bad_target",
			"connect=2130706433:80":           "bad_target",
			"connect=" + webAddr + ":4999":    "upstream_unreachable",
		})
	}
	const each = len("are you there?")
	want := fmt.Sprintf(`"up":%d,"down":%d`, 4*each, 4*each)
	deadline := time.Now().Add(30 * time.Second)
	for got := ""; !strings.Contains(got, want); got = p.counters(t, "one") {
		if time.Now().After(deadline) {
			t.Fatalf("counters %s, want %s", got, want)
		}
	}
	// A wrong proof gets nothing.
	s.SetEgress(func(ctx context.Context) (net.Conn, error) {
		return proxylink.Dial(ctx, p.link, proxylink.Hello{Proof: "guess", Host: "h1", SessionID: "one", Epoch: 1, Pass: pass})
	})
	if r := inSlot(t, s, agentlink.BrowserGID, "connect="+webAddr+":4007"); r["connect="+webAddr+":4007"].Result == "ok" {
		t.Error("a connection without the cluster's proof was served")
	}
}

type proxyd struct {
	link, control string
	secret        *trust.Secret
}

// startProxyd builds and runs the real daemon on free loopback ports.
func startProxyd(t *testing.T) *proxyd {
	t.Helper()
	dir := t.TempDir()
	bin := filepath.Join(dir, "proxyd")
	if out, err := exec.Command("go", "build", "-o", bin, "github.com/berth-dev/berth/proxyd").CombinedOutput(); err != nil {
		t.Fatalf("build proxyd: %v: %s", err, out)
	}
	p := &proxyd{link: freeAddr(t), control: freeAddr(t)}
	var err error
	if p.secret, err = trust.LoadOrCreate(filepath.Join(dir, "secret")); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(bin, "--home", dir, "--listen", p.link, "--control", p.control, "--gossip-addr", freeAddr(t), "--join", freeAddr(t),
		"--cluster-secret", filepath.Join(dir, "secret"), "--egress-allow", opened, "--name", "test-proxyd", "--drain", "1s")
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM)
		if err := cmd.Wait(); err != nil {
			t.Errorf("proxyd ended with %v", err)
		}
	})
	deadline := time.Now().Add(30 * time.Second)
	for {
		resp, err := http.Get("http://" + p.control + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return p
			}
		}
		if time.Now().After(deadline) {
			t.Fatalf("proxyd is not ready: %v", err)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

func (p *proxyd) counters(t *testing.T, session string) string {
	t.Helper()
	req, _ := http.NewRequest("GET", "http://"+p.control+"/v1/counters?sessionId="+session, nil)
	req.Header.Set(trust.Header, p.secret.Proof())
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(resp.Body)
	return string(b)
}

func freeAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}
