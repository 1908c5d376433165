package session

import (
	"context"
	"net"
	"sync"
)

// gate holds the tunnels to one machine's agent: a machine that stops for an
// operation cuts them, since nobody would answer, and the session link dials
// again wherever the session goes on. Before a machine that is about to go on
// they wait, so that they are through in the moment it does. Safe for concurrent
// use.
type gate struct {
	mu     sync.Mutex // guards what follows
	state  gateState
	turned chan struct{} // closed at the next change; nil: nobody waits for one
	conns  map[net.Conn]bool
}

type gateState int

const (
	gateShut gateState = iota
	gateSoon           // shut, and likely to open
	gateOpen
)

// add registers a tunnel; false: the gate is shut. leave undoes it.
func (g *gate) add(c net.Conn) (leave func(), ok bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.state != gateOpen {
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
	return g.state == gateOpen
}

// wait returns whether a tunnel may begin, once that is known or ctx ends.
func (g *gate) wait(ctx context.Context) bool {
	for {
		state, turned := g.look()
		if state != gateSoon {
			return state == gateOpen
		}
		select {
		case <-turned:
		case <-ctx.Done():
			return false
		}
	}
}

func (g *gate) look() (gateState, <-chan struct{}) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.turned == nil {
		g.turned = make(chan struct{})
	}
	return g.state, g.turned
}

// set opens the gate, or shuts it and cuts what goes through.
func (g *gate) set(open bool) {
	if open {
		g.turn(gateOpen)
	} else {
		g.turn(gateShut)
	}
}

// soon has whoever comes wait: the machine is about to go on.
func (g *gate) soon() { g.turn(gateSoon) }

func (g *gate) turn(to gateState) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.state = to
	if g.turned != nil {
		close(g.turned)
		g.turned = nil
	}
	if to == gateOpen {
		return
	}
	for c := range g.conns {
		c.Close()
	}
	clear(g.conns)
}
