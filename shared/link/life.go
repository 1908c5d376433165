package link

import (
	"fmt"
	"io"
	"net"
	"time"
)

// CloseWrite ends the stream towards the other side: its Read gives io.EOF
// after all that was written. Reading goes on.
func (c *Conn) CloseWrite() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return c.opError("close", net.ErrClosed)
	}
	c.finish()
	return nil
}

// finish queues the end of the stream, once.
func (c *Conn) finish() {
	if c.finSent {
		return
	}
	c.finSent = true
	if !c.peerStop && !c.over {
		c.sq.addFin(c.consumed)
		c.kick()
		c.ensureReader()
	}
	c.wr.cond.Broadcast()
}

// Close implements net.Conn. What was written is still delivered in the
// background, for as long as the other side takes some of it every
// Options.Keep; what was not read is dropped. A machine that stands still is
// waited for, up to ten times Keep.
func (c *Conn) Close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return c.opError("close", net.ErrClosed)
	}
	c.closed = true
	c.consumed += uint64(c.rq.n)
	c.rq.drop()
	c.finish()
	c.ctl.stop = true
	if c.t != nil && c.reading == readerApp {
		c.t.setRead(longAgo)
	}
	if c.t != nil && c.flushing && c.flushApp {
		c.t.setWrite(longAgo)
	}
	c.rd.stop()
	c.wr.stop()
	if c.over {
		return nil
	}
	c.consume(0)
	c.kick()
	c.ensureReader()
	c.lingered = c.acked
	c.linger.start(c.opt.Keep, c.onLinger)
	return nil
}

// lingerStill is how many Keeps a closed stream waits for a machine that stands
// still: long enough for a move, not for a pause of days.
const lingerStill = 10

// onLinger gives a closed stream up when nothing was taken since last time.
func (c *Conn) onLinger() {
	still := c.opt.still()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.over || !c.linger.done():
		return
	case c.acked != c.lingered:
		c.lingered = c.acked
	case (still || c.standing) && c.stood < lingerStill:
		c.stood++
	default:
		c.abort(ErrExpired)
		return
	}
	c.linger.stop()
	c.linger.start(c.opt.Keep, c.onLinger)
}

// Abort ends the stream at once, on both sides: what was written may be lost,
// and the other side's calls fail with ErrReset.
func (c *Conn) Abort() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.closed = true
	c.rq.drop()
	c.abort(net.ErrClosed)
}

// abort retires the stream and tells the other side so, as far as that is
// possible without waiting.
func (c *Conn) abort(err error) {
	t := c.t
	c.t = nil
	c.retire(err)
	if t == nil {
		return
	}
	t.writeBy = time.Now().Add(time.Second)
	t.nc.SetWriteDeadline(t.writeBy) // a Write that fails just below tells
	go func() {
		defer t.nc.Close()
		c.mu.Lock()
		for c.flushing {
			c.wr.wait()
		}
		whole := !t.half
		c.mu.Unlock()
		if whole {
			var b [headerLen]byte
			putHeader(b[:], frameReset, 0, 0)
			t.nc.Write(b[:]) // best effort
		}
	}()
}

// retire ends the stream for good: err is what calls get from now on, after
// the bytes that had arrived.
func (c *Conn) retire(err error) {
	if c.over {
		return
	}
	c.over, c.err = true, err
	if c.t != nil {
		c.t.nc.Close()
		c.t = nil
	}
	c.sq.drop()
	c.cancel()
	c.keep.stop()
	c.linger.stop()
	for _, t := range []*time.Timer{c.tick, c.beat} {
		if t != nil {
			t.Stop()
		}
	}
	c.rd.stop()
	c.wr.stop()
	if c.owner != nil {
		go c.owner.forget(c)
	}
}

// maybeOver retires a closed stream that has nothing left to deliver.
func (c *Conn) maybeOver() {
	if c.closed && c.stopSent && !c.flushing && (c.peerStop || c.acked == c.sq.end) {
		t := c.t
		c.t = nil
		c.retire(net.ErrClosed)
		if t != nil {
			go part(t.nc)
		}
	}
}

// part closes a transport so that what we said last arrives: closed over
// unread bytes, a TCP connection would be reset and drop it.
func part(nc net.Conn) {
	defer nc.Close()
	if half, ok := nc.(interface{ CloseWrite() error }); ok && half.CloseWrite() == nil {
		nc.SetReadDeadline(time.Now().Add(time.Second)) // the Read tells
		io.Copy(io.Discard, nc)                         // to the other side's close
	}
}

