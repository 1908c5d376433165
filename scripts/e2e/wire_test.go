package e2e

import (
	"context"
	"encoding/binary"
	"fmt"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/agentlink"
)

// wire watches all interfaces of a slot, loopback too, and keeps who sent what
// to whom, but for what Chrome may do: TCP to the egress listener, and what stays
// on loopback, where the machine is by itself. There quicPort is for QUIC alone.
type wire struct {
	fd   int
	mark string
	over chan struct{} // closed at the first packet that contains mark

	mu            sync.Mutex
	seen, refused map[string]int // guarded by mu: packets by their description; those that the slot's rules answered
}

const allProtocols = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // network byte order

func watch(t *testing.T, env *testenv.Env, slot, mark string) *wire {
	t.Helper()
	w := &wire{mark: mark, over: make(chan struct{}), seen: map[string]int{}, refused: map[string]int{}}
	tick := unix.Timeval{Usec: 50_000}
	env.InSlot(t, slot, func() (err error) { // of no interface: all of them
		if w.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, allProtocols); err != nil {
			return err
		}
		if err = unix.SetsockoptInt(w.fd, unix.SOL_SOCKET, unix.SO_RCVBUFFORCE, 64<<20); err != nil {
			return err
		}
		return unix.SetsockoptTimeval(w.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &tick)
	})
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); w.read(ctx) }()
	t.Cleanup(func() { stop(); <-done; unix.Close(w.fd) })
	return w
}

func (w *wire) read(ctx context.Context) {
	buf := make([]byte, 1<<17)
	for ctx.Err() == nil {
		n, from, err := unix.Recvfrom(w.fd, buf, 0)
		if err != nil {
			continue
		}
		packet := buf[:n]
		if strings.Contains(string(packet), w.mark) {
			close(w.over)
			return
		}
		w.note(packet, from.(*unix.SockaddrLinklayer))
	}
}

func (w *wire) note(packet []byte, at *unix.SockaddrLinklayer) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if at.Pkttype == unix.PACKET_OUTGOING && at.Ifindex == loopback {
		return // it comes in as well
	}
	if what := answered(packet, at); what != "" {
		w.refused[what]++
	} else if what := describe(packet, at); what != "" {
		w.seen[what]++
	}
}

// none fails when anything was seen up to the mark, or some packets were not. It
// gives what the slot's rules refused.
func (w *wire) none(t *testing.T) []string {
	t.Helper()
	select {
	case <-w.over:
	case <-time.After(20 * time.Second):
		t.Fatalf("the mark %q never crossed the wire", w.mark)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, what := range slices.Sorted(maps.Keys(w.seen)) {
		t.Errorf("on the wire: %d packets: %s", w.seen[what], what)
	}
	stats, err := unix.GetsockoptTpacketStats(w.fd, unix.SOL_PACKET, unix.PACKET_STATISTICS)
	if err != nil || stats.Drops > 0 {
		t.Errorf("the watch missed packets: %+v %v", stats, err)
	}
	return slices.Sorted(maps.Keys(w.refused))
}

// loopback is a namespace's first interface.
const loopback = 1

// answered names the packet that the slot's rules refuse with this one, a reset
// or an ICMP error (RFC 792); "" is for others.
func answered(p []byte, at *unix.SockaddrLinklayer) string {
	proto, src, dst, rest := layers(at.Protocol>>8|at.Protocol<<8, p)
	switch {
	case at.Ifindex != loopback || !src.IsValid() || src == listener || dst == listener:
		return ""
	case proto == unix.IPPROTO_TCP && len(rest) > 13 && rest[13]&4 != 0 && !src.Addr().IsLoopback():
		return fmt.Sprintf("TCP to %s", src)
	case (proto == unix.IPPROTO_ICMP && len(rest) > 8 && rest[0] == 3) || (proto == unix.IPPROTO_ICMPV6 && len(rest) > 8 && rest[0] == 1):
		kind := uint16(unix.ETH_P_IP)
		if proto == unix.IPPROTO_ICMPV6 {
			kind = unix.ETH_P_IPV6
		}
		of, _, to, _ := layers(kind, rest[8:])
		if to.Addr().IsLoopback() { // nobody listens there, which the kernel says
			return ""
		}
		return fmt.Sprintf("IP protocol %d to %s", of, to)
	}
	return ""
}

var listener = netip.AddrPortFrom(netip.MustParseAddr(agentlink.SlotAddr), agentlink.EgressPort)

// describe names a packet that is none of those Chrome may send or get; "" is
// for one that is.
func describe(p []byte, at *unix.SockaddrLinklayer) string {
	kind := at.Protocol>>8 | at.Protocol<<8
	proto, src, dst, _ := layers(kind, p)
	if !src.IsValid() {
		return fmt.Sprintf("protocol %#x on interface %d", kind, at.Ifindex)
	}
	local := at.Ifindex == loopback
	switch {
	case local && src.Addr().IsLoopback() && dst.Addr().IsLoopback() && dst.Port() != quicPort:
		return ""
	case local && proto == unix.IPPROTO_TCP && (src == listener || dst == listener):
		return ""
	}
	return fmt.Sprintf("IP protocol %d from %s to %s on interface %d", proto, src, dst, at.Ifindex)
}

// layers takes an IPv4 or IPv6 packet apart; the addresses of others are not valid.
func layers(kind uint16, p []byte) (proto byte, src, dst netip.AddrPort, rest []byte) {
	var from, to netip.Addr
	switch {
	case kind == unix.ETH_P_IP && len(p) >= 20:
		from, to = netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
		proto, rest = p[9], p[min(len(p), int(p[0]&15)*4):]
	case kind == unix.ETH_P_IPV6 && len(p) >= 40:
		from, to = netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
		proto, rest = p[6], p[40:]
	default:
		return 0, src, dst, nil
	}
	var ports [2]uint16
	if (proto == unix.IPPROTO_TCP || proto == unix.IPPROTO_UDP) && len(rest) >= 4 {
		ports = [2]uint16{binary.BigEndian.Uint16(rest), binary.BigEndian.Uint16(rest[2:])}
	}
	return proto, netip.AddrPortFrom(from, ports[0]), netip.AddrPortFrom(to, ports[1]), rest
}
