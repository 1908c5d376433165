package session

import (
	"net"
	"sync"
)

// gate holds the tunnels to one machine's agent: a machine that stops for an
// operation cuts them, since nobody would answer, and the session link dials
// again wherever the session goes on. Safe for concurrent use.
type gate struct {
	mu    sync.Mutex // guards what follows
	open  bool
	conns map[net.Conn]bool
}

// add registers a tunnel; false: the gate is shut. leave undoes it.
func (g *gate) add(c net.Conn) (leave func(), ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.open {
		return nil, false
	}
	if g.conns == nil {
		g.conns = map[net.Conn]bool{}
	}
	g.conns[c] = true
	return func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		delete(g.conns, c)
	}, true
}

// isOpen says whether a tunnel may begin.
func (g *gate) isOpen() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.open
}

// set opens the gate, or shuts it and cuts what goes through.
func (g *gate) set(open bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.open = open
	if open {
		return
	}
	for c := range g.conns {
		c.Close()
	}
	clear(g.conns)
}
