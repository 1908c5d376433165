package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/agentlink"
)

// tapFlags are how the tap device is made, and how a driver opens it for its
// machine: Ethernet frames, each after a virtio_net_hdr.
const tapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

// tap makes the device that a machine with a kernel of its own is behind, in
// the namespace that the thread is in. It stays when no machine has it open, and
// one at a time may. There is no ARP on it, so the guest can claim no address;
// the neighbour entry is permanent.
func tap() error {
	mac, err := net.ParseMAC(agentlink.TapMAC)
	if err != nil {
		return err
	}
	guest, err := net.ParseMAC(agentlink.GuestMAC)
	if err != nil {
		return err
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = agentlink.TapName
	device := &netlink.Tuntap{LinkAttrs: attrs, Mode: netlink.TUNTAP_MODE_TAP, Flags: tapFlags}
	if err := netlink.LinkAdd(device); err != nil {
		return fmt.Errorf("add %s: %w", agentlink.TapName, err)
	}
	for _, f := range device.Fds {
		f.Close()
	}
	link, err := netlink.LinkByName(agentlink.TapName)
	if err != nil {
		return fmt.Errorf("%s: %w", agentlink.TapName, err)
	}
	guestAddr := netip.MustParseAddr(agentlink.GuestAddr)
	for _, do := range []func() error{
		func() error { return netlink.LinkSetHardwareAddr(link, mac) },
		func() error { return netlink.LinkSetARPOff(link) },
		func() error { return addAddr(link, netip.MustParseAddr(agentlink.TapAddr)) },
		func() error { return netlink.LinkSetUp(link) },
		func() error { return addNeigh(link, guestAddr, guest) },
		func() error {
			return netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Scope: unix.RT_SCOPE_LINK, Dst: host32(guestAddr)})
		},
	} {
		if err := do(); err != nil {
			return fmt.Errorf("set up %s: %w", agentlink.TapName, err)
		}
	}
	// The guest's packets cross the slot; only its own address comes in.
	return errors.Join(writeSysctl("net/ipv4/ip_forward", "1"),
		writeSysctl("net/ipv4/conf/"+agentlink.TapName+"/rp_filter", "1"))
}

// checkTap says whether the slot that the thread is in has a tap device or
// none, as the configuration wants.
func (n *Network) checkTap() error {
	_, err := netlink.LinkByName(agentlink.TapName)
	switch missing := errors.As(err, &netlink.LinkNotFoundError{}); {
	case err != nil && !missing:
		return fmt.Errorf("%s: %w", agentlink.TapName, err)
	case missing == n.cfg.Tap:
		return fmt.Errorf("it was made for another kind of driver: tap device %t, wanted %t", !missing, n.cfg.Tap)
	}
	return nil
}
