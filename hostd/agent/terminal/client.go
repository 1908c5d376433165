package terminal

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"

	"github.com/berth-dev/berth/shared/ws"
)

// client is one attached WebSocket. Its own goroutine writes; another reads.
type client struct {
	conn  *ws.Conn
	queue []byte // guarded by shell.mu
	// more holds a token when there is something to send, leave when it must go.
	more  chan struct{}
	leave chan farewell
}

func (c *client) full() bool { return len(c.queue) >= queueSize }

// wake tells the writer of new output. Callers hold shell.mu.
func (c *client) wake() {
	select {
	case c.more <- struct{}{}:
	default:
	}
}

// dismiss makes the writer close the connection after what is queued. Callers
// hold shell.mu and have taken, or will take, the client off the list.
func (c *client) dismiss(f farewell) {
	select {
	case c.leave <- f:
	default: // it is leaving already
	}
}

func newClient(conn *ws.Conn) *client {
	return &client{conn: conn, more: make(chan struct{}, 1), leave: make(chan farewell, 1)}
}

// serve serves an attached client and returns when it is gone.
func (s *shell) serve(c *client) {
	ctx, cancel := context.WithCancel(context.Background()) // a request's own ends at the upgrade
	written := make(chan struct{})
	go func() {
		defer close(written)
		s.write(ctx, c)
		s.detach(c) // even while its input waits for the program
	}()
	s.input(ctx, c)
	cancel()
	<-written
	c.conn.CloseNow()
}

// write sends the queue as binary frames until the client leaves or must.
func (s *shell) write(ctx context.Context, c *client) {
	for {
		select {
		case <-c.more:
			if c.conn.Write(ctx, ws.Binary, s.take(c)) != nil {
				c.conn.CloseNow() // ends input
				return
			}
		case f := <-c.leave:
			if f.code != ws.StatusTryAgain { // who is too slow gets nothing more
				if rest := s.take(c); len(rest) > 0 {
					within, cancel := context.WithTimeout(ctx, s.stall)
					_ = c.conn.Write(within, ws.Binary, rest)
					cancel()
				}
			}
			c.conn.Close(f.code, f.reason)
			return
		case <-ctx.Done():
			return
		}
	}
}

// take empties the queue and tells the reader that there is room.
func (s *shell) take(c *client) []byte {
	s.mu.Lock()
	defer s.mu.Unlock()
	p := c.queue
	c.queue = nil
	s.room.Broadcast()
	return p
}

// frame is what a client sends (spec "Terminal WebSocket").
type frame struct {
	Type string  `json:"type"`
	Data *string `json:"data"`
	Cols *int    `json:"cols"`
	Rows *int    `json:"rows"`
}

// input obeys the client's frames until it leaves; a frame that is none of the
// protocol closes it with 1003 and the reason.
func (s *shell) input(ctx context.Context, c *client) {
	for {
		kind, p, err := c.conn.Read(ctx)
		if err != nil {
			return
		}
		f, err := parseFrame(kind, p)
		if err == nil && f.Type == "resize" {
			err = s.resize(*f.Cols, *f.Rows)
		} else if err == nil {
			// A program that does not read its input holds up this client only.
			_, err = s.tty.WriteString(*f.Data)
			if err != nil {
				<-s.done // bash has ended: the writer says so
				return
			}
		}
		if err != nil {
			c.conn.Close(ws.StatusUnsupported, err.Error())
			return
		}
	}
}

// parseFrame reads one frame; the error is a reason of at most 123 bytes (RFC
// 6455 5.5).
func parseFrame(kind ws.MessageType, p []byte) (frame, error) {
	var f frame
	if kind != ws.Text {
		return f, errors.New("want text frames")
	}
	d := json.NewDecoder(bytes.NewReader(p))
	if err := d.Decode(&f); err != nil {
		return f, errors.New("want a JSON object with type input or resize")
	}
	switch f.Type {
	case "input":
		if f.Data == nil {
			return f, errors.New("input: data must be a string")
		}
	case "resize":
		if f.Cols == nil || f.Rows == nil || !size(*f.Cols) || !size(*f.Rows) {
			return f, errors.New("resize: cols and rows must be 1 to 1000")
		}
	default:
		return f, errors.New("type must be input or resize")
	}
	return f, nil
}

func size(n int) bool { return n >= 1 && n <= 1000 }
