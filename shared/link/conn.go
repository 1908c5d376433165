package link

import (
	"context"
	"encoding/hex"
	"io"
	"net"
	"os"
	"sync"
	"time"
)

// Options of a Conn or a Listener. The zero value is right but for tests.
type Options struct {
	// Lineage names the memory of the machine. A Listener has it; a dialler
	// may leave it zero and then learns it with the first welcome.
	Lineage [16]byte
	// Keep is how long a broken stream waits for another transport, and how
	// long Close goes on trying to deliver without any progress. 0: 60 s.
	Keep time.Duration
	// MinWindow and MaxWindow bound the unacknowledged bytes, in each
	// direction. 0: 1 and 16 MiB. What is not in use takes no memory.
	MinWindow, MaxWindow int
	// Heartbeat is after how much silence a side asks for a sign of life;
	// without one for as long again it gives the transport up. 0: 5 s.
	Heartbeat time.Duration
	// Place tells a dialler where the machine stands; nil: it always runs. A
	// Listener has no use for it: its clocks stop with its processors.
	Place Place
}

func (o Options) withDefaults() Options {
	set := func(v *int, d int) {
		if *v <= 0 {
			*v = d
		}
	}
	set(&o.MinWindow, 1<<20)
	set(&o.MaxWindow, max(16<<20, o.MinWindow))
	if o.Keep <= 0 {
		o.Keep = 60 * time.Second
	}
	if o.Heartbeat <= 0 {
		o.Heartbeat = 5 * time.Second
	}
	return o
}

// buffer is what this side is ready to hold unread.
func (o Options) buffer() int { return max(o.MaxWindow, initialWindow) }

// tickEvery bounds how late an acknowledgement goes out, and how long nobody
// reads the transport before the Conn does so itself.
const tickEvery = 10 * time.Millisecond

// reader says who may read the transport: at most one goroutine.
type reader int

const (
	readerNone reader = iota
	readerApp         // a Read, straight into the caller's buffer
	readerOwn         // readLoop, into the receive queue
)

// Conn is one stream.
type Conn struct {
	id     [16]byte
	secret [32]byte
	opt    Options
	dial   Dialer    // nil on the agent's side
	owner  *Listener // nil on the gateway's side
	ctx    context.Context
	cancel context.CancelFunc
	wakeup chan struct{}

	resuming sync.Mutex // one resume at a time; taken before mu

	mu      sync.Mutex // guards all below
	rd, wr  waiters
	t       *transport // nil: broken, or the stream is over
	attempt uint32
	lineage [16]byte
	peerBuf int  // what the other side is ready to hold
	step    int  // acknowledge at least this often
	known   bool // the welcome was seen (gateway's side)
	err     error

	// Receiving. consumed <= received; the difference is in rq, and the fin.
	reading  reader
	reads    uint64 // how often the transport was taken for reading
	rq       recvQueue
	received uint64
	consumed uint64
	ackSent  uint64
	finRecv  bool

	// Sending.
	sq       sendQueue
	win      window
	acked    uint64 // what the other side has consumed
	writing  bool   // a Write is under way; others queue
	flushing bool   // a goroutine writes to the transport
	flushApp bool   // it is a Write: its deadline holds
	ctl      control
	finSent  bool
	peerStop bool // the other side reads no more
	closed   bool // Close was called
	stopSent bool

	tick      *time.Timer
	ticking   bool
	tickReads uint64
	beat      *time.Timer
	keep      keepClock
	linger    keepClock
	lingered  uint64 // acked when linger was last started
	stood     int    // how often linger was started anew because the machine stood still
	redialing bool
	standing  bool   // redial waits for a machine that stands still
	failures  int    // transports in a row that brought nothing
	reached   uint64 // progress at the last break
	over      bool   // nothing goes on any more; err is set
}

