package api

import (
	"github.com/berth-dev/berth/shared/wsframe"
)

// sift goes through what the client sent while the machine stands still. The
// gateway answers pings itself, and has no use for pongs: neither passes. kept,
// at b's front, goes on to the agent's stream, which keeps it for the machine;
// that it is or has data is told to the relay. rest is a control frame that is
// not all there. It runs inside the client's Read.
func (r *relay) sift(b []byte) (kept, rest []byte) {
	at, w := r.up.Position(), 0
	for i := 0; i < len(b); {
		f, n, err := nextFrame(&at, b[i:])
		switch {
		case err != nil: // the pipe says so
			f.data, n = true, len(b)-i
		case f.cut:
			return b[:w], b[i:]
		case f.h.Opcode == wsframe.OpPong && f.whole, f.h.Opcode == wsframe.OpPing && f.whole && r.pong(f.h, b[i+n-int(f.h.Len):i+n]):
			i += n
			continue
		}
		if f.data {
			r.tellMessage()
		}
		w += copy(b[w:], b[i:i+n])
		i += n
	}
	return b[:w], nil
}

// frame is one frame, or what is there of it.
type frame struct {
	h     wsframe.Header
	data  bool // of a message, or of a frame that had begun before
	whole bool
	cut   bool // a control frame, or a header, whose end is still to come
}

// nextFrame takes the next frame, or the rest of one, from b.
func nextFrame(at *wsframe.Parser, b []byte) (f frame, n int, err error) {
	f.data = !at.AtBoundary()
	begun := f.data
	for n < len(b) {
		m, h, ok, err := at.Next(b[n:])
		if err != nil {
			return f, n, err
		}
		n += m
		if ok && !begun {
			f.h, begun = h, true
			f.data = !h.Control()
			f.whole = true
		}
		if at.AtBoundary() {
			return f, n, nil
		}
	}
	f.cut = !f.data
	f.whole = false
	return f, n, nil
}

// pong answers a ping for the machine. In the middle of a message that the
// machine has not finished nobody can: then it is left to the agent.
func (r *relay) pong(h wsframe.Header, payload []byte) bool {
	plain := make([]byte, len(payload))
	for i, x := range payload {
		plain[i] = x ^ h.Key[i&3] // zero when it is not masked
	}
	return r.down.AtBoundary() && r.down.Inject(wsframe.AppendPong(nil, plain, false), closeTime/4) == nil
}

func (r *relay) tellMessage() {
	select {
	case r.message <- struct{}{}:
	default: // it knows
	}
}
