package link

import (
	"net"
	"time"
)

// transport is one connection under a stream. It is guarded by the Conn's
// lock, but for Read and Write on nc: each by one goroutine at a time.
type transport struct {
	nc   net.Conn
	in   parser
	hdr  [headerLen]byte // where bulk reads put a header that comes alone
	bulk bool            // frames are large now
	met  bool            // the welcome was seen, or is not to come
	half bool            // the last write left half a frame

	heard  uint64 // reads that brought something
	beaten uint64 // heard at the last heartbeat
	asked  bool   // a ping is unanswered

	readBy, writeBy time.Time // deadlines as set on nc
}

var (
	noDeadline time.Time
	longAgo    = time.Unix(1, 0) // interrupts a pending read or write
)

func (t *transport) setRead(d time.Time) {
	if !t.readBy.Equal(d) {
		t.readBy = d
		t.nc.SetReadDeadline(d) // fails only on a closed connection, which reads tell too
	}
}

func (t *transport) setWrite(d time.Time) {
	if !t.writeBy.Equal(d) {
		t.writeBy = d
		t.nc.SetWriteDeadline(d) // as above
	}
}

// largeFrame is the payload from which on a header is read alone, so that the
// payload lands where it belongs without moving it.
const largeFrame = 32 << 10

// target chooses what to read into: all of p, but not beyond the current frame
// when that is large, and only a header when a large frame is to be expected.
func (t *transport) target(p []byte) []byte {
	switch {
	case t.in.rest >= largeFrame/2:
		return p[:min(len(p), t.in.rest)]
	case t.bulk && t.in.rest == 0 && t.in.have == 0:
		return t.hdr[:]
	}
	return p
}
