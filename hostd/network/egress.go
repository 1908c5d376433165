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
			reset(conn)
		}
	}
}

// tunnel carries one connection of the machine to proxyd.
func (s *Slot) tunnel(ctx context.Context, conn *net.TCPConn) {
	dial := s.egress.Load()
	if dial == nil {
		reset(conn)
		return
	}
	dctx, cancel := context.WithTimeout(ctx, dialTimeout)
	proxy, err := (*dial)(dctx)
	cancel()
	if err != nil {
		egressFailed.Inc()
		s.net.log.Warn("no way to proxyd", "slot", s.info.Index, "port", strconv.Itoa(agentlink.EgressPort), "error", err)
		reset(conn)
		return
	}
	half, ok := proxy.(proxylink.HalfCloser)
	if !ok { // a programming error of the caller, not of the machine
		s.net.log.Error("egress connection cannot half-close", "type", fmt.Sprintf("%T", proxy))
		proxy.Close()
		reset(conn)
		return
	}
	_ = proxylink.Relay(ctx, conn, half, nil, nil) // how a connection ended is proxyd's to log
}

// reset closes with RST: the client sees at once that nobody serves it.
func reset(conn *net.TCPConn) {
	_ = conn.SetLinger(0)
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
