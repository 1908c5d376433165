package front

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/pass"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// client is one connection from a machine. A loop has it first (quick); where a
// goroutine takes over, it reads through a buffer, so the first bytes can be
// looked at. It settles its account when it closes. One goroutine at a time owns
// it; idle is guarded by Server.mu.
type client struct {
	quick    atomic.Pointer[quick] // nil: a goroutine has it, and what follows is set
	net.Conn                       // tcp, without its ReadFrom and WriteTo, which would go past r
	tcp      *net.TCPConn
	r        *bufio.Reader
	unread   []byte // what the loop read and r did not yet

	s     *Server
	ctx   context.Context // ends when draining is over
	began time.Time

	hello    proxylink.Hello
	protocol string
	target   string          // of the last connection made for it
	pass     *pass.Pass      // nil: refused says why
	refused  *egress.Refusal // of all that it asks for: no good pass, or one connection too many
	meter    *meter.Conn     // nil before the Hello, and when refused
	web      *web            // plain HTTP only
	err      error           // how the relay ended

	due       atomic.Int64 // when what is awaited must be here, in Unix nanoseconds; 0: never; late: it was not
	idle      bool         // waits for its first byte
	between   atomic.Bool  // plain HTTP: waits for its next request
	spoiled   atomic.Bool  // plain HTTP: the end of a request's body was not found, so what follows is no request
	closeOnce sync.Once
}

// readers are buffers that hold a Hello with a usual pass and a request's head.
var readers = sync.Pool{New: func() any { return bufio.NewReaderSize(nil, 8<<10) }}

// become gives a goroutine what it needs.
func (c *client) become(tcp *net.TCPConn) {
	c.Conn, c.tcp = tcp, tcp
	c.r = readers.Get().(*bufio.Reader)
	c.r.Reset(source{c})
	c.quick.Store(nil)
}

// source is where r reads.
type source struct{ c *client }

func (s source) Read(p []byte) (n int, err error) {
	if len(s.c.unread) > 0 {
		n = copy(p, s.c.unread)
		s.c.unread = s.c.unread[n:]
		return n, nil
	}
	return s.c.tcp.Read(p)
}

// adopt makes a connection of a socket.
func adopt(fd int) (*net.TCPConn, error) {
	f := os.NewFile(uintptr(fd), "client")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	tcp := conn.(*net.TCPConn)
	_ = tcp.SetKeepAliveConfig(net.KeepAliveConfig{Enable: true, Idle: keepIdle * time.Second, Interval: keepInterval * time.Second, Count: keepCount}) // net sets its own
	return tcp, nil
}

// Read reads what was buffered first.
func (c *client) Read(p []byte) (int, error) { return c.r.Read(p) }

// Close ends the connection and settles its account. Idempotent.
func (c *client) Close() error {
	c.closeOnce.Do(func() {
		if c.tcp != nil {
			c.tcp.Close()
		}
		c.web.close()
		if c.meter != nil {
			c.meter.Close()
			c.logClosed()
		}
		c.s.mu.Lock()
		delete(c.s.clients, c)
		c.s.mu.Unlock()
		c.s.done.Done()
	})
	return nil
}

func (c *client) logClosed() {
	if c.s.log.Enabled(c.ctx, slog.LevelDebug) {
		up, down := c.meter.Bytes()
		c.s.log.Debug("closed", "session", c.hello.SessionID, "protocol", c.protocol, "target", c.target,
			"up", up, "down", down, "seconds", time.Since(c.began).Seconds(), "error", c.err)
	}
}

// abort cuts the connection with a reset; its owner notices and closes it.
func (c *client) abort() {
	if q := c.quick.Load(); q != nil {
		q.l.Call(q.abort)
		return
	}
	_ = c.tcp.SetLinger(0)
	c.tcp.Close()
}

// interrupt ends a wait for the first byte.
func (c *client) interrupt() {
	if q := c.quick.Load(); q != nil {
		q.l.Call(q.interrupted)
		return
	}
	_ = c.SetReadDeadline(time.Unix(1, 0))
}

const late = -1

// within bounds what is awaited next.
func (c *client) within(d time.Duration) {
	c.arrived()
	c.due.Store(time.Now().Add(d).UnixNano())
}

// arrived ends the bound: what was awaited is here, were it at the last moment.
func (c *client) arrived() {
	if c.due.Swap(0) == late && c.quick.Load() == nil {
		c.s.mu.Lock() // the interruption is over
		_ = c.SetReadDeadline(time.Time{})
		c.s.mu.Unlock()
	}
}

// overdue interrupts a connection whose bound has passed; s.mu is held.
func (c *client) overdue(now time.Time) {
	if due := c.due.Load(); due > 0 && now.UnixNano() > due && c.due.CompareAndSwap(due, late) {
		c.interrupt()
	}
}

// first waits for the first byte and leaves it in the buffer.
func (c *client) first() (byte, error) {
	c.arrived()
	if c.r.Buffered() == 0 && len(c.unread) == 0 && !c.listen() {
		return 0, net.ErrClosed
	}
	b, err := c.r.Peek(1)
	c.s.mu.Lock()
	c.idle = false
	c.s.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return b[0], nil
}

// listen begins the wait for the first byte, unless proxyd stops: without a limit,
// because browsers connect ahead of need, but of a connection that is refused
// anyway, and counts nowhere, not for long.
func (c *client) listen() bool {
	if c.refused != nil {
		c.within(refusedTimeout)
	}
	c.s.mu.Lock()
	defer c.s.mu.Unlock()
	c.idle = !c.s.draining
	return c.idle
}

// startsWith looks at the first bytes and leaves them in the buffer.
func (c *client) startsWith(text string) bool {
	b, _ := c.r.Peek(len(text))
	return string(b) == text
}

// buffered is what was read ahead.
func (c *client) buffered() []byte {
	b, _ := c.r.Peek(c.r.Buffered())
	return append(bytes.Clone(b), c.unread...)
}

// release gives the buffer back: from here on only tcp is read.
func (c *client) release() {
	c.r.Reset(nil)
	readers.Put(c.r)
	c.r, c.unread = nil, nil
}

// lingerClose closes after an answer that the client must get: closing with
// unread bytes would reset the connection and the answer with it.
func (c *client) lingerClose() {
	_ = c.tcp.CloseWrite()
	_ = c.SetReadDeadline(time.Now().Add(time.Second))
	_, _ = io.CopyN(io.Discard, c.r, 256<<10)
	c.Close()
}
