package link

import "sync"

// A chunk is a pooled piece of buffer. b[r:w] is in use.
type chunk struct {
	b    []byte
	r, w int
	next *chunk
	end  uint64 // sendQueue: stream offset after the last record
	dead bool   // sendQueue: acknowledged while it was being written
}

// Sizes of chunks. The larger two hold four io.Copy buffers and the largest
// frame, headers included, in whole pages.
const (
	smallChunk = 4 << 10
	midChunk   = 136 << 10
	bigChunk   = 264 << 10
)

var pools = [3]struct {
	size int
	pool sync.Pool
}{{size: smallChunk}, {size: midChunk}, {size: bigChunk}}

// newChunk gives a chunk for at least n bytes; n is at most bigChunk.
func newChunk(n int) *chunk {
	for i := range pools {
		if n > pools[i].size {
			continue
		}
		if c, ok := pools[i].pool.Get().(*chunk); ok {
			return c
		}
		return &chunk{b: make([]byte, pools[i].size)}
	}
	panic("link: no chunk is that large")
}

func (c *chunk) free() {
	*c = chunk{b: c.b}
	for i := range pools {
		if len(c.b) == pools[i].size {
			pools[i].pool.Put(c)
			return
		}
	}
}
