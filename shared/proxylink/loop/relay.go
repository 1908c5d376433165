package loop

import (
	"errors"
	"sync/atomic"
)

// Relay carries bytes both ways between a and b until both directions ended or
// one failed. The end of one direction is passed on as a half-close; a failure
// resets both, so that nothing lingers in the kernel. Connections are never cut
// for being idle.
type Relay struct {
	at     atomic.Pointer[Loop] // whose it is; only that loop's goroutine touches what follows
	queued bool                 // it has a quota in the next turn, and none before
	ends   [2]end
	ways   [2]way
	down   Counter
	added  bool // its sockets are in at
	over   bool
	cut    error // why it is to end once they are
	done   func(error)
}

// Ends says what a relay is between.
type Ends struct {
	A, B             int    // connected sockets that do not block
	ToA, ToB         []byte // goes first, and is nobody's to change any more
	EventsA, EventsB uint32 // what the loop told of them already
	// Counters are told of what passed B, as soon as it did: Up of what B took,
	// Down of what B gave, also where A did not take it: what lies unread at a
	// reset was received all the same.
	Up, Down Counter
}

// Start relays between sockets that were added to l, A without EPOLLOUT and B
// with it, and closes both. done is told how it ended, nil for an orderly end of
// both directions, by a goroutine that must not wait. Loop's goroutine only.
func (l *Loop) Start(e Ends, done func(error)) *Relay {
	r := newRelay(e, done)
	r.at.Store(l)
	r.ends[1].out, r.added = true, true
	l.Hand(e.A, r)
	l.Hand(e.B, r)
	r.run()
	return r
}

// StartNew is Start with sockets that no loop knows yet. From any goroutine.
func StartNew(e Ends, done func(error)) (*Relay, error) {
	all, err := quicks()
	if err != nil {
		return nil, err
	}
	l := all[int(pairs.next.Add(1))%len(all)]
	r := newRelay(e, done)
	r.at.Store(l)
	l.Call(func() { r.adopt(l) })
	return r, nil
}

func newRelay(e Ends, done func(error)) *Relay {
	r := &Relay{ends: [2]end{{fd: e.A, writable: true}, {fd: e.B, writable: true}}, down: e.Down, done: done}
	a, b := &r.ends[0], &r.ends[1]
	a.note(e.EventsA)
	b.note(e.EventsB)
	r.ways = [2]way{{from: a, to: b, written: e.Up, held: e.ToB}, {from: b, to: a, read: e.Down, held: e.ToA}}
	return r
}

// Cancel ends a relay with a reset of both sides, soon; cause is how it ended.
// From any goroutine.
func (r *Relay) Cancel(cause error) {
	l := r.at.Load()
	l.Call(func() {
		switch {
		case r.at.Load() != l:
			r.Cancel(cause) // it moved
		case !r.added:
			r.cut = cause
		case !r.over:
			r.fail(cause)
		}
	})
}

// Ready takes note of events.
func (r *Relay) Ready(fd int, events uint32) {
	if fd == r.ends[0].fd {
		r.ends[0].note(events)
	} else {
		r.ends[1].note(events)
	}
	if !r.queued {
		r.run()
	}
}

// run moves what can be moved in a turn.
func (r *Relay) run() {
	if r.over {
		return
	}
	l, again := r.at.Load(), false
	for i := range r.ways {
		more, err := r.ways[i].turn(l)
		if err == nil {
			err = r.pass(&r.ways[i], &r.ways[1-i])
		}
		if err != nil {
			r.fail(err)
			return
		}
		again = again || more
	}
	bulk := r.ways[0].bulk || r.ways[1].bulk
	switch {
	case r.ways[0].ended && r.ways[1].ended:
		r.finish(nil)
	case bulk && l.bulk != nil:
		r.move(l, l.bulk)
	case !bulk && l.quick != nil:
		r.move(l, l.quick)
	case again:
		l.later(r)
	}
}

// pass passes the end of a way on; of the second one closing does it.
func (r *Relay) pass(w, other *way) error {
	if !w.eof || w.ended || w.in > 0 || len(w.held) > 0 {
		return nil
	}
	w.ended = true
	if other.ended {
		return nil
	}
	if err := CheckEnd(w.from.fd); err != nil {
		return err
	}
	return shutdown(w.to.fd)
}

// move gives the relay to another loop.
func (r *Relay) move(from, to *Loop) {
	for i := range r.ends {
		from.Remove(r.ends[i].fd)
	}
	r.added = false
	r.at.Store(to)
	to.Call(func() { r.adopt(to) })
}

// adopt begins with a relay that comes from elsewhere.
func (r *Relay) adopt(l *Loop) {
	err := r.cut
	for i := range r.ends {
		r.ends[i].out = true
		err = errors.Join(err, l.Add(r.ends[i].fd, r, true))
	}
	r.added = true
	if r.cut != nil {
		err = r.cut
	}
	if err != nil {
		r.fail(err)
		return
	}
	r.run()
}

// fail resets both sides.
func (r *Relay) fail(err error) {
	r.down.Add(int(unread(r.ends[1].fd))) // nobody reads any more
	for i := range r.ends {
		reset(r.ends[i].fd)
	}
	r.finish(err)
}

func (r *Relay) finish(err error) {
	r.over = true
	l := r.at.Load()
	for i := range r.ways {
		if p := r.ways[i].pipe; p != nil { // what is in it is nobody's
			p.close()
			r.ways[i].pipe = nil
		}
	}
	l.Close(r.ends[1].fd)
	l.Close(r.ends[0].fd)
	r.done(err)
}
