package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// dialTimeout bounds the way to proxyd: DialEgress may wait out its restart.
const dialTimeout = 30 * time.Second

// maxEgress bounds open egress connections of one slot: those proxyd serves
// and some to which it can still say that they are too many.
const maxEgress = egress.MaxConnections + 64

var egressFailed = daemon.Counter("berth_hostd_egress_dial_failures_total")

// sockets are what hostd listens on inside a slot.
type sockets struct {
	egress *net.TCPListener
	dnsTCP *net.TCPListener
	dnsUDP *net.UDPConn
}

// listen opens all sockets in the namespace of the calling thread.
func listen() (s *sockets, err error) {
	s = &sockets{}
	defer func() {
		if err != nil {
			s.close()
			s = nil
		}
	}()
	ip := net.ParseIP(agentlink.SlotAddr)
	if s.egress, err = net.ListenTCP("tcp4", &net.TCPAddr{IP: ip, Port: agentlink.EgressPort}); err != nil {
		return s, fmt.Errorf("egress listener: %w", err)
	}
	if s.dnsTCP, err = net.ListenTCP("tcp4", &net.TCPAddr{IP: ip, Port: agentlink.DNSPort}); err != nil {
		return s, fmt.Errorf("dns listener: %w", err)
	}
	if s.dnsUDP, err = net.ListenUDP("udp4", &net.UDPAddr{IP: ip, Port: agentlink.DNSPort}); err != nil {
		return s, fmt.Errorf("dns socket: %w", err)
	}
	return s, nil
}

func (s *sockets) close() {
	if s == nil {
		return
	}
	if s.egress != nil {
		s.egress.Close()
	}
	if s.dnsTCP != nil {
		s.dnsTCP.Close()
	}
	if s.dnsUDP != nil {
		s.dnsUDP.Close()
	}
}

// start serves the slot's sockets until ctx ends; s.served counts every
// goroutine.
func (s *Slot) start(ctx context.Context, socks *sockets) {
	stop := context.AfterFunc(ctx, socks.close)
	s.served.Go(func() {
		s.acceptAll(ctx, socks.egress, maxEgress, s.tunnel)
		stop()
		socks.close()
	})
	s.served.Go(func() { s.acceptAll(ctx, socks.dnsTCP, maxDNS, s.net.relayDNS) })
	s.served.Go(func() { s.serveDNS(ctx, socks.dnsUDP) })
}

// acceptAll runs serve for each connection, at most limit at once; further
// ones are reset at once.
func (s *Slot) acceptAll(ctx context.Context, ln *net.TCPListener, limit int, serve func(context.Context, *net.TCPConn)) {
	free := make(chan struct{}, limit)
	for {
		conn, err := ln.AcceptTCP()
		if err != nil {
			if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
				return
			}
			s.net.log.Warn("accept in slot", "slot", s.info.Index, "listener", ln.Addr().String(), "error", err)
			pause(ctx, 50*time.Millisecond) // out of descriptors: let some close
			continue
		}
		select {
		case free <- struct{}{}:
			s.served.Go(func() {
				defer func() { <-free }()
				serve(ctx, conn)
			})
		default:
			abort(conn)
		}
	}
}

// tunnel carries one connection of the machine to proxyd. Which proxyd, and with
// which pass, is decided when the client says something: browsers connect ahead
// of need, and what comes later shall go by what holds then.
func (s *Slot) tunnel(ctx context.Context, conn *net.TCPConn) {
	if s.egress.Load() == nil {
		abort(conn)
		return
	}
	buf := heads.Get().(*[2 * headSize]byte)
	proxy := s.begin(ctx, conn, buf)
	heads.Put(buf)
	if proxy != nil {
		_ = proxylink.Relay(ctx, conn, proxy, nil, nil) // how a connection ended is proxyd's to log
	}
}

// begin carries the first bytes of a connection; nil when it came to nothing and
// is closed.
func (s *Slot) begin(ctx context.Context, conn *net.TCPConn, buf *[2 * headSize]byte) proxylink.HalfCloser {
	n, err := first(ctx, conn, buf[:headSize])
	if err != nil { // the client left without a word, or the slot closes
		conn.Close()
		return nil
	}
	proxy, answer, err := s.introduce(ctx, buf[:n], buf[headSize:])
	if err != nil {
		egressFailed.Inc()
		s.net.log.Warn("no way to proxyd", "slot", s.info.Index, "port", strconv.Itoa(agentlink.EgressPort), "error", err)
		abort(conn)
		return nil
	}
	if len(answer) > 0 {
		if _, err := conn.Write(answer); err != nil {
			abort(conn)
			abort(proxy)
			return nil
		}
	}
	return proxy
}

// abort closes with RST: the other end sees at once that nobody serves it.
func abort(conn net.Conn) {
	if tcp, ok := conn.(interface{ SetLinger(int) error }); ok {
		_ = tcp.SetLinger(0)
	}
	conn.Close()
}

func pause(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}
