package proxylink

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/proxylink/loop"
)

// What is inside TLS only a copy through a buffer can carry: a goroutine for
// each direction.

const copySize = 32 << 10 // of a buffer

var buffers = sync.Pool{New: func() any { return new([copySize]byte) }}

// copyBoth is Relay where not both connections are bare ones.
func copyBoth(ctx context.Context, a, b HalfCloser, aToB, bToA Counter) error {
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

// pump copies from src to dst until src ends. read and written are told of
// bytes that src gave and dst took.
func pump(dst, src HalfCloser, read, written Counter) error {
	for {
		buf, n, err := fill(src)
		read.Add(n)
		if n > 0 {
			w, failed := dst.Write(buf[:n])
			written.Add(w)
			if failed != nil {
				err = failed
			}
		}
		if buf != nil {
			buffers.Put(buf)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// fill waits for bytes and reads them. From a bare connection it takes a buffer
// only once they are there: most connections of a browser are idle.
func fill(src HalfCloser) (buf *[copySize]byte, n int, err error) {
	tcp, bare := src.(*net.TCPConn)
	if !bare {
		buf = buffers.Get().(*[copySize]byte)
		n, err = src.Read(buf[:])
		return buf, n, err
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return nil, 0, err
	}
	var failed error
	err = raw.Read(func(fd uintptr) bool {
		buf = buffers.Get().(*[copySize]byte)
		if n, failed = loop.Read(int(fd), buf[:]); failed != unix.EAGAIN {
			return true
		}
		buffers.Put(buf)
		buf = nil
		return false
	})
	if err == nil && failed == nil && n == 0 {
		failed = io.EOF
	}
	return buf, n, errors.Join(err, failed)
}

// checkEnd is loop.CheckEnd where src is a bare connection.
func checkEnd(src net.Conn) (err error) {
	if tcp, ok := src.(*net.TCPConn); ok {
		if raw, failed := tcp.SyscallConn(); failed == nil {
			_ = raw.Control(func(fd uintptr) { err = loop.CheckEnd(int(fd)) })
		}
	}
	return err
}

// abort closes c with a reset where the kernel can.
func abort(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	c.Close()
}
