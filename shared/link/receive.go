package link

import (
	"errors"
	"fmt"
	"os"
	"time"
)

// minDirect is the smallest buffer worth reading the transport into.
const minDirect = 512

// pull reads the transport once into p and moves the stream bytes to its
// front: frames are taken apart in place. Called with the lock and the right
// to read; the lock is released meanwhile. The bytes count as received, not
// yet as consumed.
func (c *Conn) pull(p []byte) int {
	t := c.t
	b := t.target(p)
	c.mu.Unlock()
	n, err := t.nc.Read(b)
	c.mu.Lock()
	if c.t != t {
		return 0 // a new transport brings these bytes again
	}
	got, perr := c.ingest(t, b[:n])
	switch {
	case perr != nil:
		c.abort(perr)
	case err != nil && !errors.Is(err, os.ErrDeadlineExceeded):
		c.lose(t, err)
	}
	return got
}

// fill reads the transport once into the receive queue.
func (c *Conn) fill() {
	room := c.rq.space()
	n := c.pull(room)
	c.rq.done(n, n > len(room)-2*headerLen)
}

// ingest takes what the transport t gave: stream bytes are moved to the front
// of b and counted, frames obeyed.
func (c *Conn) ingest(t *transport, b []byte) (got int, err error) {
	if len(b) > 0 {
		t.heard++
		t.asked = false
	}
	for i := 0; i < len(b); {
		n, payload, h, body, err := t.in.next(b[i:])
		if err != nil {
			return got, err
		}
		switch {
		case payload && c.closed:
			c.received += uint64(n)
			c.consume(n) // nobody wants it; stop tells so
		case payload:
			if got != i {
				copy(b[got:], b[i:i+n])
			}
			got += n
			c.received += uint64(n)
		case h.typ != 0:
			if err := c.obey(t, h, body); err != nil {
				return got, err
			}
			if c.t != t {
				return got, nil // the stream is over
			}
		}
		i += n
	}
	return got, nil
}

// obey follows one frame's header.
func (c *Conn) obey(t *transport, h header, body []byte) error {
	if t.met == (h.typ == frameWelcome) {
		return fmt.Errorf("%w: frame type %d out of place", errProtocol, h.typ)
	}
	if err := c.onAck(h.ack); err != nil {
		return err
	}
	switch h.typ {
	case frameData:
		t.bulk = h.n >= largeFrame
		if c.finRecv || c.received-c.consumed+uint64(h.n) > uint64(c.opt.buffer()) {
			return fmt.Errorf("%w: data beyond the window", errProtocol)
		}
	case frameFin:
		if c.finRecv {
			return fmt.Errorf("%w: a second end", errProtocol)
		}
		c.finRecv = true
		c.received++
		c.consume(0)
	case frameStop:
		c.onStop()
	case frameReset:
		c.rq.drop()
		c.retire(ErrReset)
	case framePing:
		c.ctl.pong = true
		c.kick()
	case frameWelcome:
		return c.onFirstWelcome(t, parseWelcome(body))
	}
	return nil
}

// onAck takes in how much the other side has consumed.
func (c *Conn) onAck(ack uint64) error {
	if ack <= c.acked {
		return nil // resent frames carry old ones
	}
	if ack > c.sq.end || !c.peerStop && !c.sq.release(ack) {
		return fmt.Errorf("%w: acknowledged what was not sent", errProtocol)
	}
	c.acked = ack
	c.win.acked(ack)
	if c.wr.n > 0 {
		c.wr.cond.Broadcast()
	}
	c.maybeOver()
	return nil
}

// onStop: the other side has closed, nothing we keep is of use any more.
func (c *Conn) onStop() {
	if c.peerStop {
		return
	}
	c.peerStop = true
	if !c.sq.drop() {
		c.lose(c.t, errors.New("dropped inside a frame"))
	}
	c.ctl.ack = true // what was dropped may have carried one
	c.kick()
	c.wr.cond.Broadcast()
	c.maybeOver()
}

// ensureReader starts readLoop when nobody reads the transport.
func (c *Conn) ensureReader() {
	if c.reading != readerNone || c.t == nil {
		return
	}
	c.reading = readerOwn
	go c.readLoop()
}

// readLoop reads in place of an application that does not, so that
// acknowledgements, ends and breaks are seen. It leaves as soon as a Read waits.
func (c *Conn) readLoop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for c.t != nil && c.rd.n == 0 {
		c.reads++
		c.t.setRead(noDeadline)
		c.fill()
		if c.rq.n == 0 {
			c.consume(0)
		}
	}
	c.reading = readerNone
	c.rd.cond.Broadcast()
}

// armTick makes tick run soon, unless it will already.
func (c *Conn) armTick() {
	if c.ticking || c.t == nil {
		return
	}
	c.ticking = true
	c.tickReads = c.reads
	if c.tick == nil {
		c.tick = time.AfterFunc(tickEvery, c.onTick)
		return
	}
	c.tick.Reset(tickEvery)
}

// onTick sends a late acknowledgement, and takes over reading when the
// application has not done so since the tick was armed.
func (c *Conn) onTick() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ticking = false
	if c.t == nil {
		return
	}
	if c.consumed > c.ackSent {
		c.ctl.ack = true
		c.kick()
	}
	if c.reading != readerNone {
		return
	}
	if c.reads == c.tickReads {
		c.ensureReader()
	} else {
		c.armTick()
	}
}
