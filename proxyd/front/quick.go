package front

import (
	"errors"
	"syscall"
	"time"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/proxylink/loop"
)

// quick is a connection while a loop has it: from accept until it turns out to
// need what a loop, which must not wait, cannot do; or to its end. A loop does
// CONNECT for sessions that were here before, to an address straight out by
// itself: no goroutine, no lock that is held long, and of system calls those that
// move bytes. For a name or a proxy a goroutine makes the connection, and ends.
type quick struct {
	*client
	l     *loop.Loop
	fd    int
	added bool
	met   bool // its Hello is read

	text   string        // CONNECT's target, as the client wrote it
	target egress.Target // where it is connected to
	far    int           // the socket for that, none or elsewhere
	cut    bool          // it is to end once the far one is there
	ahead  []byte        // what the client sent behind its request
	events uint32        // of the client's socket while the other one connects
	relay  *loop.Relay
}

const (
	none      = -1
	elsewhere = -2 // a goroutine connects
)

// take begins with a connection that a loop accepted.
func (s *Server) take(l *loop.Loop, fd int) {
	accepted.Inc()
	c := &client{s: s, ctx: s.hard, began: time.Now()}
	q := &quick{client: c, l: l, fd: fd, far: none}
	c.quick.Store(q)
	s.mu.Lock()
	s.clients[c] = struct{}{}
	s.done.Add(1)
	s.mu.Unlock()
	c.within(helloTimeout)
	q.read()
}

// Ready is told of the client's socket, and of the far one while it connects.
func (q *quick) Ready(fd int, events uint32) {
	switch {
	case fd == q.far:
		q.connected(events)
	case q.far != none:
		q.events |= events
	default:
		q.read()
	}
}

// read takes what came; the first bytes are often here with the connection.
func (q *quick) read() {
	b := q.l.Scratch()
	n, err := loop.Read(q.fd, b)
	switch {
	case errors.Is(err, syscall.EAGAIN):
		q.wait()
	case n == 0: // the end, or a reset
		q.drop()
	case q.met:
		q.s.mu.Lock()
		q.idle = false
		q.s.mu.Unlock()
		q.ask(b[:n])
	default:
		q.meet(b[:n])
	}
}

// wait waits for the client.
func (q *quick) wait() {
	if q.added {
		return
	}
	if err := q.l.Add(q.fd, q, false); err != nil {
		q.s.log.Warn("accept", "error", err)
		q.drop()
		return
	}
	q.added = true
}

// meet reads a Hello of a session that was here before.
func (q *quick) meet(b []byte) {
	body, sealed, rest, whole, err := proxylink.CutFrame(b)
	hello, known := q.s.hellos.find(body)
	if err != nil || !whole || !known || !q.s.passes.Known(time.Now(), hello.SessionID, sealed) {
		q.leave(b)
		return
	}
	q.arrived()
	q.s.admit(q.client, hello, sealed)
	q.met = true
	if len(rest) > 0 {
		q.ask(rest)
		return
	}
	if q.listen() {
		q.wait()
		return
	}
	q.drop()
}

// tell has a goroutine finish the connection by f.
func (q *quick) tell(f func()) bool {
	if !q.convert() {
		return false
	}
	go f()
	return true
}

// leave gives the connection, with the bytes that were read, to a goroutine.
func (q *quick) leave(b []byte) {
	q.unread = append([]byte(nil), b...)
	q.tell(func() { q.s.serve(q.client, q.met) })
}

// convert makes the connection Go's.
func (q *quick) convert() bool {
	q.l.Remove(q.fd)
	tcp, err := adopt(q.fd)
	q.fd = none
	if err != nil {
		q.s.log.Warn("accept", "error", err)
		q.Close()
		return false
	}
	q.become(tcp)
	return true
}

// drop closes a connection that nothing was answered to.
func (q *quick) drop() {
	if q.far >= 0 {
		q.l.Close(q.far)
		q.far = none
	}
	q.l.Close(q.fd)
	q.fd = none
	q.Close()
}

// interrupted ends what the connection waits for, if it still does.
func (q *quick) interrupted() {
	late := q.due.Load() == late
	switch {
	case q.fd < 0: // a goroutine's, or a relay's, or closed
	case q.far >= 0 && late:
		q.refuse(q.s.Guard.Late(q.target))
	case q.far == none && (late || q.idle):
		q.drop()
	}
}

// abort ends it with a reset.
func (q *quick) abort() {
	switch {
	case q.quick.Load() == nil: // it became a goroutine's meanwhile
		q.client.abort()
	case q.relay != nil:
		q.relay.Cancel(errStops)
	case q.far == elsewhere:
		q.cut = true
	case q.fd >= 0:
		q.drop()
	}
}
