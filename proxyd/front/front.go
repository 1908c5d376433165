// Package front is the client side of proxyd: it accepts connections that
// hostd tunnels from machines, speaks HTTP proxy or SOCKS5 with them, and
// relays to what the guard connected.
package front

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/things-go/go-socks5"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

const (
	helloTimeout = 5 * time.Second  // from accept to the end of the Hello
	headTimeout  = 30 * time.Second // from a request's first byte to the end of its head
)

// Dialer makes connections to targets; its error is an *egress.Refusal.
type Dialer interface {
	Dial(ctx context.Context, t egress.Target) (*net.TCPConn, error)
}

// Server serves the proxy link.
type Server struct {
	secret *trust.Secret
	dialer Dialer
	meter  *meter.Meter
	log    *slog.Logger
	drain  time.Duration

	socks *socks5.Server
	plain *http.Server
	toWeb handoff // connections for plain

	mu       sync.Mutex
	draining bool
	clients  map[*client]struct{} // open ones
	done     sync.WaitGroup       // one for each of clients
}

// New makes a server. drain is how long open connections may go on once the
// context of Serve ended.
func New(secret *trust.Secret, dialer Dialer, m *meter.Meter, drain time.Duration, log *slog.Logger) *Server {
	s := &Server{secret: secret, dialer: dialer, meter: m, drain: drain, log: log, clients: map[*client]struct{}{}}
	s.socks = s.newSocks()
	s.plain = s.newPlain()
	s.toWeb = newHandoff()
	return s
}

var accepted = daemon.Counter("berth_proxyd_connections_total")

// Serve accepts from ln until ctx ends, then drains, and closes what is left.
// It returns when every connection is over. Call it once.
func (s *Server) Serve(ctx context.Context, ln net.Listener) error {
	hard, cut := context.WithCancelCause(context.Background())
	defer cut(nil)
	s.plain.BaseContext = func(net.Listener) context.Context { return hard }
	var web sync.WaitGroup
	web.Go(func() { _ = s.plain.Serve(s.toWeb) }) // ends with toWeb
	stop := context.AfterFunc(ctx, func() { ln.Close() })
	defer stop()
	err := s.accept(ctx, hard, ln)
	ln.Close()
	s.finish(cut)
	_ = s.plain.Close()
	web.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return err
}

func (s *Server) accept(ctx, hard context.Context, ln net.Listener) error {
	for {
		conn, err := ln.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return err
			}
			s.log.Warn("accept", "error", err)
			select { // out of descriptors: let some close
			case <-ctx.Done():
			case <-time.After(50 * time.Millisecond):
			}
			continue
		}
		accepted.Inc()
		c := s.add(hard, conn.(*net.TCPConn))
		go s.serve(c)
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
	timer := time.NewTimer(s.drain)
	defer timer.Stop()
	select {
	case <-over:
		return
	case <-timer.C:
	}
	cut(errors.New("proxyd stops"))
	s.mu.Lock()
	for c := range s.clients {
		c.abort()
	}
	s.mu.Unlock()
	<-over
}

// serve runs one connection up to the hand-over to HTTP or its end.
func (s *Server) serve(c *client) {
	if err := s.greet(c); err != nil {
		s.log.Debug("connection without a session", "from", c.RemoteAddr().String(), "error", err)
		c.Close()
		return
	}
	first, err := c.first()
	if err != nil {
		c.Close()
		return
	}
	_ = c.SetReadDeadline(time.Now().Add(headTimeout))
	switch {
	case first == 0x05: // RFC 1928 3
		c.protocol = "socks5"
		_ = s.socks.ServeConn(c) // closes c; refusals are logged where they arise
	case c.startsWith("CONNECT "):
		c.protocol = "connect"
		s.connect(c)
	default:
		c.protocol = "http"
		_ = c.SetReadDeadline(time.Time{})
		s.toWeb.give(c)
	}
}

var errProof = errors.New("wrong proof of the cluster secret")

// greet reads the Hello and books the connection. One too many is booked as
// refused: its client learns that in its own protocol.
func (s *Server) greet(c *client) error {
	_ = c.SetReadDeadline(time.Now().Add(helloTimeout))
	hello, err := proxylink.ReadHello(c.tcp)
	if err != nil {
		return err
	}
	if !s.secret.Check(hello.Proof) {
		return errProof
	}
	c.session = hello.SessionID
	booked, err := s.meter.Open(hello.SessionID, "")
	if !errors.As(err, &c.refused) {
		c.meter = booked
	}
	return nil
}

// connectTo decides on a target and connects. The error is an *egress.Refusal,
// logged already.
func (s *Server) connectTo(c *client, parse func() (egress.Target, *egress.Refusal)) (*net.TCPConn, error) {
	if c.refused != nil {
		return nil, s.refuse(c, "", c.refused)
	}
	target, r := parse()
	if r != nil {
		return nil, s.refuse(c, "", r)
	}
	conn, err := s.dialer.Dial(c.ctx, target)
	if err != nil {
		return nil, s.refuse(c, target.String(), err)
	}
	c.target = target.String()
	return conn, nil
}

// refuse counts and logs a refusal.
func (s *Server) refuse(c *client, target string, err error) *egress.Refusal {
	var r *egress.Refusal
	if !errors.As(err, &r) {
		r = egress.Refuse(egress.UpstreamUnreachable, "the connection failed")
		r.Cause = err
	}
	daemon.Counter(`berth_proxyd_refusals_total{reason="` + string(r.Reason) + `"}`).Inc()
	s.log.Info("refused", "session", c.session, "protocol", c.protocol, "target", target, "reason", string(r.Reason), "detail", r.Error())
	return r
}

// relay carries an accepted connection: what was read ahead, then both ways
// between the bare connections, so that the kernel can splice.
func (s *Server) relay(c *client, upstream *net.TCPConn, ahead []byte) {
	_ = c.tcp.SetDeadline(time.Time{})
	ahead = append(ahead, c.buffered()...)
	if len(ahead) > 0 {
		n, err := upstream.Write(ahead)
		c.meter.Via(egress.None).Up(int64(n))
		if err != nil {
			upstream.Close()
			c.abort()
			return
		}
	}
	c.err = proxylink.Relay(c.ctx, c.tcp, upstream, c.meter.Via(egress.None).Up, c.meter.Via(egress.None).Down)
}
