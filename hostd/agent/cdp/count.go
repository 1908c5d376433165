package cdp

import (
	"sync"
	"time"
)

// count is the number of CDP clients, those in grace included.
type count struct {
	grace time.Duration
	tell  func(n int) // under mu, so that tellings come in order

	mu      sync.Mutex // guards what follows
	n       int
	ever    bool                     // somebody was counted at some time
	timers  map[*time.Timer]struct{} // one for each client in grace
	stopped bool
}

func newCount(grace time.Duration, tell func(int)) *count {
	return &count{grace: grace, tell: tell, timers: map[*time.Timer]struct{}{}}
}

func (c *count) now() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func (c *count) had() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ever
}

// enter counts a client. One that comes while others are in grace is taken to
// be one of those, back again.
func (c *count) enter() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ever = true
	for t := range c.timers {
		delete(c.timers, t)
		t.Stop()
		return // its place in n is taken over
	}
	c.n++
	c.tell(c.n)
}

// leave ends a client's count: at once, or after the grace when the platform,
// not the client, closed its socket.
func (c *count) leave(byPlatform bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.stopped {
		return
	}
	if !byPlatform {
		c.n--
		c.tell(c.n)
		return
	}
	var t *time.Timer
	t = time.AfterFunc(c.grace, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		if _, waiting := c.timers[t]; waiting {
			delete(c.timers, t)
			c.n--
			c.tell(c.n)
		}
	})
	c.timers[t] = struct{}{}
}

// stop ends all graces silently; the machine is ending.
func (c *count) stop() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stopped = true
	for t := range c.timers {
		delete(c.timers, t)
		t.Stop()
	}
}
