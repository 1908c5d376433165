package link

// sendQueue keeps what was written and not yet acknowledged, as the very
// frames that go over the wire, so that one copy serves both sending and
// resending. The Conn's lock guards it; only the slice that take gave out is
// read without.
type sendQueue struct {
	head, tail *chunk
	base       uint64 // stream offset of the first record in head
	end        uint64 // stream offset after the last queued byte (fin counts one)
	mem        int    // bytes of all chunks

	cur     *chunk // where sending stands; nil: everything was taken
	pos     int    // in cur
	pin     *chunk // being written to the transport
	partial bool   // the transport holds the beginning of the frame at pos
	last    int    // position in tail of its last record's header
	maxed   bool   // that record may not grow
}

// add queues up to len(p) bytes as one record and returns how many fit.
func (q *sendQueue) add(p []byte, ack uint64) int {
	if n := q.extend(p, ack); n > 0 {
		return n
	}
	n := min(len(p), maxPayload)
	if q.tail == nil || len(q.tail.b)-q.tail.w < headerLen+min(n, smallChunk/4) {
		q.push(newChunk(q.sizeFor(n)))
	}
	t := q.tail
	n = min(n, len(t.b)-t.w-headerLen)
	q.record(frameData, n, ack)
	copy(t.b[t.w-n:], p[:n])
	return n
}

// extend puts p into the last record when none of it was sent yet, so that
// many small writes during one slow one become one frame. Its header is written
// anew: the caller counts ack as told.
func (q *sendQueue) extend(p []byte, ack uint64) int {
	t := q.tail
	if t == nil || q.cur == nil || q.maxed || q.cur == t && q.pos > q.last {
		return 0
	}
	n := t.w - q.last - headerLen
	room := min(maxPayload-n, len(t.b)-t.w, len(p))
	if room <= 0 {
		return 0
	}
	putHeader(t.b[q.last:], frameData, n+room, ack)
	copy(t.b[t.w:], p[:room])
	t.w += room
	q.end += uint64(room)
	t.end = q.end
	return room
}

// sizeFor chooses the chunk for a write of n bytes: small for a lone message,
// larger when more is under way.
func (q *sendQueue) sizeFor(n int) int {
	switch {
	case n >= 64<<10:
		return bigChunk
	case n > smallChunk/2 || q.mem >= 2*smallChunk:
		return midChunk
	}
	return smallChunk
}

// addChunk queues a chunk whose payload b[headerLen:headerLen+n] is filled in.
func (q *sendQueue) addChunk(c *chunk, n int, ack uint64) {
	q.push(c)
	q.record(frameData, n, ack)
}

// addFin queues the end of the stream.
func (q *sendQueue) addFin(ack uint64) {
	if q.tail == nil || len(q.tail.b)-q.tail.w < headerLen {
		q.push(newChunk(smallChunk))
	}
	q.record(frameFin, 0, ack)
	q.maxed = true
}

func (q *sendQueue) push(c *chunk) {
	if q.tail == nil {
		q.head, q.base = c, q.end
	} else {
		q.tail.next = c
	}
	q.tail = c
	q.mem += len(c.b)
}

// record appends a header and leaves n bytes for the payload.
func (q *sendQueue) record(typ byte, n int, ack uint64) {
	t := q.tail
	if q.cur == nil {
		q.cur, q.pos = t, t.w
	}
	q.last, q.maxed = t.w, false
	putHeader(t.b[t.w:], typ, n, ack)
	t.w += headerLen + n
	q.end += seqLen(typ, n)
	t.end = q.end
}

// seqLen is how much of the stream a record is.
func seqLen(typ byte, n int) uint64 {
	if typ == frameFin {
		return 1
	}
	return uint64(n)
}

// take gives the next bytes for the transport, nil when there are none. The
// chunk stays pinned until taken is called.
func (q *sendQueue) take() (b []byte, end uint64) {
	for q.cur != nil && q.pos == q.cur.w {
		if q.cur.next == nil {
			q.cur = nil
			break
		}
		q.cur = q.cur.next
		q.pos = q.cur.r
	}
	if q.cur == nil {
		return nil, 0
	}
	b = q.cur.b[q.pos:q.cur.w]
	q.pin, q.pos = q.cur, q.cur.w
	return b, q.cur.end
}

// taken ends a take of size bytes of which n reached the transport. It reports
// false when the rest is gone (acknowledged, or dropped), so that the frame
// cannot be completed.
func (q *sendQueue) taken(size, n int) bool {
	c := q.pin
	q.pin = nil
	if c.dead {
		c.free()
		return n == size
	}
	if n == size {
		q.partial = false
		return true
	}
	// While c was pinned only release and drop could move cur, and then c is dead.
	q.partial = q.partial || n > 0
	q.pos -= size - n
	return q.pos >= c.r
}

// pending says whether there is something to take.
func (q *sendQueue) pending() bool {
	return q.cur != nil && (q.pos < q.cur.w || q.cur.next != nil)
}

// release drops all records that end at or before ack. It reports false when
// that would drop what was not sent.
func (q *sendQueue) release(ack uint64) bool {
	for q.head != nil {
		c := q.head
		for c.r < c.w {
			n := recordLen(c.b[c.r:])
			end := q.base + seqLen(c.b[c.r], n)
			if end > ack {
				return true
			}
			if q.cur == c && c.r+headerLen+n > q.pos {
				return false
			}
			q.base = end
			c.r += headerLen + n
		}
		if q.cur == c {
			if q.cur = c.next; c.next != nil {
				q.pos = c.next.r
			}
		}
		q.unlinkHead()
	}
	return true
}

func (q *sendQueue) unlinkHead() {
	c := q.head
	q.mem -= len(c.b)
	if q.head = c.next; q.head == nil {
		q.tail = nil
	}
	if c == q.pin {
		c.dead = true
	} else {
		c.free()
	}
}

// rewind makes sending start again at offset received, which the other side
// reported; nothing may be pinned. It reports false for an offset that cannot
// be.
func (q *sendQueue) rewind(received uint64) bool {
	if received > q.end || received < q.base {
		return false
	}
	q.cur, q.partial = nil, false // nothing is unsent as far as release is concerned
	q.release(received)
	if q.head == nil {
		return true
	}
	c := q.head
	if skip := int(received - q.base); skip > 0 {
		// The part that arrived is not needed again: its room takes the new header.
		n := recordLen(c.b[c.r:]) - skip
		c.r += skip
		putHeader(c.b[c.r:], frameData, n, 0)
		if c == q.tail && q.last < c.r {
			q.last = c.r
		}
		q.base = received
	}
	q.cur, q.pos = c, c.r
	return true
}

// drop forgets everything: nobody will ask for it. It reports false when that
// leaves half a frame on the transport.
func (q *sendQueue) drop() bool {
	whole := !q.partial
	q.cur, q.partial = nil, false
	for q.head != nil {
		q.unlinkHead()
	}
	q.base = q.end
	return whole
}
