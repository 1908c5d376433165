package proxylink

import (
	"context"
	"io"
	"net"
	"sync"
)

// relayChunk is how many bytes go between two calls of a counter. Bounding a
// copy with io.LimitReader keeps Go's splice between two *net.TCPConn.
const relayChunk = 4 << 20

// HalfCloser is a connection that can end its own direction: *net.TCPConn,
// *net.UnixConn. Two bare ones of these are relayed by the kernel (splice).
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
func Relay(ctx context.Context, a, b HalfCloser, aToB, bToA Counter) error {
	reset := sync.OnceFunc(func() { abort(a); abort(b) })
	stop := context.AfterFunc(ctx, reset)
	defer stop()
	var other error
	done := make(chan struct{})
	go func() {
		defer close(done)
		if other = pump(a, b, bToA); other != nil {
			reset()
		}
	}()
	err := pump(b, a, aToB)
	if err != nil {
		reset()
	}
	<-done
	a.Close()
	b.Close()
	switch {
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err != nil:
		return err
	}
	return other
}

// pump copies from src to dst until src ends, then half-closes dst.
func pump(dst, src HalfCloser, count Counter) error {
	for {
		n, err := io.Copy(dst, &io.LimitedReader{R: src, N: relayChunk})
		if count != nil && n > 0 {
			count(n)
		}
		if err != nil {
			return err
		}
		if n < relayChunk {
			return dst.CloseWrite()
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
