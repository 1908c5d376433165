package front

import (
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/proxyd/guard"
	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/refusals"
	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// bench is a front, what hostd sends first for a session, and a site.
type bench struct {
	addr, site string
	hello      []byte
}

// newBench makes a pass with rules, of 256 characters each, none of which
// matches the site.
func newBench(b *testing.B, rules int, serve func(net.Conn)) *bench {
	b.Helper()
	allow, _ := egress.ParseAllow("127.0.0.1")
	out := guard.New(egress.Policy{Allow: allow}, nil)
	upstreams, err := upstream.New(upstream.Config{Dialer: out})
	if err != nil {
		b.Fatal(err)
	}
	ln, err := Listen(b.Context(), "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	secret := trust.New()
	s := New(Config{Secret: secret, Guard: out, Upstreams: upstreams, Meter: meter.New(egress.MaxConnections), Feed: refusals.New(),
		Drain: time.Second, Log: slog.New(slog.DiscardHandler)})
	ended := make(chan struct{})
	go func() { defer close(ended); _ = s.Serve(b.Context(), ln) }()
	site, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		for {
			conn, err := site.Accept()
			if err != nil {
				return
			}
			go func() { defer conn.Close(); serve(conn) }()
		}
	}()
	b.Cleanup(func() { site.Close(); <-ended })
	return &bench{addr: ln.Addr().String(), site: site.Addr().String(), hello: benchHello(b, secret, rules)}
}

func benchHello(b *testing.B, secret *trust.Secret, rules int) []byte {
	b.Helper()
	p := proxylink.Pass{SessionID: "s", ProjectID: "p", Epoch: 1, Version: 1, Expires: time.Now().Add(time.Hour)}
	for i := range rules {
		pattern := fmt.Sprintf(`(^|\.)(shop|store|cart|pay)%d[a-z]{2,9}\.(com|net|org)$|`, i)
		pattern += strings.Repeat("x", egress.MaxPattern-len(pattern))
		p.Routes = append(p.Routes, proxylink.Route{Rule: egress.Rule{Type: egress.Custom, Server: "http://proxy.invalid:1", DomainPattern: pattern}})
	}
	sealed, err := proxylink.SealPass(secret, p)
	if err != nil {
		b.Fatal(err)
	}
	hello, err := proxylink.AppendHello(nil, proxylink.Hello{Proof: secret.Proof(), Host: "h", SessionID: "s", Epoch: 1, Pass: sealed})
	if err != nil {
		b.Fatal(err)
	}
	return hello
}

// dial opens a tunnel to the site, as hostd and a browser do.
func (x *bench) dial(b *testing.B) net.Conn {
	conn, err := net.Dial("tcp", x.addr)
	if err != nil {
		b.Fatal(err)
	}
	_, _ = conn.Write(fmt.Appendf(append([]byte(nil), x.hello...), "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", x.site, x.site))
	if _, err := io.ReadFull(conn, make([]byte, len(established))); err != nil {
		b.Fatal(err)
	}
	return conn
}

// Connections with one byte each way, with no rules and with the most that a
// setting may have.
func BenchmarkConnections(b *testing.B) {
	for _, rules := range []int{0, egress.MaxRules} {
		b.Run(fmt.Sprintf("rules=%d", rules), func(b *testing.B) {
			x := newBench(b, rules, func(c net.Conn) { _, _ = io.Copy(c, c) })
			b.ReportAllocs()
			b.RunParallel(func(pb *testing.PB) {
				one := []byte{1}
				for pb.Next() {
					conn := x.dial(b)
					_, _ = conn.Write(one)
					if _, err := io.ReadFull(conn, one); err != nil {
						b.Error(err)
					}
					conn.Close()
				}
			})
		})
	}
}

// One download through a tunnel.
func BenchmarkBulk(b *testing.B) {
	x := newBench(b, 0, func(c net.Conn) {
		chunk := make([]byte, 256<<10)
		for {
			if _, err := c.Write(chunk); err != nil {
				return
			}
		}
	})
	conn := x.dial(b)
	defer conn.Close()
	sink := make([]byte, 1<<20)
	b.SetBytes(int64(len(sink)))
	for b.Loop() {
		if _, err := io.ReadFull(conn, sink); err != nil {
			b.Fatal(err)
		}
	}
}

// Turns of one byte in an open tunnel: what a relay adds to a small message.
func BenchmarkTurns(b *testing.B) {
	x := newBench(b, 0, func(c net.Conn) { _, _ = io.Copy(c, c) })
	conn := x.dial(b)
	defer conn.Close()
	one := []byte{1}
	for b.Loop() {
		_, _ = conn.Write(one)
		if _, err := io.ReadFull(conn, one); err != nil {
			b.Fatal(err)
		}
	}
}
