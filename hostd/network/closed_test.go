package network

import (
	"fmt"
	"net/netip"
	"testing"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/egress"
)

// closedAddrs are two addresses of each network of egress.NonPublic that is
// IPv4, beside those that clouds keep for themselves.
func closedAddrs() []netip.Addr {
	addrs := []netip.Addr{netip.MustParseAddr("100.100.100.200"), netip.MustParseAddr("192.0.0.192"), netip.MustParseAddr("169.254.169.254")}
	for _, p := range only4(egress.NonPublic) {
		first := p.Addr().As4()
		last := first
		for bit := p.Bits(); bit < 32; bit++ {
			last[bit/8] |= 1 << (7 - bit%8)
		}
		last[3]-- // the very last is a broadcast address here and there
		addrs = append(addrs, netip.AddrFrom4(first).Next(), netip.AddrFrom4(last))
	}
	return addrs
}

// The slot's rules refuse every address that is not public, at once, to the
// shell and to root, whatever protocol; Chrome does not reach them either.
func TestRulesRefuseAllThatIsNotPublic(t *testing.T) {
	n := openNet(t, nil)
	newWeb(t, n, echoPort)
	s := makeSlot(t, n)
	frames := watch(t, s.Info().Name)
	loopback := netip.MustParsePrefix("127.0.0.0/8")
	want := map[string]string{}
	for _, addr := range closedAddrs() {
		if loopback.Contains(addr) || addr.String() == agentlink.SlotAddr { // the machine's own
			continue
		}
		for _, port := range []int{80, echoPort} {
			want[fmt.Sprintf("tcp=%s:%d", addr, port)] = "no"
			want[fmt.Sprintf("udp=%s:%d", addr, port)] = "no"
		}
	}
	for _, addr := range []string{"2606:4700::1111", "fd00:ec2::254", "fe80::1%eth0", "64:ff9b::a9fe:a9fe", "2002:a9fe:a9fe::1", "2001:db8::1"} {
		want["tcp=["+addr+"]:80"], want["udp=["+addr+"]:80"] = "no", "no"
	}
	// In IPv6 form it is the same address.
	want["tcp=[::ffff:169.254.169.254]:80"] = "no"
	for _, gid := range []uint32{agentlink.UserGID, agentlink.BrowserGID, 0} {
		expect(t, s, gid, want)
	}
	expect(t, s, agentlink.UserGID, map[string]string{"mark=" + webAddr + ":4007": "ok"})
	for _, f := range frames.until(t, "MARK-ON-THE-WIRE") {
		t.Errorf("a frame left the slot: %x", f)
	}
}
