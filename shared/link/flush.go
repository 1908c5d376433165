package link

import (
	"errors"
	"os"
)

// control is what is to be said besides data. Every frame carries the ack.
type control struct {
	ack, stop, ping, pong bool
	stopping              bool   // out holds stop
	says                  uint64 // the ack in out
	buf                   [4 * headerLen]byte
	out                   []byte // part of buf: composed, not yet written
}

// compose gives the control frames that wait, in order, nil if there are none.
func (k *control) compose(consumed uint64) []byte {
	if len(k.out) > 0 {
		return k.out
	}
	if !(k.ack || k.stop || k.ping || k.pong) {
		return nil
	}
	b := k.buf[:0]
	put := func(on *bool, typ byte) {
		if *on {
			b = b[:len(b)+headerLen]
			putHeader(b[len(b)-headerLen:], typ, 0, consumed)
			*on = false
		}
	}
	if k.stop || k.ping || k.pong {
		k.ack = false
	}
	k.stopping, k.says = k.stop, consumed
	put(&k.pong, framePong)
	put(&k.ping, framePing)
	put(&k.stop, frameStop)
	put(&k.ack, frameAck)
	k.out = b
	return b
}

// kick has what waits written in the background.
func (c *Conn) kick() {
	if c.flushing || c.t == nil {
		return
	}
	c.flushing = true
	go c.flushLoop()
}

func (c *Conn) flushLoop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.drain(0)
}

// flush writes what waits, by the goroutine of a Write, up to stream offset
// upto; others' bytes behind it are left to the background.
func (c *Conn) flush(upto uint64) {
	c.flushing, c.flushApp = true, true
	more := c.drain(upto)
	if more {
		c.kick()
	}
}

// drain writes until nothing waits (upto 0) or upto is written; it says
// whether there is more. Called with the lock, which it releases while writing.
func (c *Conn) drain(upto uint64) (more bool) {
	for {
		t := c.t
		if t == nil {
			break
		}
		if c.flushApp {
			if c.closed {
				more = true
				break
			}
			t.setWrite(c.wr.deadline)
		} else {
			t.setWrite(noDeadline)
		}
		end, some, interrupted := c.writeSome(t)
		if !some {
			break
		}
		if interrupted || c.flushApp && end >= upto {
			more = interrupted || c.outstanding()
			break
		}
	}
	c.flushing, c.flushApp = false, false
	if c.wr.n > 0 {
		c.wr.cond.Broadcast() // resume waits for this
	}
	c.maybeOver()
	return more && c.t != nil
}

func (c *Conn) outstanding() bool {
	k := &c.ctl
	return c.sq.pending() || k.ack || k.stop || k.ping || k.pong || len(k.out) > 0
}

// writeSome writes one piece: a chunk's frames, or control frames. Half a
// frame on the transport is completed before anything else.
func (c *Conn) writeSome(t *transport) (end uint64, some, interrupted bool) {
	var b []byte
	if !c.sq.partial {
		b = c.ctl.compose(c.consumed)
	}
	data := b == nil
	if data {
		if b, end = c.sq.take(); b == nil {
			return 0, false, false
		}
	}
	c.mu.Unlock()
	n, err := t.nc.Write(b)
	c.mu.Lock()
	t.half = n < len(b)
	whole := true
	if data {
		whole = c.sq.taken(len(b), n)
	} else if c.t == t {
		c.controlSent(b[n:])
	}
	if c.t != t {
		return end, true, false // another transport; it starts at what the other side received
	}
	// Only a Write's deadline may end in the middle of a frame. A TLS connection
	// repeats a timeout for ever: without a deadline it is a break like others.
	interrupted = c.flushApp && errors.Is(err, os.ErrDeadlineExceeded)
	if err != nil && !interrupted || !whole {
		c.lose(t, err)
	}
	return end, true, interrupted
}

// controlSent notes that control frames were written but for rest. Not before:
// what we have told the other side decides whether to dial again after a break.
func (c *Conn) controlSent(rest []byte) {
	c.ctl.out = rest
	if len(rest) > 0 {
		return
	}
	c.ackSent = max(c.ackSent, c.ctl.says)
	c.stopSent = c.stopSent || c.ctl.stopping
}
