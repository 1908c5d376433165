package network

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"sync"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/proxylink"
)

const (
	// headSize is how much of a connection's first bytes is read before proxyd is
	// dialled, and of proxyd's answer before the two are left to the kernel.
	headSize = 4 << 10
	// attempts is how many proxyds a request is given to that they close unanswered.
	attempts = 3
)

var egressAgain = daemon.Counter("berth_hostd_egress_retries_total")

// heads holds buffers of two heads: the client's and proxyd's.
var heads = sync.Pool{New: func() any { return new([2 * headSize]byte) }}

// harmless says whether a head may be said twice: it is a whole CONNECT request
// or a whole SOCKS5 greeting. Its client says no more before it is answered, and
// until then nothing of its own has reached a site.
func harmless(head []byte) bool {
	if bytes.HasPrefix(head, []byte("CONNECT ")) {
		end := []byte("\r\n\r\n")
		return bytes.Index(head, end) == len(head)-len(end)
	}
	return len(head) >= 2 && head[0] == 5 && len(head) == 2+int(head[1]) // RFC 1928 3
}

// introduce dials proxyd and gives it the connection's head. One that closes
// before it has answered a harmless head, as one does that dies or had just
// begun to stop, leaves the head to another; answer is then the first of what
// proxyd said, in buf.
func (s *Slot) introduce(ctx context.Context, head, buf []byte) (proxy proxylink.HalfCloser, answer []byte, err error) {
	for try := 1; ; try++ {
		if proxy, err = s.dial(ctx); err != nil {
			return nil, nil, err
		}
		n := 0
		if _, err = proxy.Write(head); err == nil && !harmless(head) {
			return proxy, nil, nil
		} else if err == nil {
			n, err = first(ctx, proxy, buf)
		}
		if n > 0 {
			return proxy, buf[:n], nil
		}
		proxy.Close()
		if try == attempts || ctx.Err() != nil || !harmless(head) {
			return nil, nil, fmt.Errorf("proxyd closed before it answered: %w", err)
		}
		egressAgain.Inc()
	}
}

// first reads what comes first, however long that takes; the end of ctx closes
// the connection.
func first(ctx context.Context, conn net.Conn, buf []byte) (int, error) {
	stop := context.AfterFunc(ctx, func() { abort(conn) })
	n, err := conn.Read(buf)
	if !stop() { // closed, or about to be
		return 0, context.Cause(ctx)
	}
	if n > 0 {
		err = nil
	}
	return n, err
}

// dial opens a connection to proxyd that can half-close.
func (s *Slot) dial(ctx context.Context) (proxylink.HalfCloser, error) {
	dial := s.egress.Load()
	if dial == nil {
		return nil, errors.New("the machine has no way out")
	}
	dctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	proxy, err := (*dial)(dctx)
	if err != nil {
		return nil, err
	}
	half, ok := proxy.(proxylink.HalfCloser)
	if !ok { // a programming error of the caller, not of the machine
		proxy.Close()
		return nil, fmt.Errorf("an egress connection cannot half-close: %T", proxy)
	}
	return half, nil
}
