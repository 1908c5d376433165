package proxylink

import (
	"context"
	"net"
	"sync"
	"sync/atomic"
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
// bToA of what b gave, also where a then fails to take it.
func Relay(ctx context.Context, a, b HalfCloser, aToB, bToA Counter) error {
	reset := sync.OnceFunc(func() { abort(a); abort(b) })
	stop := context.AfterFunc(ctx, reset)
	defer stop()
	var half atomic.Bool // one direction has ended
	way := func(dst, src HalfCloser, read, written Counter) error {
		err := pump(dst, src, read, written)
		if err == nil && half.CompareAndSwap(false, true) {
			err = dst.CloseWrite() // of the second one Close does it
		}
		if err != nil {
			reset()
		}
		return err
	}
	var other error
	done := make(chan struct{})
	go func() {
		defer close(done)
		other = way(a, b, bToA, nil)
	}()
	err := way(b, a, nil, aToB)
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

// abort closes c with a reset where the kernel can.
func abort(c net.Conn) {
	if t, ok := c.(interface{ SetLinger(int) error }); ok {
		_ = t.SetLinger(0)
	}
	c.Close()
}
