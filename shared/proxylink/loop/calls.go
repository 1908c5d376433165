package loop

import (
	"encoding/binary"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// System calls of a loop. None of them waits, but for poll, so the scheduler
// need not be told of them: that costs more than some of them do.

const edge = 1 << 31 // EPOLLET, which package syscall has as a negative number

// newBell makes an eventfd.
func newBell() (int, error) { return unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK) }

// ring makes an eventfd's edge.
func ring(bell int) {
	var one [8]byte
	binary.NativeEndian.PutUint64(one[:], 1)
	_, _ = Write(bell, one[:]) // it cannot be full
}

// poll waits for events, ms long; an interrupted wait gives none.
func poll(ep int, events []syscall.EpollEvent, ms int) int {
	call := syscall.Syscall6
	if ms == 0 {
		call = syscall.RawSyscall6
	}
	n, _, errno := call(syscall.SYS_EPOLL_PWAIT, uintptr(ep), uintptr(unsafe.Pointer(&events[0])), uintptr(len(events)), uintptr(ms), 0, 0)
	if errno != 0 {
		return 0
	}
	return int(n)
}

func control(ep, op, fd int, events uint32, use int32) error {
	e := syscall.EpollEvent{Events: events, Fd: int32(fd), Pad: use}
	_, _, errno := syscall.RawSyscall6(syscall.SYS_EPOLL_CTL, uintptr(ep), uintptr(op), uintptr(fd), uintptr(unsafe.Pointer(&e)), 0, 0)
	if errno != 0 {
		return errno
	}
	return nil
}

// Read reads what is there; syscall.EAGAIN: nothing, 0 without an error: the end.
func Read(fd int, b []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_READ, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return result(n, errno)
}

// Write writes what there is room for; syscall.EAGAIN: none.
func Write(fd int, b []byte) (int, error) {
	n, _, errno := syscall.RawSyscall(syscall.SYS_WRITE, uintptr(fd), uintptr(unsafe.Pointer(&b[0])), uintptr(len(b)))
	return result(n, errno)
}

// result is a call's. Sockets that do not block are never interrupted.
func result(n uintptr, errno syscall.Errno) (int, error) {
	switch errno {
	case 0:
		return int(n), nil
	case syscall.EAGAIN: // the constant: an error made of a number is memory
		return 0, syscall.EAGAIN
	}
	return 0, errno
}

const spliceFlags = 1 | 2 // SPLICE_F_MOVE, SPLICE_F_NONBLOCK

// splice moves up to n bytes from one descriptor to another, one of which is a
// pipe's.
func splice(from, to, n int) (int, error) {
	return raw(syscall.SYS_SPLICE, uintptr(from), 0, uintptr(to), 0, uintptr(n), spliceFlags)
}

func accept(fd int) (int, error) {
	return raw(syscall.SYS_ACCEPT4, uintptr(fd), 0, 0, syscall.SOCK_NONBLOCK|syscall.SOCK_CLOEXEC, 0, 0)
}

// shutdown ends fd's sending.
func shutdown(fd int) error {
	_, err := raw(syscall.SYS_SHUTDOWN, uintptr(fd), syscall.SHUT_WR, 0, 0, 0, 0)
	return err
}

// closeFD closes a socket: what it still has to send goes out all the same.
func closeFD(fd int) { _, _ = raw(syscall.SYS_CLOSE, uintptr(fd), 0, 0, 0, 0, 0) }

// reset makes the closing of fd a reset.
func reset(fd int) {
	_ = unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
}

// raw is a call without pointers. Go's handlers of signals restart what they
// interrupt.
func raw(trap, a, b, c, d, e, f uintptr) (int, error) {
	n, _, errno := syscall.RawSyscall6(trap, a, b, c, d, e, f)
	return result(n, errno)
}

// CheckEnd looks whether a socket, of which nothing was closed here, has ended
// in good order. A reset is told once, to whom the kernel meets first: where
// that was a writer, a reader sees a plain end, and would pass half a message on
// as whole.
func CheckEnd(fd int) error {
	var info [1]byte // tcpi_state is the first
	size := uint32(len(info))
	_, _, errno := syscall.RawSyscall6(syscall.SYS_GETSOCKOPT, uintptr(fd), syscall.IPPROTO_TCP, syscall.TCP_INFO,
		uintptr(unsafe.Pointer(&info[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno == 0 && info[0] == unix.BPF_TCP_CLOSE {
		return syscall.ECONNRESET
	}
	return nil
}

// unread is how many bytes wait in fd's receive queue.
func unread(fd int) int64 {
	n, _ := unix.IoctlGetInt(fd, unix.SIOCINQ)
	return int64(n)
}