// lose drops a broken transport. Unless the stream is over for the other side,
// the dialler looks for another and the agent waits for one.
func (c *Conn) lose(t *transport, _ error) {
	if t == nil || c.t != t {
		return
	}
	t.nc.Close()
	c.t = nil
	if c.peerDone() && (c.dial == nil || c.ackSent == c.received) {
		c.retire(ErrPeerClosed)
		return
	}
	c.failures++
	if p := c.progress(); p > c.reached {
		c.failures, c.reached = 0, p
	}
	c.keep.start(c.opt.Keep, c.expire)
	if c.dial != nil && !c.redialing {
		c.redialing = true
		go c.redial()
	}
}

// peerDone says that the other side has closed and all it wrote is here. It may
// still wait to hear that, or that we have closed; when it is the agent we dial
// again to say so.
func (c *Conn) peerDone() bool { return c.peerStop && c.finRecv }

// progress rises with every byte that came or arrived.
func (c *Conn) progress() uint64 { return c.received + c.acked + c.sq.base }

// expire ends a stream that stayed broken too long while its machine could run.
func (c *Conn) expire() {
	still := c.opt.still()
	c.mu.Lock()
	defer c.mu.Unlock()
	switch {
	case c.t != nil || !c.keep.done():
	case still || c.standing: // redial may not know it yet, or not that it is over
		c.keep.stop()
		c.keep.start(c.opt.Keep, c.expire)
	default:
		c.retire(ErrExpired)
	}
}

// detach takes the present transport away and waits until nobody writes to it,
// so that the send queue may be rewound.
func (c *Conn) detach() {
	if c.t != nil {
		c.t.nc.Close()
		c.t = nil
	}
	for c.flushing {
		c.wr.wait()
	}
}

// agree brings both sides to the same offsets: what the other side received
// and consumed, and whether it reads on.
func (c *Conn) agree(received, consumed uint64, stop bool) error {
	if stop && !c.peerStop {
		c.peerStop = true
		c.sq.drop()
	}
	if c.peerStop {
		return nil
	}
	if consumed > received || !c.sq.rewind(received) {
		return fmt.Errorf("%w: offsets do not fit", errProtocol)
	}
	c.acked = max(c.acked, consumed)
	return nil
}

// setPeer notes what the other side can hold.
func (c *Conn) setPeer(buffer, step uint32) error {
	if buffer < initialWindow {
		return fmt.Errorf("%w: a buffer of %d bytes", errProtocol, buffer)
	}
	c.peerBuf = int(min(buffer, 1<<30))
	c.step = int(max(1, min(step, uint32(c.opt.buffer()/4))))
	c.win.max = min(c.opt.MaxWindow, c.peerBuf)
	c.win.size = min(max(c.win.size, c.opt.MinWindow), c.win.max)
	return nil
}

// install puts a transport under the stream. The flags told the other side
// whether we have closed.
func (c *Conn) install(t *transport) {
	c.t = t
	c.keep.stop()
	c.win.reset()
	c.ctl = control{stop: c.closed && !c.stopSent}
	if c.beat == nil {
		c.beat = time.AfterFunc(c.opt.Heartbeat, c.onBeat)
	} else {
		c.beat.Reset(c.opt.Heartbeat)
	}
	if c.outstanding() {
		c.kick()
	}
	if c.rd.n > 0 {
		c.rd.cond.Broadcast()
	} else {
		c.armTick()
	}
	c.wr.cond.Broadcast()
	c.maybeOver()
}

// onBeat asks for a sign of life after a silence, and gives the transport up
// when none came: a cut cable breaks no connection by itself.
func (c *Conn) onBeat() {
	c.mu.Lock()
	defer c.mu.Unlock()
	t := c.t
	if t == nil {
		return
	}
	if t.heard == t.beaten {
		if t.asked {
			c.lose(t, errDead)
			return
		}
		t.asked = true
		c.ctl.ping = true
		c.kick()
		c.ensureReader()
	}
	t.beaten = t.heard
	c.beat.Reset(c.opt.Heartbeat)
}

// keepClock is how long a stream is given. One runs while the stream is broken
// and its machine does not stand still (Options.Place), another after Close.
type keepClock struct {
	timer *time.Timer
	until time.Time
}

func (k *keepClock) start(d time.Duration, f func()) {
	if k.timer == nil {
		k.until = time.Now().Add(d)
		k.timer = time.AfterFunc(d, f)
	}
}

func (k *keepClock) stop() {
	if k.timer != nil {
		k.timer.Stop()
		k.timer = nil
	}
}

// done says whether the clock has run out, and not just been started anew.
func (k *keepClock) done() bool {
	return k.timer != nil && !time.Now().Before(k.until)
}
