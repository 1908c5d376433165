package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/agentlink"
)

// Both ends of every link have fixed hardware addresses and know each other's
// by permanent entries: there is no ARP on the wire, and a machine's memory
// that knows its gateway fits any slot.
var (
	gatewayMAC = net.HardwareAddr{0x02, 0xbe, 0x27, 0, 0, 1}
	slotMAC    = net.HardwareAddr{0x02, 0xbe, 0x27, 0, 0, 2}
	// gatewayAddr is where the slot's default route points. Nobody has it: the
	// host needs no address on the link, so there is none to reach.
	gatewayAddr = netip.MustParseAddr("169.254.77.2")
)

// inside sets up links, addresses and settings of the namespace that the
// thread is in.
func (n *Network) inside(info machine.Slot) error {
	lastGID := info.UIDBase + uidRange - 1
	settings := [][2]string{
		// eth0 has no IPv6, so none leaves; ::1 works.
		{"net/ipv6/conf/default/disable_ipv6", "1"},
		// ping without privileges, for the machine's groups.
		{"net/ipv4/ping_group_range", fmt.Sprintf("%d %d", info.UIDBase, lastGID)},
		// A server on port 80 or 443 without privileges (root inside has none over
		// this namespace); the forwarder's port 53 stays out of reach.
		{"net/ipv4/ip_unprivileged_port_start", "80"},
	}
	for _, s := range settings {
		if err := writeSysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("lo: %w", err)
	}
	if err := addAddr(lo, netip.MustParseAddr(agentlink.SlotAddr)); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("lo up: %w", err)
	}
	if err := n.eth0(info); err != nil || !n.cfg.Tap {
		return err
	}
	return tap()
}

func (n *Network) eth0(info machine.Slot) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.HardwareAddr = "eth0", slotMAC
	veth := &netlink.Veth{LinkAttrs: attrs, PeerName: info.Name, PeerHardwareAddr: gatewayMAC,
		PeerNamespace: netlink.NsFd(int(n.host.Fd()))}
	if err := netlink.LinkAdd(veth); err != nil {
		return fmt.Errorf("add link %s: %w", info.Name, err)
	}
	eth0, err := netlink.LinkByName("eth0")
	if err != nil {
		return fmt.Errorf("eth0: %w", err)
	}
	if err := addAddr(eth0, n.addr(info.Index)); err != nil {
		return err
	}
	if err := netlink.LinkSetUp(eth0); err != nil {
		return fmt.Errorf("eth0 up: %w", err)
	}
	if err := addNeigh(eth0, gatewayAddr, gatewayMAC); err != nil {
		return err
	}
	gw := gatewayAddr.AsSlice()
	err = netlink.RouteAdd(&netlink.Route{LinkIndex: eth0.Attrs().Index, Gw: gw, Flags: int(netlink.FLAG_ONLINK)})
	if err != nil {
		return fmt.Errorf("default route: %w", err)
	}
	return nil
}

// outside sets up the host's end of the link.
func (n *Network) outside(info machine.Slot) error {
	link, err := netlink.LinkByName(info.Name)
	if err != nil {
		return fmt.Errorf("link %s: %w", info.Name, err)
	}
	for _, s := range [][2]string{
		{"net/ipv6/conf/" + info.Name + "/disable_ipv6", "1"},
		{"net/ipv4/conf/" + info.Name + "/rp_filter", "1"}, // only the slot's own address comes in
	} {
		if err := writeSysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	if err := netlink.LinkSetUp(link); err != nil {
		return fmt.Errorf("%s up: %w", info.Name, err)
	}
	addr := n.addr(info.Index)
	if err := addNeigh(link, addr, slotMAC); err != nil {
		return err
	}
	err = netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Scope: unix.RT_SCOPE_LINK, Dst: host32(addr)})
	if err != nil {
		return fmt.Errorf("route to %s: %w", addr, err)
	}
	return nil
}

func host32(addr netip.Addr) *net.IPNet {
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(32, 32)}
}

func addAddr(link netlink.Link, addr netip.Addr) error {
	if err := netlink.AddrAdd(link, &netlink.Addr{IPNet: host32(addr)}); err != nil {
		return fmt.Errorf("add %s to %s: %w", addr, link.Attrs().Name, err)
	}
	return nil
}

func addNeigh(link netlink.Link, addr netip.Addr, mac net.HardwareAddr) error {
	err := netlink.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, Family: unix.AF_INET,
		State: netlink.NUD_PERMANENT, IP: addr.AsSlice(), HardwareAddr: mac})
	if err != nil {
		return fmt.Errorf("neighbour %s on %s: %w", addr, link.Attrs().Name, err)
	}
	return nil
}

// checkLink says whether the host's end of a slot's link is there.
func checkLink(name string) error {
	if _, err := netlink.LinkByName(name); err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	return nil
}

// removeLink removes the host's end, and so both, with its routes.
func removeLink(name string) error {
	link, err := netlink.LinkByName(name)
	if errors.As(err, &netlink.LinkNotFoundError{}) {
		return nil
	}
	if err == nil {
		err = netlink.LinkDel(link)
	}
	if err != nil && !errors.Is(err, syscall.ENODEV) { // gone since: its namespace ended
		return fmt.Errorf("remove link %s: %w", name, err)
	}
	return nil
}

// forgetConnections drops what the host tracks of connections from addr, so
// that late answers cannot find the slot that gets the address next.
func forgetConnections(addr netip.Addr) error {
	filter := &netlink.ConntrackFilter{}
	if err := filter.AddIP(netlink.ConntrackOrigSrcIP, addr.AsSlice()); err != nil {
		return err
	}
	if _, err := netlink.ConntrackDeleteFilters(netlink.ConntrackTable, unix.AF_INET, filter); err != nil {
		return fmt.Errorf("forget connections of %s: %w", addr, err)
	}
	return nil
}

// Sysctls are those of the thread's namespace: the kernel looks at who opens.
func writeSysctl(name, value string) error {
	return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0o644)
}

func readSysctl(name string) (string, error) {
	b, err := os.ReadFile(filepath.Join("/proc/sys", name))
	return strings.TrimSpace(string(b)), err
}
