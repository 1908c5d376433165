package microvm

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/agentlink"
)

// onThread runs f on an OS thread of its own, which f may take into another
// network namespace: the thread ends with it.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked: the runtime ends the thread
		if unix.Gettid() == os.Getpid() {
			// The main thread cannot end. Hold it, so that the next goroutine
			// gets another, and give it back untouched.
			done <- onThread(f)
			runtime.UnlockOSThread()
			return
		}
		done <- f()
	}()
	return <-done
}

// inNamespace runs f on a thread inside the network namespace at path.
func inNamespace(path string, f func() error) error {
	ns, err := os.Open(path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return onThread(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("enter %s: %w", path, err)
		}
		return f()
	})
}

// dialAgent connects to the agent of the guest behind the namespace's tap.
func dialAgent(ctx context.Context, netns string) (net.Conn, error) {
	var conn net.Conn
	err := inNamespace(netns, func() (err error) {
		var d net.Dialer // sets TCP_NODELAY
		conn, err = d.DialContext(ctx, "tcp4", agentAddr)
		return err
	})
	return conn, err
}

var agentAddr = netip.AddrPortFrom(netip.MustParseAddr(agentlink.GuestAddr), agentlink.AgentPort).String()

// openTap opens the slot's tap device, which is there, for one machine.
func openTap(netns string) (*os.File, error) {
	var tap *os.File
	err := inNamespace(netns, func() (err error) {
		if _, err := net.InterfaceByName(agentlink.TapName); err != nil {
			return fmt.Errorf("%s has no %s: %w", netns, agentlink.TapName, err)
		}
		tap, err = attachTap()
		return err
	})
	return tap, err
}

// attachTap opens the tap of the thread's namespace, or makes it for as long
// as the file is open. Its frames have a header for checksum and segmentation
// offload.
func attachTap() (*os.File, error) {
	// Not os.OpenFile: a poller must not see a device that is not attached yet.
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("open /dev/net/tun: %w (load the kernel module tun)", err)
	}
	request, err := unix.NewIfreq(agentlink.TapName)
	if err != nil {
		return nil, errors.Join(err, unix.Close(fd))
	}
	request.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, request); err != nil {
		return nil, errors.Join(fmt.Errorf("attach %s: %w", agentlink.TapName, err), unix.Close(fd))
	}
	return os.NewFile(uintptr(fd), agentlink.TapName), nil
}

// buildNet is the network in which a template is made: a namespace with the
// slot's addresses and nothing beyond, held by its descriptors alone.
type buildNet struct {
	ns  *os.File
	tap *os.File
}

func newBuildNet() (*buildNet, error) {
	n := &buildNet{}
	err := onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare network: %w", err)
		}
		if n.ns, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		if n.tap, err = attachTap(); err != nil {
			return err
		}
		// Whoever asks for the egress listener or the name server is refused at
		// once, as in a slot that belongs to no session yet.
		return errors.Join(address("lo", agentlink.SlotAddr, 32), address(agentlink.TapName, agentlink.TapAddr, 30))
	})
	if err != nil {
		return nil, errors.Join(err, n.Close())
	}
	return n, nil
}

// path names the namespace for this process.
func (n *buildNet) path() string { return fmt.Sprintf("/proc/self/fd/%d", n.ns.Fd()) }

// Close ends the namespace once no machine holds its tap.
func (n *buildNet) Close() error {
	var errs []error
	for _, f := range []*os.File{n.ns, n.tap} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// address gives an interface of the thread's namespace its IPv4 address and
// brings it up; the tap gets its hardware address too (netdevice(7)).
func address(name, addr string, bits int) error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	set := func(request uint, fill func(*unix.Ifreq) error) error {
		r, err := unix.NewIfreq(name)
		if err == nil {
			err = fill(r)
		}
		if err == nil {
			err = unix.IoctlIfreq(fd, request, r)
		}
		if err != nil {
			return fmt.Errorf("set up %s: %w", name, err)
		}
		return nil
	}
	if name == agentlink.TapName {
		if err := setHardwareAddress(fd, name, agentlink.TapMAC); err != nil {
			return err
		}
	}
	ip := netip.MustParseAddr(addr).AsSlice()
	mask := net.CIDRMask(bits, 32)
	if name == "lo" {
		name += ":0" // 127.0.0.1 stays
	}
	return errors.Join(
		set(unix.SIOCSIFADDR, func(r *unix.Ifreq) error { return r.SetInet4Addr(ip) }),
		set(unix.SIOCSIFNETMASK, func(r *unix.Ifreq) error { return r.SetInet4Addr(mask) }),
		set(unix.SIOCSIFFLAGS, func(r *unix.Ifreq) error { r.SetUint16(unix.IFF_UP | unix.IFF_RUNNING); return nil }),
	)
}

// setHardwareAddress is SIOCSIFHWADDR, whose argument x/sys has no setter for.
func setHardwareAddress(fd int, name, mac string) error {
	hw, err := net.ParseMAC(mac)
	if err != nil {
		return err
	}
	request := struct {
		name   [unix.IFNAMSIZ]byte
		family uint16
		addr   [14]byte
		_      [8]byte
	}{family: unix.ARPHRD_ETHER}
	copy(request.name[:], name)
	copy(request.addr[:], hw)
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), unix.SIOCSIFHWADDR, uintptr(unsafe.Pointer(&request))); errno != 0 {
		return fmt.Errorf("hardware address of %s: %w", name, errno)
	}
	return nil
}
