package proxylink

import (
	"context"
	"net"

	"github.com/berth-dev/berth/shared/proxylink/loop"
)

// HalfCloser is a connection that can end its own direction: *net.TCPConn,
// *tls.Conn. Those between two bare *net.TCPConn are package loop's.
type HalfCloser interface {
	net.Conn
	CloseWrite() error
}

// Counter is told of bytes that went one way; nil counts nothing.
type Counter = loop.Counter

// Relay copies both ways between a and b until both directions ended, one
// failed, or ctx ended. The end of one direction is passed on as a half-close;
// a failure or the end of ctx resets both, so that nothing lingers in the
// kernel. Connections are never cut for being idle. Both are closed on return.
//
// Counters are told of what passed b, as soon as it did: aToB of what b took,
// bToA of what b gave, also where a did not take it: what lies unread at a reset
// was received all the same.
func Relay(ctx context.Context, a, b HalfCloser, aToB, bToA Counter) error {
	x, bareA := a.(*net.TCPConn)
	y, bareB := b.(*net.TCPConn)
	if !bareA || !bareB {
		return copyBoth(ctx, a, b, aToB, bToA)
	}
	return loop.Join(ctx, x, y, aToB, bToA)
}