func newConn(o Options) *Conn {
	c := &Conn{opt: o, lineage: o.Lineage, wakeup: make(chan struct{}, 1)}
	c.ctx, c.cancel = context.WithCancel(context.Background())
	c.rd.cond.L, c.wr.cond.L = &c.mu, &c.mu
	c.peerBuf, c.step = initialWindow, initialWindow/4
	c.win = window{size: min(o.MinWindow, initialWindow), max: o.MaxWindow}
	return c
}

// Read implements net.Conn. When nothing is queued and nobody else reads, it
// reads the transport itself: no goroutine lies between.
func (c *Conn) Read(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		switch {
		case c.closed:
			return 0, c.opError("read", net.ErrClosed)
		case c.rd.expired():
			return 0, c.opError("read", os.ErrDeadlineExceeded)
		case len(p) == 0:
			return 0, nil
		case c.rq.n > 0:
			n := c.rq.read(p)
			c.consume(n)
			return n, nil
		case c.finRecv:
			return 0, io.EOF
		case c.err != nil:
			return 0, c.opError("read", c.err)
		}
		if c.reading != readerNone || c.t == nil {
			c.rd.wait()
			if c.reading == readerNone {
				c.armTick() // who gave the transport up for us did not, and we may leave
			}
			continue
		}
		if n := c.readDirect(p); n > 0 {
			return n, nil
		}
	}
}

// readDirect takes the transport and reads once.
func (c *Conn) readDirect(p []byte) (n int) {
	c.reading = readerApp
	c.reads++
	c.t.setRead(c.rd.deadline)
	if len(p) < minDirect {
		c.fill()
	} else {
		n = c.pull(p)
	}
	c.reading = readerNone
	c.consume(n)
	if c.rd.n > 0 {
		c.rd.cond.Broadcast()
	} else {
		c.armTick()
	}
	return n
}

// Write implements net.Conn. It returns when p is in the window; what the
// transport does not take is sent in the background.
func (c *Conn) Write(p []byte) (n int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.write(p)
}

// write is Write with the lock.
func (c *Conn) write(p []byte) (n int, err error) {
	for c.writing && !c.wr.expired() && !c.closed {
		c.wr.wait()
	}
	if err := c.writable(); err != nil {
		return 0, err
	}
	if c.writing {
		return 0, c.opError("write", net.ErrClosed)
	}
	c.writing = true
	defer c.doneWriting()
	for n < len(p) {
		if err := c.writable(); err != nil {
			return n, err
		}
		room := c.room()
		if room <= 0 {
			c.waitRoom()
			continue
		}
		n += c.sq.add(p[n:min(len(p), n+room)], c.consumed)
		c.queued()
	}
	return n, nil
}

// ReadFrom implements io.ReaderFrom: what r gives goes straight into the
// buffer that is sent and kept.
func (c *Conn) ReadFrom(r io.Reader) (total int64, err error) {
	size := smallChunk
	for {
		ch := newChunk(size)
		room := ch.b[headerLen:min(len(ch.b), headerLen+maxPayload)]
		n, rerr := r.Read(room)
		if n > 0 {
			w, werr := c.writeChunk(ch, n)
			total += int64(w)
			if werr != nil {
				return total, werr
			}
		} else {
			ch.free()
		}
		if rerr == io.EOF {
			return total, nil
		} else if rerr != nil {
			return total, rerr
		}
		size = smallChunk
		if n >= len(room)/2 {
			size = min(4*len(room), bigChunk)
		}
	}
}

// writeChunk sends the n bytes of a chunk and takes the chunk over. Only a
// chunk that is mostly full is kept itself: others would waste memory.
func (c *Conn) writeChunk(ch *chunk, n int) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for {
		if n < len(ch.b)/2 || n > c.win.size/2 {
			defer ch.free()
			return c.write(ch.b[headerLen : headerLen+n])
		}
		if err := c.writable(); err != nil {
			ch.free()
			return 0, err
		}
		if !c.writing && c.room() >= n {
			break
		}
		c.waitRoom()
	}
	ch.r, ch.w = 0, 0
	c.sq.addChunk(ch, n, c.consumed)
	c.queued()
	return n, nil
}

