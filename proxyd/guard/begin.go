package guard

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/egress"
)

// ErrWait says that Begin cannot be used for a target: Dial can.
var ErrWait = errors.New("not without waiting")

// Begin is the first half of Dial for a literal address, without waiting: a
// socket that does not block and is connecting. Connected says how that went.
// Where err is not nil Dial is to be asked, which says why.
func (g *Guard) Begin(t egress.Target) (fd int, err error) {
	if t.Name != "" || t.CheckPort() != nil || !g.policy.Permits(t.Addr) {
		return -1, ErrWait
	}
	family := unix.AF_INET6
	if t.Addr.Is4() {
		family = unix.AF_INET
	}
	fd, err = unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	err = errors.Join(unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1),
		unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_KEEPALIVE, 1),
		unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_KEEPIDLE, int(keepAlive.Idle.Seconds())))
	if err == nil {
		err = connect(fd, t)
	}
	if err != nil {
		unix.Close(fd)
		return -1, err
	}
	return fd, nil
}

// connect begins to connect.
func connect(fd int, t egress.Target) error {
	var to unix.Sockaddr = &unix.SockaddrInet6{Port: int(t.Port), Addr: t.Addr.As16()}
	if t.Addr.Is4() {
		to = &unix.SockaddrInet4{Port: int(t.Port), Addr: t.Addr.As4()}
	}
	if err := unix.Connect(fd, to); err != nil && !errors.Is(err, unix.EINPROGRESS) {
		return err
	}
	if t.Port >= firstOwn && ownAddress(fd) == netip.AddrPortFrom(t.Addr, t.Port) {
		return ErrWait // a socket of this computer may connect to itself where nobody listens; net.Dialer tries again
	}
	return nil
}

// firstOwn is the first port that the kernel gives to those who connect.
const firstOwn = 1024

func ownAddress(fd int) netip.AddrPort {
	own, err := unix.Getsockname(fd)
	if err != nil {
		return netip.AddrPort{}
	}
	switch at := own.(type) {
	case *unix.SockaddrInet4:
		return netip.AddrPortFrom(netip.AddrFrom4(at.Addr), uint16(at.Port))
	case *unix.SockaddrInet6:
		return netip.AddrPortFrom(netip.AddrFrom16(at.Addr), uint16(at.Port))
	}
	return netip.AddrPort{}
}

// Connected gives the refusal of a Begin that failed, nil where it did not.
func (g *Guard) Connected(fd int, t egress.Target) *egress.Refusal {
	code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
	if err == nil && code == 0 {
		return nil
	}
	if err == nil {
		err = syscall.Errno(code)
	}
	return failed(t, os.NewSyscallError("connect", err))
}

// Late is the refusal of a Begin that took DialTimeout.
func (g *Guard) Late(t egress.Target) *egress.Refusal { return failed(t, os.ErrDeadlineExceeded) }

func failed(t egress.Target, err error) *egress.Refusal {
	r := refusal(t, err)
	r.Cause = &net.OpError{Op: "dial", Net: "tcp", Err: err}
	return r
}
