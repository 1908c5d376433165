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
// to whom, but for what Chrome may do: TCP to the egress listener and, within the
// machine, over loopback.
type wire struct {
	fd   int
	mark string
	over chan struct{} // closed at the first packet that contains mark

	mu   sync.Mutex
	seen map[string]int // guarded by mu: packets by their description
}

const allProtocols = unix.ETH_P_ALL<<8&0xff00 | unix.ETH_P_ALL>>8 // network byte order

func watch(t *testing.T, env *testenv.Env, slot, mark string) *wire {
	t.Helper()
	w := &wire{mark: mark, over: make(chan struct{}), seen: map[string]int{}}
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
		if what := describe(packet, from.(*unix.SockaddrLinklayer)); what != "" {
			w.mu.Lock()
			w.seen[what]++
			w.mu.Unlock()
		}
	}
}

// none fails when anything was seen up to the mark, or some packets were not.
func (w *wire) none(t *testing.T) {
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
}

var listener = netip.AddrPortFrom(netip.MustParseAddr(agentlink.SlotAddr), agentlink.EgressPort)

// describe names a packet that is none of those Chrome may send or get; "" is
// for one that is.
func describe(p []byte, at *unix.SockaddrLinklayer) string {
	kind := at.Protocol>>8 | at.Protocol<<8
	proto, src, dst, rest := layers(kind, p)
	if !src.IsValid() {
		return fmt.Sprintf("protocol %#x on interface %d", kind, at.Ifindex)
	}
	local := at.Ifindex == 1 // a namespace's first interface is its loopback
	switch {
	case proto == unix.IPPROTO_TCP && local && src.Addr().IsLoopback() && dst.Addr().IsLoopback():
		return ""
	case proto == unix.IPPROTO_TCP && local && (src == listener || dst == listener):
		return ""
	case proto == unix.IPPROTO_TCP && local && len(rest) > 13 && rest[13]&4 != 0: // the rules' RST
		return ""
	case proto == unix.IPPROTO_ICMP && local && len(rest) > 1 && rest[0] == 3: // and their "unreachable" (RFC 792)
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