// writable says why nothing can be written, if so.
func (c *Conn) writable() error {
	switch {
	case c.closed:
		return c.opError("write", net.ErrClosed)
	case c.finSent:
		return c.opError("write", ErrWriteClosed)
	case c.wr.expired():
		return c.opError("write", os.ErrDeadlineExceeded)
	case c.err != nil:
		return c.opError("write", c.err)
	case c.peerStop:
		return c.opError("write", ErrPeerClosed)
	}
	return nil
}

// room is how much may be queued now. Tiny records cost more memory than they
// count in the window, so memory is bounded as well.
func (c *Conn) room() int {
	room := c.win.size - int(c.sq.end-c.acked)
	if c.sq.mem > 2*c.win.size+2*bigChunk && c.sq.head != nil {
		return 0
	}
	return room
}

// waitRoom waits for acknowledgements, and sees to it that somebody reads them.
func (c *Conn) waitRoom() {
	c.win.full(c.acked)
	c.ensureReader()
	c.wr.wait()
}

// queued follows each addition to the send queue, whose header carried an ack.
func (c *Conn) queued() {
	c.ackSent = c.consumed
	c.ctl.ack = false
	c.win.sent(c.sq.end)
	if c.t != nil && !c.flushing {
		c.flush(c.sq.end)
	}
	if c.reading == readerNone {
		c.armTick()
	}
}

func (c *Conn) doneWriting() {
	c.writing = false
	if c.wr.n > 0 {
		c.wr.cond.Broadcast()
	}
}

// consume counts n bytes as read by the application and acknowledges them at
// once when enough has come together, else with the next frame or tick.
func (c *Conn) consume(n int) {
	c.consumed += uint64(n)
	if c.finRecv && c.rq.n == 0 && c.consumed+1 == c.received {
		c.consumed++
		c.ctl.ack = true
		c.kick()
	}
	if c.consumed == c.ackSent {
		return
	}
	if c.consumed-max(c.ackSent, c.ctl.says) >= uint64(c.step) { // says may be on its way
		c.ctl.ack = true
		c.kick()
	} else {
		c.armTick()
	}
}

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setRead(t)
	c.setWrite(t)
	return c.usable()
}

// SetReadDeadline implements net.Conn.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setRead(t)
	return c.usable()
}

// SetWriteDeadline implements net.Conn.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.setWrite(t)
	return c.usable()
}

func (c *Conn) setRead(t time.Time) {
	c.rd.set(t)
	if c.reading == readerApp && c.t != nil && !c.closed {
		c.t.setRead(t)
	}
}

func (c *Conn) setWrite(t time.Time) {
	c.wr.set(t)
	if c.flushing && c.flushApp && c.t != nil && !c.closed {
		c.t.setWrite(t)
	}
}

func (c *Conn) usable() error {
	if c.closed {
		return c.opError("set", net.ErrClosed)
	}
	return nil
}

// opError gives deadline and close errors as they are, as callers compare them.
func (c *Conn) opError(op string, err error) error {
	switch err {
	case os.ErrDeadlineExceeded, io.EOF, ErrExpired:
		return err
	}
	return &net.OpError{Op: op, Net: "link", Addr: c.LocalAddr(), Err: err}
}

// Unread is how many of the bytes written the other side has not read yet, as
// far as it has told.
func (c *Conn) Unread() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return int(c.sq.end - c.acked)
}

// ID is the stream's id, for logs.
func (c *Conn) ID() [16]byte { return c.id }

// Addr is the address of both ends of a stream: its id.
type Addr [16]byte

// Network is "link".
func (Addr) Network() string { return "link" }

// String is the id in hexadecimal digits.
func (a Addr) String() string { return hex.EncodeToString(a[:]) }

// LocalAddr implements net.Conn.
func (c *Conn) LocalAddr() net.Addr { return Addr(c.id) }

// RemoteAddr implements net.Conn.
func (c *Conn) RemoteAddr() net.Addr { return Addr(c.id) }
