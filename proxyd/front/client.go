package front

import (
	"bufio"
	"context"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/pass"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// client is one connection from a machine. It reads through a buffer, so the
// first bytes can be looked at, and settles its account when it closes. One
// goroutine at a time owns it; idle is guarded by Server.mu.
type client struct {
	net.Conn // tcp, without its ReadFrom and WriteTo, which would go past r
	tcp      *net.TCPConn
	r        *bufio.Reader
	s        *Server
	ctx      context.Context // ends when draining is over
	began    time.Time

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

// add books a new connection as open.
func (s *Server) add(ctx context.Context, conn *net.TCPConn) *client {
	c := &client{Conn: conn, tcp: conn, r: readers.Get().(*bufio.Reader), s: s, ctx: ctx, began: time.Now()}
	c.r.Reset(conn)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients[c] = struct{}{}
	s.done.Add(1)
	return c
}

// Read reads what was buffered first.
func (c *client) Read(p []byte) (int, error) { return c.r.Read(p) }

// Close ends the connection and settles its account. Idempotent.
func (c *client) Close() error {
	c.closeOnce.Do(func() {
		c.tcp.Close()
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
	_ = c.tcp.SetLinger(0)
	c.tcp.Close()
}

// interrupt ends a wait for the first byte.
func (c *client) interrupt() { _ = c.SetReadDeadline(time.Unix(1, 0)) }

const late = -1

// within bounds what is awaited next.
func (c *client) within(d time.Duration) {
	c.arrived()
	c.due.Store(time.Now().Add(d).UnixNano())
}

// arrived ends the bound: what was awaited is here, were it at the last moment.
func (c *client) arrived() {
	if c.due.Swap(0) == late {
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

// first waits for the first byte and leaves it in the buffer: without a limit,
// because browsers connect ahead of need, but of a connection that is refused
// anyway, and counts nowhere, not for long.
func (c *client) first() (byte, error) {
	c.arrived()
	if c.r.Buffered() > 0 {
		b, _ := c.r.Peek(1)
		return b[0], nil
	}
	if c.refused != nil {
		c.within(refusedTimeout)
	}
	c.s.mu.Lock()
	if c.s.draining {
		c.s.mu.Unlock()
		return 0, net.ErrClosed
	}
	c.idle = true
	c.s.mu.Unlock()
	b, err := c.r.Peek(1)
	c.s.mu.Lock()
	c.idle = false
	c.s.mu.Unlock()
	if err != nil {
		return 0, err
	}
	return b[0], nil
}

// startsWith looks at the first bytes and leaves them in the buffer.
func (c *client) startsWith(text string) bool {
	b, _ := c.r.Peek(len(text))
	return string(b) == text
}

// buffered is what was read ahead, good until the next read.
func (c *client) buffered() []byte {
	b, _ := c.r.Peek(c.r.Buffered())
	return b
}

// release gives the buffer back: from here on only tcp is read.
func (c *client) release() {
	c.r.Reset(nil)
	readers.Put(c.r)
	c.r = nil
}

// lingerClose closes after an answer that the client must get: closing with
// unread bytes would reset the connection and the answer with it.
func (c *client) lingerClose() {
	_ = c.tcp.CloseWrite()
	_ = c.SetReadDeadline(time.Now().Add(time.Second))
	_, _ = io.CopyN(io.Discard, c.r, 256<<10)
	c.Close()
}
