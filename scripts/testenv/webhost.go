package testenv

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
)

// WebHost is a computer of its own: a network namespace behind a link of its
// own. On Addr it serves HTTP on port 80 (the page /tall is one to scroll) and echoes TCP and UDP on port 7.
type WebHost struct {
	Addr string // its address; the host's is the same with .1
	Host string // the host's address on that link
	Link string // the host's end of the link, and the namespace's name

	Requests atomic.Int64 // HTTP requests so far
	Datagram atomic.Int64 // UDP packets so far
	Accepted atomic.Int64 // TCP connections to the echo port so far
}

// AllowedWeb is a web host that sessions may reach, by --egress-allow.
func (e *Env) AllowedWeb(t testing.TB) *WebHost { t.Helper(); return e.web(t, false) }

// ClosedWeb is a web host on a private network that sessions may not reach.
func (e *Env) ClosedWeb(t testing.TB) *WebHost { t.Helper(); return e.web(t, true) }

func (e *Env) web(t testing.TB, closed bool) *WebHost {
	t.Helper()
	i := int(e.webs.Add(1))
	host, web := e.num.webAddr(closed, i)
	w := &WebHost{Addr: web, Host: host, Link: fmt.Sprintf("btw%d-%d", e.num.n, i)}
	ns := w.Link
	remove := fmt.Sprintf("ip netns del %[1]s 2>/dev/null || true; ip link del %[1]s 2>/dev/null || true", ns)
	sh(t, remove) // what a killed test left
	t.Cleanup(func() { sh(t, remove) })
	sh(t, fmt.Sprintf(`
ip netns add %[1]s
ip link add %[1]s type veth peer name eth0 netns %[1]s
ip addr add %[2]s/24 dev %[1]s
ip link set %[1]s up
ip -n %[1]s link set lo up
ip -n %[1]s addr add %[3]s/24 dev eth0
ip -n %[1]s link set eth0 up
ip -n %[1]s route add default via %[2]s`, ns, host, web))
	w.serve(t, "/run/netns/"+ns)
	return w
}

// serve opens sockets inside the namespace; they stay there whoever uses them.
func (w *WebHost) serve(t testing.TB, ns string) {
	t.Helper()
	var web, echo net.Listener
	var udp net.PacketConn
	err := inNamespace(ns, func() (err error) {
		if web, err = net.Listen("tcp4", w.Addr+":80"); err != nil {
			return err
		}
		t.Cleanup(func() { web.Close() })
		if echo, err = net.Listen("tcp4", w.Addr+":7"); err != nil {
			return err
		}
		t.Cleanup(func() { echo.Close() })
		if udp, err = net.ListenPacket("udp4", w.Addr+":7"); err != nil {
			return err
		}
		t.Cleanup(func() { udp.Close() })
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: http.HandlerFunc(w.page)}
	go srv.Serve(web)
	t.Cleanup(func() { srv.Close() })
	go w.echoTCP(echo)
	go w.echoUDP(udp)
}

// Listen opens a port of the web host, until the test ends.
func (w *WebHost) Listen(t testing.TB, port int) net.Listener {
	t.Helper()
	var ln net.Listener
	err := inNamespace("/run/netns/"+w.Link, func() (err error) {
		ln, err = net.Listen("tcp4", fmt.Sprintf("%s:%d", w.Addr, port))
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	return ln
}

// Command is a program that runs on the web host once it is started.
func (w *WebHost) Command(ctx context.Context, name string, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, "ip", append([]string{"netns", "exec", w.Link, name}, args...)...)
}

func (w *WebHost) page(rw http.ResponseWriter, r *http.Request) {
	w.Requests.Add(1)
	rw.Header().Set("Content-Type", "text/html")
	fmt.Fprintf(rw, "<title>web host</title><p id=from>%s</p>", r.RemoteAddr)
	if r.URL.Path == "/tall" { // something to scroll
		fmt.Fprint(rw, "<div style='height:9000px'></div>")
	}
}

func (w *WebHost) echoTCP(ln net.Listener) {
	for {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		w.Accepted.Add(1)
		go func() {
			defer conn.Close()
			_, _ = io.Copy(conn, conn)
		}()
	}
}

func (w *WebHost) echoUDP(conn net.PacketConn) {
	buf := make([]byte, 1<<16)
	for {
		n, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		w.Datagram.Add(1)
		_, _ = conn.WriteTo(buf[:n], from)
	}
}

// inNamespace runs fn on a thread inside a network namespace; the thread ends
// with its goroutine.
func inNamespace(path string, fn func() error) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: Go ends the thread
		if err := unix.Setns(int(f.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("enter %s: %w", path, err)
			return
		}
		done <- fn()
	}()
	return <-done
}

func sh(t testing.TB, script string) {
	t.Helper()
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", script, err, out)
	}
}
