package front

import (
	"errors"
	"syscall"
	"time"

	"github.com/berth-dev/berth/proxyd/guard"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/proxylink/loop"
)

// quick is a connection while a loop has it: from accept until it is known to
// need more than the loop can do without waiting, which is then a goroutine's;
// or to its end. What a loop does is CONNECT to an address, straight out, for
// sessions that were here before: no goroutine, no lock that is held long, and
// of system calls those that move bytes.
type quick struct {
	*client
	l     *loop.Loop
	fd    int
	added bool
	met   bool // its Hello is read

	text   string        // CONNECT's target, as the client wrote it
	target egress.Target // where it is connected to
	far    int           // the socket for that; -1: none
	ahead  []byte        // what the client sent behind its request
	events uint32        // of the client's socket while the other one connects
	relay  *loop.Relay
}

// take begins with a connection that a loop accepted.
func (s *Server) take(l *loop.Loop, fd int) {
	accepted.Inc()
	c := &client{s: s, ctx: s.hard, began: time.Now()}
	q := &quick{client: c, l: l, fd: fd, far: -1}
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
	case q.far >= 0:
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
	case n == 0:
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

// ask serves a request that is CONNECT to an address, straight out.
func (q *quick) ask(b []byte) {
	if !q.begin(b) {
		q.leave(b)
	}
}

func (q *quick) begin(b []byte) bool {
	if q.refused != nil {
		return false
	}
	text, rest, ok := cutConnect(b)
	if !ok {
		return false
	}
	t, r := egress.ParseTarget(text)
	if r != nil || t.Name != "" {
		return false
	}
	if route, r := q.s.decide(q.client, t); route != nil || r != nil {
		return false
	}
	far, err := q.s.Guard.Begin(t)
	if err != nil {
		return false
	}
	q.protocol, q.text, q.target, q.client.target = "connect", text, t, t.String()
	q.ahead = append([]byte(nil), rest...)
	opened[egress.None].Inc()
	q.connect(far)
	return true
}

func (q *quick) connect(far int) {
	q.wait()
	if !q.added {
		q.l.Close(far)
		return
	}
	if err := q.l.Add(far, q, true); err != nil {
		q.s.log.Warn("connect", "error", err)
		q.l.Close(far)
		q.drop()
		return
	}
	q.far = far
	q.within(guard.DialTimeout)
}

// connected begins the relay, or leaves the refusal to a goroutine.
func (q *quick) connected(events uint32) {
	if events&(syscall.EPOLLOUT|syscall.EPOLLERR|syscall.EPOLLHUP) == 0 {
		return
	}
	if events&(syscall.EPOLLERR|syscall.EPOLLHUP) != 0 {
		if r := q.s.Guard.Connected(q.far, q.target); r != nil {
			q.refuse(r)
			return
		}
	}
	q.arrived()
	q.pass = nil // decided: a tunnel that stays open keeps no rules that changes have replaced
	flow := q.meter.Via(egress.None)
	far, fd := q.far, q.fd
	q.far, q.fd = -1, -1
	q.relay = q.l.Start(loop.Ends{A: fd, B: far, ToA: yes, ToB: q.ahead, EventsA: q.events, EventsB: events, Up: flow.Up, Down: flow.Down}, q.end)
	q.ahead = nil
}

var yes = []byte(established)

func (q *quick) end(err error) {
	q.err = err
	q.Close()
}

// refuse has a goroutine say so.
func (q *quick) refuse(r *egress.Refusal) {
	q.l.Close(q.far)
	q.far = -1
	if q.convert() {
		go func() {
			q.s.refuse(q.client, "CONNECT", q.text, r)
			q.answer(r)
		}()
	}
}

// leave gives the connection, with the bytes that were read, to a goroutine.
func (q *quick) leave(b []byte) {
	q.unread = append([]byte(nil), b...)
	if q.convert() {
		go q.s.serve(q.client, q.met)
	}
}

// convert makes the connection Go's.
func (q *quick) convert() bool {
	q.l.Remove(q.fd)
	tcp, err := adopt(q.fd)
	q.fd = -1
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
		q.far = -1
	}
	q.l.Close(q.fd)
	q.fd = -1
	q.Close()
}

// interrupted ends what the connection waits for, if it still does.
func (q *quick) interrupted() {
	late := q.due.Load() == late
	switch {
	case q.fd < 0: // a goroutine's, or a relay's, or closed
	case q.far >= 0 && late:
		q.refuse(q.s.Guard.Late(q.target))
	case q.far < 0 && (late || q.idle):
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
	case q.fd >= 0:
		q.drop()
	}
}
