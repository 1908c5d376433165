package link

import (
	"crypto/subtle"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"time"
)

// backlog is how many opened streams may wait for Accept.
const backlog = 256

// Listener is the agent's end: a net.Listener whose connections are streams.
type Listener struct {
	opt    Options
	accept chan *Conn
	done   chan struct{}

	mu      sync.Mutex
	closed  bool
	streams map[[16]byte]*Conn
	// Ids of ended streams of the last one to two turns, so that a first hello
	// that is repeated too late does not open a stream anew.
	ended, endedBefore map[[16]byte]struct{}
	turned             time.Time
}

// Listen makes a Listener. It has no socket: transports come by Serve.
func Listen(o Options) *Listener {
	return &Listener{
		opt: o.withDefaults(), accept: make(chan *Conn, backlog), done: make(chan struct{}),
		streams: map[[16]byte]*Conn{}, ended: map[[16]byte]struct{}{}, turned: time.Now(),
	}
}

// Serve takes a transport, after its preface byte, and owns it from then on.
// It blocks for the hello, so call it in a goroutine of the transport's own.
func (l *Listener) Serve(nc net.Conn) {
	if err := l.serve(nc); err != nil {
		refuse(nc, err)
	}
}

func (l *Listener) serve(nc net.Conn) error {
	nc.SetDeadline(time.Now().Add(handshakeLimit)) // Read and Write tell
	var b [helloLen]byte
	if _, err := io.ReadFull(nc, b[:]); err != nil {
		return fmt.Errorf("hello: %w", err)
	}
	h, err := parseHello(b[:])
	if err != nil {
		return err
	}
	c, err := l.find(h)
	if err != nil {
		return err
	}
	return c.take(nc, h)
}

// find gives the stream of a hello. A new one is there to be accepted at once:
// should its first transport break before the welcome, another will come.
func (l *Listener) find(h hello) (*Conn, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if h.lineage != [16]byte{} && h.lineage != l.opt.Lineage {
		return nil, ErrLineage
	}
	if l.closed {
		return nil, ErrUnknownStream
	}
	if c := l.streams[h.id]; c != nil {
		if subtle.ConstantTimeCompare(c.secret[:], h.secret[:]) != 1 {
			return nil, ErrSecret
		}
		return c, nil
	}
	_, e1 := l.ended[h.id]
	_, e2 := l.endedBefore[h.id]
	if e1 || e2 || h.flags&flagResume != 0 {
		return nil, ErrUnknownStream
	}
	c := newConn(l.opt)
	c.id, c.secret, c.owner = h.id, h.secret, l
	if err := c.setPeer(h.buffer, h.step); err != nil {
		c.cancel()
		return nil, err
	}
	c.keep.start(c.opt.Keep, c.expire)
	select {
	case l.accept <- c:
	default:
		c.keep.stop()
		c.cancel()
		return nil, ErrBusy
	}
	l.streams[h.id] = c
	return c, nil
}

// take puts a transport that said hello under the stream.
func (c *Conn) take(nc net.Conn, h hello) error {
	c.resuming.Lock()
	defer c.resuming.Unlock()
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return ErrUnknownStream
	}
	if h.attempt <= c.attempt {
		return errStale
	}
	c.attempt = h.attempt
	c.detach()
	c.keep.start(c.opt.Keep, c.expire)
	w := welcome{
		buffer: uint32(c.opt.buffer()), step: uint32(c.opt.MinWindow / 4),
		lineage: c.opt.Lineage, received: c.received,
	}
	stopped := c.closed
	if stopped {
		w.flags |= flagStop
	}
	b := w.encode(c.consumed)
	c.mu.Unlock()
	_, err := nc.Write(b)
	nc.SetDeadline(noDeadline) // a broken one shows itself later
	c.mu.Lock()
	if c.over {
		return errClose{ErrUnknownStream}
	}
	if err == nil {
		err = c.agree(h.received, h.consumed, h.flags&flagStop != 0)
	}
	if err != nil {
		if errors.Is(err, errProtocol) {
			c.retire(err)
		}
		return errClose{err}
	}
	c.stopSent = c.stopSent || stopped
	c.install(&transport{nc: nc, met: true})
	return nil
}

// errClose marks errors after the welcome: nothing more can be said.
type errClose struct{ error }

// refuse tells the dialler why and closes.
func refuse(nc net.Conn, err error) {
	var silent errClose
	if errors.As(err, &silent) || !errors.Is(err, errProtocol) && refusalCode(err) == 6 {
		nc.Close()
		return
	}
	w := welcome{refusal: refusalCode(err)}
	nc.SetDeadline(time.Now().Add(time.Second)) // the Write tells
	nc.Write(w.encode(0))                       // best effort
	part(nc)
}

// forget drops an ended stream, and remembers that it was.
func (l *Listener) forget(c *Conn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.streams[c.id] != c {
		return
	}
	delete(l.streams, c.id)
	if now := time.Now(); now.Sub(l.turned) > 2*l.opt.Keep {
		l.ended, l.endedBefore = map[[16]byte]struct{}{}, l.ended
		l.turned = now
	}
	l.ended[c.id] = struct{}{}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accept:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close aborts all streams and refuses transports from now on.
func (l *Listener) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return net.ErrClosed
	}
	l.closed = true
	close(l.done)
	all := make([]*Conn, 0, len(l.streams))
	for _, c := range l.streams {
		all = append(all, c)
	}
	l.mu.Unlock()
	for _, c := range all {
		c.Abort()
	}
	return nil
}

// Streams is how many streams live, broken ones included.
func (l *Listener) Streams() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.streams)
}

// Addr implements net.Listener.
func (l *Listener) Addr() net.Addr {
	l.mu.Lock()
	defer l.mu.Unlock()
	return Addr(l.opt.Lineage)
}
