package front

import (
	"bytes"
	"net"
	"net/http"
	"syscall"

	"github.com/berth-dev/berth/proxyd/guard"
	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink/loop"
)

// ask serves a request that is a whole CONNECT.
func (q *quick) ask(b []byte) {
	text, rest, ok := "", b, q.refused == nil
	if ok {
		text, rest, ok = cutConnect(b)
	}
	if !ok {
		q.leave(b)
		return
	}
	q.protocol, q.text, q.ahead = "connect", text, bytes.Clone(rest)
	if q.wait(); q.added && !q.begin() {
		q.far = elsewhere
		go q.reach()
	}
}

// begin connects where that takes no waiting.
func (q *quick) begin() bool {
	t, r := egress.ParseTarget(q.text)
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
	if err := q.l.Add(far, q, true); err != nil {
		q.l.Close(far)
		return false
	}
	q.target, q.client.target, q.far = t, t.String(), far
	opened[egress.None].Inc()
	q.within(guard.DialTimeout)
	return true
}

// reach connects by waiting, in a goroutine of its own.
func (q *quick) reach() {
	w, r := q.s.reach(q.client, http.MethodConnect, q.text, func() (egress.Target, *egress.Refusal) { return egress.ParseTarget(q.text) })
	q.l.Call(func() { q.reached(w, r) })
}

func (q *quick) reached(w way, r *egress.Refusal) {
	q.far = none
	bare, ok := w.conn.(*net.TCPConn)
	switch {
	case q.cut && r == nil:
		w.conn.Close()
		q.drop()
	case q.cut:
		q.drop()
	case r != nil:
		q.tell(func() { q.answer(r) })
	case ok:
		q.join(bare, w)
	case !q.tell(func() { q.s.carry(q.client, w, q.ahead) }): // TLS
		w.conn.Close()
	}
}

// join begins the relay with a connection that was Go's.
func (q *quick) join(conn *net.TCPConn, w way) {
	far, err := loop.Take(conn)
	if err == nil {
		if err = q.l.Add(far, q, true); err != nil {
			q.l.Close(far)
		}
	}
	if err != nil {
		q.s.log.Warn("connect", "error", err)
		q.drop()
		return
	}
	w.flow.Down(int64(len(w.early)))
	q.far = far
	q.start(w.flow, append([]byte(established), w.early...), 0)
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
	q.start(q.meter.Via(egress.None), yes, events)
}

var yes = []byte(established)

// start begins the relay.
func (q *quick) start(flow *meter.Flow, toClient []byte, events uint32) {
	q.pass = nil // decided: a tunnel that stays open keeps no rules that changes have replaced
	ends := loop.Ends{A: q.fd, B: q.far, ToA: toClient, ToB: q.ahead, EventsA: q.events, EventsB: events, Up: flow.Up, Down: flow.Down}
	q.fd, q.far, q.ahead = none, none, nil
	q.relay = q.l.Start(ends, q.end)
}

func (q *quick) end(err error) {
	q.err = err
	q.Close()
}

// refuse has a goroutine say so.
func (q *quick) refuse(r *egress.Refusal) {
	q.l.Close(q.far)
	q.far = none
	q.tell(func() {
		q.s.refuse(q.client, http.MethodConnect, q.text, r)
		q.answer(r)
	})
}
