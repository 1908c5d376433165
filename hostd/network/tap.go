package network

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/agentlink"
)

// tapFlags are how the tap device is made and opened: Ethernet frames, each
// after a virtio_net_hdr.
const tapFlags = unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR

// OpenTap opens the guest's end of a slot's tap device, for a driver to hand
// to its machine: what is written to the file arrives at the slot as if from
// the guest's network card. It has one end, so a second call fails with EBUSY
// until the first file and all its copies are closed. It needs no Network: the
// slot's namespace says everything. The slot must have been made with
// Config.Tap.
func OpenTap(slot machine.Slot) (*os.File, error) {
	ns, err := os.Open(slot.NetNS)
	if err != nil {
		return nil, fmt.Errorf("open tap: %w", err)
	}
	defer ns.Close()
	type result struct {
		file *os.File
		err  error
	}
	done := make(chan result, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			done <- result{nil, fmt.Errorf("enter %s: %w", slot.NetNS, err)}
			return
		}
		f, err := attachTap(agentlink.TapName)
		done <- result{f, err}
	}()
	r := <-done
	if r.err != nil {
		return nil, fmt.Errorf("open tap of %s: %w", slot.Name, r.err)
	}
	return r.file, nil
}

// attachTap opens the device of that name in the thread's namespace, which has
// to exist: TUNSETIFF would make another.
func attachTap(name string) (*os.File, error) {
	if _, err := net.InterfaceByName(name); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("/dev/net/tun: %w", err)
	}
	request, err := unix.NewIfreq(name)
	if err == nil {
		request.SetUint16(tapFlags)
		err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
	}
	if err != nil {
		unix.Close(fd)
		return nil, fmt.Errorf("attach to %s: %w", name, err)
	}
	return os.NewFile(uintptr(fd), "tap"), nil
}

// tap makes the device that a machine with a kernel of its own is behind, in
// the namespace that the thread is in. There is no ARP on it, so the guest can
// claim no address; the neighbour entry is permanent.
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
