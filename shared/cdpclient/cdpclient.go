// Package cdpclient is a small client of the Chrome DevTools Protocol over one
// WebSocket, for Berth's own command, tests and measurements. It speaks flat
// sessions (Target.attachToTarget with flatten) and knows no domain.
package cdpclient

import (
	"context"
	"encoding/json"
	"fmt"
	"sync"

	"github.com/berth-dev/berth/shared/ws"
)

// Client is one connection. All methods may be called at once.
type Client struct {
	conn *ws.Conn
	done chan struct{} // closed when the connection is over

	mu      sync.Mutex // guards what follows
	last    int64
	waiting map[int64]chan message
	events  map[string][]chan json.RawMessage
	err     error
}

// message is any frame of the protocol.
type message struct {
	ID        int64           `json:"id,omitempty"`
	SessionID string          `json:"sessionId,omitempty"`
	Method    string          `json:"method,omitempty"`
	Params    any             `json:"params,omitempty"`
	Result    json.RawMessage `json:"result,omitempty"`
	Error     *Error          `json:"error,omitempty"`
}

// incoming is message as it comes.
type incoming struct {
	ID        int64           `json:"id"`
	SessionID string          `json:"sessionId"`
	Method    string          `json:"method"`
	Params    json.RawMessage `json:"params"`
	Result    json.RawMessage `json:"result"`
	Error     *Error          `json:"error"`
}

// Error is Chrome's answer to a call that failed.
type Error struct {
	Code    int    `json:"code"`
	Message string `json:"message"`
}

func (e *Error) Error() string { return fmt.Sprintf("cdp: %s (%d)", e.Message, e.Code) }

// Dial connects to a connectUrl, or to Chrome's own webSocketDebuggerUrl.
func Dial(ctx context.Context, url string) (*Client, error) {
	conn, err := ws.Dial(ctx, url)
	if err != nil {
		return nil, fmt.Errorf("cdp: %w", err)
	}
	c := &Client{conn: conn, done: make(chan struct{}), waiting: map[int64]chan message{}, events: map[string][]chan json.RawMessage{}}
	go c.read()
	return c, nil
}

func (c *Client) read() {
	defer close(c.done)
	for {
		_, b, err := c.conn.Read(context.Background())
		var in incoming
		if err == nil {
			err = json.Unmarshal(b, &in)
		}
		if err != nil {
			c.fail(err)
			return
		}
		c.mu.Lock()
		if in.ID != 0 {
			if ch := c.waiting[in.ID]; ch != nil {
				delete(c.waiting, in.ID)
				ch <- message{Result: in.Result, Error: in.Error}
			}
		} else {
			for _, ch := range c.events[in.SessionID+"/"+in.Method] {
				select {
				case ch <- in.Params:
				default: // a slow listener misses events, the connection goes on
				}
			}
		}
		c.mu.Unlock()
	}
}

func (c *Client) fail(err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.err = fmt.Errorf("cdp: %w", err)
	for id, ch := range c.waiting {
		delete(c.waiting, id)
		close(ch)
	}
}

// Done is closed when the connection is over; Err then says why.
func (c *Client) Done() <-chan struct{} { return c.done }

// Err is why the connection is over.
func (c *Client) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.err
}

// CloseStatus is the close code of a connection that is over, -1 without one.
func (c *Client) CloseStatus() int { return int(ws.CloseStatus(c.Err())) }

// Close says goodbye.
func (c *Client) Close() error {
	err := c.conn.Close(ws.StatusNormal, "")
	<-c.done
	return err
}

// Call asks the browser (sessionID empty) or an attached target, and decodes
// the result into result unless that is nil.
func (c *Client) Call(ctx context.Context, sessionID, method string, params, result any) error {
	ch := make(chan message, 1)
	c.mu.Lock()
	if c.err != nil {
		c.mu.Unlock()
		return c.err
	}
	c.last++
	id := c.last
	c.waiting[id] = ch
	c.mu.Unlock()
	b, err := json.Marshal(message{ID: id, SessionID: sessionID, Method: method, Params: params})
	if err == nil {
		err = c.conn.Write(ctx, ws.Text, b)
	}
	if err != nil {
		c.forget(id)
		return fmt.Errorf("cdp: %s: %w", method, err)
	}
	select {
	case m, ok := <-ch:
		switch {
		case !ok:
			return c.Err()
		case m.Error != nil:
			return fmt.Errorf("%s: %w", method, m.Error)
		case result == nil:
			return nil
		}
		return json.Unmarshal(m.Result, result)
	case <-ctx.Done():
		c.forget(id)
		return fmt.Errorf("cdp: %s: %w", method, context.Cause(ctx))
	}
}

func (c *Client) forget(id int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.waiting, id)
}

// Events gives the params of an event from now on; the channel keeps 64.
func (c *Client) Events(sessionID, method string) <-chan json.RawMessage {
	ch := make(chan json.RawMessage, 64)
	c.mu.Lock()
	defer c.mu.Unlock()
	key := sessionID + "/" + method
	c.events[key] = append(c.events[key], ch)
	return ch
}
