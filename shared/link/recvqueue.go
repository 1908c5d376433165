package link

// recvQueue holds bytes that arrived while the application did not read. The
// Conn's lock guards it; only the free end of the open chunk is written without.
type recvQueue struct {
	head, tail *chunk
	n          int    // unread bytes
	open       *chunk // its free end is being read into
	want       int    // size of the next chunk
}

// space gives room to read into; done ends it.
func (q *recvQueue) space() []byte {
	if t := q.tail; t == nil || len(t.b)-t.w < smallChunk/4 {
		c := newChunk(max(q.want, smallChunk))
		if t == nil {
			q.head = c
		} else {
			t.next = c
		}
		q.tail = c
	}
	q.open = q.tail
	return q.open.b[q.open.w:]
}

// done says that n bytes of the room are stream bytes; full that the transport
// filled all of it.
func (q *recvQueue) done(n int, full bool) {
	c := q.open
	q.open = nil
	c.w += n
	q.n += n
	switch {
	case !full:
		q.want = smallChunk
	case q.want < midChunk:
		q.want = midChunk
	default:
		q.want = bigChunk
	}
	if c.r == c.w { // all read, and the reader had to leave the chunk to us
		q.trim()
	}
}

func (q *recvQueue) read(p []byte) (n int) {
	for n < len(p) && q.head != nil {
		c := q.head
		m := copy(p[n:], c.b[c.r:c.w])
		c.r += m
		n += m
		if c.r < c.w || c == q.open {
			break
		}
		q.unlink()
	}
	q.n -= n
	return n
}

// trim frees the chunks that hold nothing.
func (q *recvQueue) trim() {
	for q.head != nil && q.head.r == q.head.w && q.head != q.open {
		q.unlink()
	}
}

func (q *recvQueue) unlink() {
	c := q.head
	if q.head = c.next; q.head == nil {
		q.tail = nil
	}
	c.free()
}

// drop forgets everything.
func (q *recvQueue) drop() {
	for c := q.head; c != nil; c = c.next {
		c.r = c.w
	}
	q.n = 0
	q.trim()
}
