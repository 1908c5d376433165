// Package front is the client side of proxyd: it accepts connections that
// hostd tunnels from machines, speaks HTTP proxy or SOCKS5 with them, decides
// by their pass, and relays to what guard or upstream connected.
package front

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"syscall"
	"time"

	"github.com/things-go/go-socks5"

	"github.com/berth-dev/berth/proxyd/guard"
	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/pass"
	"github.com/berth-dev/berth/proxyd/refusals"
	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/proxylink/loop"
	"github.com/berth-dev/berth/shared/trust"
)

const (
	helloTimeout   = 5 * time.Second  // from accept to the end of the Hello
	headTimeout    = 30 * time.Second // from a request's first byte to the end of its head
	refusedTimeout = 10 * time.Second // for a request whose refusal is certain
)

// Config is what a Server is made of.
type Config struct {
	Secret    *trust.Secret
	Guard     *guard.Guard
	Upstreams *upstream.Upstreams
	Meter     *meter.Meter
	Feed      *refusals.Feed
	Drain     time.Duration // how long open connections may go on once the context of Serve ended
	Log       *slog.Logger
}

// Listen listens for hostd's connections. Keep-alive and TCP_NODELAY are
// set once, on the listener: what it accepts inherits them (tcp(7)).
func Listen(ctx context.Context, addr string) (net.Listener, error) {
	lc := net.ListenConfig{KeepAlive: -1, Control: func(_, _ string, raw syscall.RawConn) error {
		var failed error
		err := raw.Control(func(fd uintptr) { failed = inherit(int(fd)) })
		return errors.Join(err, failed)
	}}
	lc.SetMultipathTCP(false) // every connection would pay for what no hostd asks for
	return lc.Listen(ctx, "tcp", addr)
}

// Keep-alive of hostd's connections, seconds: a host that is gone without a
// word is noticed after idle + count * interval.
const (
	keepIdle     = 30
	keepInterval = 15
	keepCount    = 6
)

func inherit(fd int) error {
	return errors.Join(syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_NODELAY, 1),
		syscall.SetsockoptInt(fd, syscall.SOL_SOCKET, syscall.SO_KEEPALIVE, 1),
		syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_KEEPIDLE, keepIdle),
		syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_KEEPINTVL, keepInterval),
		syscall.SetsockoptInt(fd, syscall.IPPROTO_TCP, syscall.TCP_KEEPCNT, keepCount))
}

// Server serves the proxy link.
type Server struct {
	Config
	log    *slog.Logger
	hellos *hellos
	passes *pass.Book

	socks *socks5.Server
	plain *http.Server
	toWeb handoff // connections for plain

	hard context.Context // ends when draining is over

	mu       sync.Mutex
	draining bool
	clients  map[*client]struct{} // open ones
	done     sync.WaitGroup       // one for each of clients
}

// New makes a server.
func New(config Config) *Server {
	s := &Server{Config: config, log: config.Log, hellos: newHellos(config.Secret), passes: pass.NewBook(config.Secret), clients: map[*client]struct{}{}}
	s.socks = s.newSocks()
	s.plain = s.newPlain()
	s.toWeb = newHandoff()
	return s
}

var accepted = daemon.Counter("berth_proxyd_connections_total")

var errStops = errors.New("proxyd stops")

// Serve accepts from ln, which it closes, until ctx ends, then drains, and closes
// what is left. It returns when every connection is over. Call it once.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	tcp, ok := ln.(*net.TCPListener)
	if !ok {
		return fmt.Errorf("serve: %T is not a TCP listener", ln)
	}
	hard, cut := context.WithCancelCause(context.Background())
	defer cut(nil)
	s.hard = hard
	s.plain.BaseContext = func(net.Listener) context.Context { return hard }
	var web sync.WaitGroup
	web.Go(func() { _ = s.plain.Serve(s.toWeb) }) // ends with toWeb
	watched, over := context.WithCancel(hard)
	web.Go(func() { s.watch(watched) })
	link, err := loop.Listen(tcp, s.take, func(err error) { s.log.Warn("accept", "error", err) })
	if err == nil {
		<-ctx.Done()
		link.Close()
	}
	s.finish(cut)
	over()
	_ = s.plain.Close()
	web.Wait()
	return err
}

// watch interrupts connections whose time for a Hello or a head is over. One
// look at all each second is cheaper than a timer for each.
func (s *Server) watch(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick.C:
			s.mu.Lock()
			for c := range s.clients {
				c.overdue(now)
			}
			s.mu.Unlock()
		}
	}
}

// finish waits for open connections, at most the drain time, then cuts them.
func (s *Server) finish(cut context.CancelCauseFunc) {
	s.mu.Lock()
	s.draining = true
	for c := range s.clients {
		if c.idle {
			c.interrupt()
		}
	}
	s.mu.Unlock()
	s.plain.SetKeepAlivesEnabled(false) // closes those between two requests
	over := make(chan struct{})
	go func() { s.done.Wait(); close(over) }()
	timer := time.NewTimer(s.Drain)
	defer timer.Stop()
	select {
	case <-over:
		return
	case <-timer.C:
	}
	cut(errStops)
	s.mu.Lock()
	for c := range s.clients {
		c.abort()
	}
	s.mu.Unlock()
	<-over
}

// serve runs one connection up to the hand-over to HTTP or its end. met says that
// its Hello was read.
func (s *Server) serve(c *client, met bool) {
	if !met {
		if err := s.greet(c); err != nil {
			s.log.Debug("connection without a session", "from", c.RemoteAddr().String(), "error", err)
			c.Close()
			return
		}
	}
	first, err := c.first()
	if err != nil {
		c.Close()
		return
	}
	c.within(headTimeout)
	switch {
	case first == 0x05: // RFC 1928 3
		c.protocol = "socks5"
		_ = s.socks.ServeConn(c) // closes c; refusals are logged where they arise
	case c.startsWith("CONNECT "):
		c.protocol = "connect"
		s.connect(c)
	default:
		c.protocol = "http"
		c.arrived() // net/http has bounds of its own
		s.toWeb.give(c)
	}
}

// greet reads the Hello.
func (s *Server) greet(c *client) error {
	c.within(helloTimeout)
	hello, sealed, err := s.hellos.read(c.r)
	if err == nil {
		s.admit(c, hello, sealed)
	}
	return err
}

// admit opens a connection's pass and books it. Without a good pass, and beyond
// the limit, the client learns so in its own protocol.
func (s *Server) admit(c *client, hello proxylink.Hello, sealed []byte) {
	c.hello = hello
	var newer bool
	c.pass, newer, c.refused = s.passes.Open(time.Now(), hello.SessionID, sealed)
	if newer {
		s.dismiss(hello.SessionID)
	}
	if c.pass == nil {
		return
	}
	booked, err := s.Meter.Open(hello.SessionID, c.pass.ProjectID)
	if !errors.As(err, &c.refused) {
		c.meter = booked
	}
}

// dismiss ends the connections of a session that wait for their next plain
// request with an older pass: the client makes new ones.
func (s *Server) dismiss(sessionID string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.clients {
		if c.between.Load() && c.hello.SessionID == sessionID && s.passes.Replaced(c.pass) {
			c.interrupt()
		}
	}
}
