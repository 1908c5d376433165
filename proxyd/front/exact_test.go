package front

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// ledgerProxy is a proxy that answers by what a tunnel's first bytes ask for,
// and keeps count of what it got and gave behind its answer.
type ledgerProxy struct {
	addr     string
	up, down atomic.Int64
}

func newLedgerProxy(t *testing.T) *ledgerProxy {
	p := &ledgerProxy{}
	p.addr = serveTCP(t, func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		readHead(in)
		_, _ = io.WriteString(c, ok200)
		var kind string
		var size int
		if _, err := fmt.Fscanf(in, "%s %d\n", &kind, &size); err != nil {
			return
		}
		p.up.Add(int64(len(fmt.Sprintf("%s %d\n", kind, size))))
		p.serve(c, in, kind, size)
	})
	return p
}

const ok200 = "HTTP/1.1 200 OK\r\n\r\n"

func (p *ledgerProxy) serve(c *net.TCPConn, in *bufio.Reader, kind string, size int) {
	give := func(n int) {
		m, _ := c.Write(make([]byte, n))
		p.down.Add(int64(m))
	}
	take := func() {
		n, _ := io.Copy(io.Discard, in)
		p.up.Add(n)
	}
	switch kind {
	case "echo": // to the half-close, then back
		var all strings.Builder
		n, _ := io.Copy(&all, in)
		p.up.Add(n)
		give(int(n))
	case "give": // and close first
		give(size)
		_ = c.CloseWrite()
		take()
	case "cut": // a reset behind bytes that the client has acknowledged by a word
		give(size)
		if _, err := in.ReadByte(); err == nil {
			p.up.Add(1)
		}
		_ = c.SetLinger(0)
	case "left": // the client resets once it has all
		give(size)
		take()
	}
}

// tunnelOnce plays the client of one kind of tunnel to its end.
func tunnelOnce(conn *net.TCPConn, kind string, size int) error {
	fmt.Fprintf(conn, "CONNECT site.test:443 HTTP/1.1\r\n\r\n")
	if _, err := io.ReadFull(conn, make([]byte, len(established))); err != nil {
		return err
	}
	fmt.Fprintf(conn, "%s %d\n", kind, size)
	switch kind {
	case "echo":
		go func() {
			_, _ = conn.Write(make([]byte, size))
			_ = conn.CloseWrite()
		}()
		n, err := io.Copy(io.Discard, conn)
		if err == nil && n != int64(size) {
			err = fmt.Errorf("%d bytes of %d came back", n, size)
		}
		return err
	case "cut":
		if _, err := io.ReadFull(conn, make([]byte, size)); err != nil {
			return err
		}
		_, _ = conn.Write([]byte("x"))
		if _, err := conn.Read(make([]byte, 1)); err == nil || err == io.EOF {
			return fmt.Errorf("got %v, want a reset", err)
		}
		return nil
	}
	_, err := io.ReadFull(conn, make([]byte, size))
	if kind == "left" {
		_ = conn.SetLinger(0)
	}
	conn.Close()
	return err
}

// Hundreds of tunnels and plain requests at once, with orderly ends, half-closes
// and resets from either side: the count is the proxy's own, to the byte.
func TestCountsAreTheProxysOwn(t *testing.T) {
	r := newRig(t, 512, time.Second)
	p, plain := newLedgerProxy(t), newRawSite(t, okAnswer)
	tunnels := r.pass(proxylink.Pass{SessionID: "s", Routes: []proxylink.Route{route(p.addr)}})
	way := route(plain.addr)
	way.Username = "user"
	requests := r.pass(proxylink.Pass{SessionID: "s", Routes: []proxylink.Route{way}})
	var all sync.WaitGroup
	free := make(chan struct{}, 24)
	for i := range 240 {
		kind := []string{"echo", "give", "cut", "left", "plain"}[i%5]
		size := []int{0, 1, 1400, 70_000, 900_000}[i/5%5]
		sealed := tunnels
		if kind == "plain" {
			sealed = requests
		}
		free <- struct{}{}
		conn := r.dialWith("s", sealed)
		all.Go(func() {
			defer func() { conn.Close(); <-free }()
			var err error
			if kind == "plain" {
				err = plainTwice(conn)
			} else {
				err = tunnelOnce(conn, kind, size)
			}
			if err != nil {
				t.Errorf("%s %d: %v", kind, size, err)
			}
		})
	}
	all.Wait()
	r.settled("s")
	const login = "Proxy-Authorization: Basic dXNlcjo=\r\n"
	up, down := p.up.Load(), p.down.Load()
	for _, got := range plain.requests() {
		up, down = up+int64(len(got)-len(login)), down+int64(len(okAnswer))
	}
	if gotUp, gotDown := r.billed(egress.Custom); gotUp != up || gotDown != down {
		t.Errorf("%d up, %d down, want %d up, %d down", gotUp, gotDown, up, down)
	}
}

func plainTwice(conn net.Conn) error {
	in := bufio.NewReader(conn)
	for range 2 {
		fmt.Fprintf(conn, "POST http://site.test/ HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nhello")
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			return err
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
	}
	return nil
}
