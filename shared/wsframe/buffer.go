package wsframe

import "sync"

const (
	smallBuffer = 8 << 10
	largeBuffer = 128 << 10
)

var large = sync.Pool{New: func() any { return new([largeBuffer]byte) }}

// buffer is what Run reads into: a small one of its own while messages are
// small or none come, a large pooled one while data flows.
type buffer struct {
	small []byte
	large *[largeBuffer]byte
	full  bool // the last read filled what it was given
}

// next gives the buffer for the next read, which may wait for long.
func (b *buffer) next() []byte {
	if b.full {
		if b.large == nil {
			b.large = large.Get().(*[largeBuffer]byte)
		}
		return b.large[:]
	}
	b.release()
	if b.small == nil {
		b.small = make([]byte, smallBuffer)
	}
	return b.small
}

// got says how much the read gave. More than a small buffer's worth is a flow
// even when the source had no more at that moment.
func (b *buffer) got(n int) {
	b.full = n >= smallBuffer
}

func (b *buffer) release() {
	if b.large != nil {
		large.Put(b.large)
		b.large = nil
	}
}

// controlFrame collects the control frame that is passing.
type controlFrame struct {
	h    Header
	on   bool
	data [MaxControl]byte
	n    int
}

func (c *controlFrame) begin(h Header) {
	c.h, c.on, c.n = h, h.Control(), 0
}

// add takes bytes that came after the header, or before it was complete.
func (c *controlFrame) add(b []byte) {
	if c.on {
		c.n += copy(c.data[c.n:], b)
	}
}

// end gives the frame that is complete, with its payload unmasked, or 0.
func (c *controlFrame) end() (op byte, payload []byte) {
	if !c.on {
		return 0, nil
	}
	c.on = false
	payload = c.data[:c.n]
	if c.h.Masked {
		xor(payload, c.h.Key, 0)
	}
	return c.h.Opcode, payload
}
