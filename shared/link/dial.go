package link

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	mrand "math/rand/v2"
	"net"
	"time"
)

// Dialer opens one transport towards the agent, ready for the hello: hostd has
// written the preface byte. An error with a method Permanent() that returns
// true ends the stream, and is what its calls return; after any other the
// stream dials again.
type Dialer func(ctx context.Context) (net.Conn, error)

const (
	handshakeLimit = 5 * time.Second // hello and welcome of one attempt
	firstBackoff   = 10 * time.Millisecond
	lastBackoff    = time.Second
)

// Dial opens a stream. It returns as soon as the hello is written, without
// waiting for the agent's answer: a refusal is what the first Read returns.
// While d fails it tries again until ctx or Options.Keep is over, and while the
// machine stands still (Options.Place) it waits until ctx is; ctx has no effect
// on the stream once it is open.
func Dial(ctx context.Context, d Dialer, o Options) (*Conn, error) {
	c := newConn(o.withDefaults())
	c.dial = d
	rand.Read(c.id[:]) // never fails
	rand.Read(c.secret[:])
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	keep := time.AfterFunc(c.opt.Keep, func() { cancel(context.DeadlineExceeded) })
	defer keep.Stop()
	p := pacer{place: c.opt.Place, clock: func(run bool) {
		keep.Stop()
		if run {
			keep.Reset(c.opt.Keep)
		}
	}}
	var err error
	for p.wait(ctx, nil) {
		if err = c.open(ctx); err == nil {
			return c, nil
		}
		if permanent(err) {
			break
		}
	}
	c.cancel()
	return nil, fmt.Errorf("link: dial: %w", errors.Join(err, context.Cause(ctx)))
}

// open dials the first transport and says hello.
func (c *Conn) open(ctx context.Context) error {
	nc, err := c.dial(ctx)
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.attempt++
	nc.SetWriteDeadline(time.Now().Add(handshakeLimit)) // the Write tells
	if _, err := nc.Write(c.hello()); err != nil {
		nc.Close()
		return err
	}
	nc.SetWriteDeadline(noDeadline) // as above
	c.install(&transport{nc: nc})
	return nil
}

func (c *Conn) hello() []byte {
	h := hello{
		attempt: c.attempt, id: c.id, secret: c.secret, lineage: c.lineage,
		buffer: uint32(c.opt.buffer()), step: uint32(c.opt.MinWindow / 4),
		received: c.received, consumed: c.consumed,
	}
	if c.known {
		h.flags |= flagResume
	}
	if c.closed {
		h.flags |= flagStop
	}
	return h.encode()
}

// onFirstWelcome takes in the answer to the hello of open.
func (c *Conn) onFirstWelcome(t *transport, w welcome) error {
	if err := c.meet(w); err != nil {
		c.retire(err)
		return nil
	}
	if w.received != 0 {
		return fmt.Errorf("%w: received before it began", errProtocol)
	}
	t.met = true
	if w.flags&flagStop != 0 {
		c.onStop()
	}
	c.wr.cond.Broadcast()
	return nil
}

// meet checks a welcome and notes what it says of the agent.
func (c *Conn) meet(w welcome) error {
	if w.refusal != 0 {
		return refusalError(w.refusal)
	}
	if c.lineage != [16]byte{} && c.lineage != w.lineage {
		return ErrLineage
	}
	if err := c.setPeer(w.buffer, w.step); err != nil {
		return err
	}
	c.lineage, c.known = w.lineage, true
	return nil
}

// Wake makes a broken stream dial at once instead of waiting for its next try:
// the session has another place. It does nothing to a sound one.
func (c *Conn) Wake() {
	select {
	case c.wakeup <- struct{}{}:
	default:
	}
}

// redial looks for another transport until there is one or the stream is over.
func (c *Conn) redial() {
	c.mu.Lock()
	p := pacer{place: c.opt.Place, tries: c.failures, clock: c.runKeep}
	select {
	case <-c.wakeup: // meant for an earlier break
	default:
	}
	c.mu.Unlock()
	for p.wait(c.ctx, c.wakeup) {
		err := c.reconnect()
		if err == nil {
			return
		}
		if permanent(err) {
			c.mu.Lock()
			if c.peerDone() {
				err = ErrPeerClosed
			}
			c.retire(err)
			c.mu.Unlock()
		}
	}
}

func (c *Conn) reconnect() error {
	ctx, cancel := context.WithTimeout(c.ctx, 2*handshakeLimit)
	defer cancel()
	nc, err := c.dial(ctx)
	if err != nil {
		return err
	}
	guard := context.AfterFunc(c.ctx, func() { nc.Close() })
	if err := c.resume(nc, guard); err != nil {
		nc.Close()
		return err
	}
	return nil
}

// resume says hello on a further transport, waits for the welcome and goes on.
// disarm takes the guard off that closes nc at the stream's end: from install on
// the stream sees to that, and parts in peace.
func (c *Conn) resume(nc net.Conn, disarm func() bool) error {
	defer disarm()
	nc.SetDeadline(time.Now().Add(handshakeLimit)) // Write and Read tell
	c.mu.Lock()
	c.detach()
	c.attempt++
	stopped := c.closed
	b := c.hello()
	c.mu.Unlock()
	if _, err := nc.Write(b); err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	w, ack, err := readWelcome(nc)
	if err != nil {
		return fmt.Errorf("welcome: %w", err)
	}
	nc.SetDeadline(noDeadline) // as above

	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return net.ErrClosed
	}
	if err := c.meet(w); err != nil {
		return err
	}
	if err := c.agree(w.received, ack, w.flags&flagStop != 0); err != nil {
		return err
	}
	c.stopSent = c.stopSent || stopped
	c.redialing = false
	disarm()
	c.install(&transport{nc: nc, met: true})
	return nil
}

func readWelcome(r io.Reader) (w welcome, ack uint64, err error) {
	var b [headerLen + welcomeLen]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return w, 0, err
	}
	h, err := parseHeader(b[:])
	if err != nil {
		return w, 0, err
	}
	if h.typ != frameWelcome {
		return w, 0, fmt.Errorf("%w: frame type %d for a welcome", errProtocol, h.typ)
	}
	return parseWelcome(b[headerLen:]), h.ack, nil
}

// backoff is the pause after n failures: 10 ms doubling to 1 s, give or take a
// quarter so that the streams of a host do not come in step.
func backoff(n int) time.Duration {
	d := min(firstBackoff<<min(n, 10), lastBackoff)
	return d*3/4 + mrand.N(d/2)
}
