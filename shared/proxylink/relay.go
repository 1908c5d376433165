package proxylink

import (
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// HalfCloser is a connection that can end its own direction: *net.TCPConn,
// *net.UnixConn. Between two bare *net.TCPConn the kernel moves what comes in
// bulk (splice).
type HalfCloser interface {
	net.Conn
	CloseWrite() error
}

// Counter is told of bytes that went one way; nil counts nothing.
type Counter func(n int64)

// Relay copies both ways between a and b until both directions ended, one
// failed, or ctx ended. The end of one direction is passed on as a half-close;
// a failure or the end of ctx resets both, so that nothing lingers in the
// kernel. Connections are never cut for being idle. Both are closed on return.
//
// Counters are told of what passed b, as soon as it did: aToB of what b took,
// bToA of what b gave, also where a did not take it: what lies unread at a reset
// was received all the same.
func Relay(ctx context.Context, a, b HalfCloser, aToB, bToA Counter) error {
	relays.Add(1)
	defer relays.Add(-1)
	interrupt := sync.OnceFunc(func() {
		_ = a.SetDeadline(time.Unix(1, 0))
		_ = b.SetDeadline(time.Unix(1, 0))
	})
	stop := context.AfterFunc(ctx, interrupt)
	defer stop()
	var half atomic.Bool // one direction has ended
	way := func(dst, src HalfCloser, read, written Counter) error {
		err := pump(dst, src, read, written)
		if err == nil && half.CompareAndSwap(false, true) { // of the second one Close does it
			if err = checkEnd(src); err == nil {
				err = dst.CloseWrite()
			}
		}
		if err != nil {
			interrupt()
		}
		return err
	}
	back := make(chan error, 1)
	go func() { back <- way(a, b, bToA, nil) }()
	err := way(b, a, nil, aToB)
	err = verdict(ctx, err, <-back)
	if err == nil {
		a.Close()
		b.Close()
		return nil
	}
	bToA.add(unread(b)) // nobody reads any more
	abort(a)
	abort(b)
	return err
}

// verdict is why a relay ended, nil for an orderly end of both directions. Where
// one failed, the other was interrupted: that is no news.
func verdict(ctx context.Context, one, other error) error {
	switch {
	case one == nil && other == nil:
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case one == nil || errors.Is(one, os.ErrDeadlineExceeded) && other != nil:
		return other
	}
	return one
}

// checkEnd looks whether c, of which nothing was closed here, has ended in good
// order. A reset is told once, to whom the kernel meets first: where that was a
// writer, a reader sees a plain end, and would pass half a message on as whole.
func checkEnd(c net.Conn) error {
	state := uint8(unix.BPF_TCP_CLOSE_WAIT)
	control(c, func(fd int) {
		if info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			state = info.State
		}
	})
	if state == unix.BPF_TCP_CLOSE {
		return syscall.ECONNRESET
	}
	return nil
}

// unread is how many bytes wait in c's receive queue.
func unread(c net.Conn) (n int) {
	control(c, func(fd int) { n, _ = unix.IoctlGetInt(fd, unix.SIOCINQ) })
	return n
}

// control gives f the descriptor of a bare TCP connection; other ones have none.
func control(c net.Conn, f func(fd int)) {
	if t, ok := c.(*net.TCPConn); ok {
		if raw, err := t.SyscallConn(); err == nil {
			_ = raw.Control(func(fd uintptr) { f(int(fd)) })
		}
	}
}

// abort closes c with a reset where the kernel can.
func abort(c net.Conn) {
	if t, ok := c.(interface{ SetLinger(int) error }); ok {
		_ = t.SetLinger(0)
	}
	c.Close()
}
