// Package session runs the sessions of one host: one goroutine owns one
// session, from the machine it was given to the tombstone it leaves, or to the
// operation by which it goes on elsewhere (DESIGN.md).
package session

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// phase is where a live session stands in an operation.
type phase int

const (
	running   phase = iota
	capturing       // it is being stopped and captured: a work is under way
	held            // it stands still until the verdict
	going           // it is being set going again: a work is under way
)

// live is a session whose machine is here. Its run goroutine owns the fields
// from rec on; others send it orders. Those above never change.
type live struct {
	host  *Host
	guest *pool.Guest // nil where the machine died while it was held
	log   *slog.Logger
	id    string
	epoch uint64
	gate  gate

	orders chan order              // of others
	heard  chan agentlink.Notice   // what the agent told
	done   chan struct{}           // closed when the session is over here
	cancel context.CancelCauseFunc // ends the listener and works
	ctx    context.Context

	rec        Record
	phase      phase
	over       bool
	work       *work
	waiting    []chan answer   // who is answered when the work is done
	reach      []reach         // who waits for notices
	died       <-chan struct{} // the machine's; nil once that is known
	deadline   *time.Timer
	left       *time.Timer // fires when the last client has been away long enough
	deaf       context.CancelFunc
	clients    int
	hadClients bool
	notice     uint64             // number of the last notice taken
	way        Way                // nil: none was opened yet
	knows      *agentlink.Proxy   // what the agent knows of the shell's proxy, nil: nobody knows
	telling    bool               // it is being told
	untold     int                // how often it did not answer that
	awaitTold  []chan answer      // who waits until it knows
	tomb       hostlink.Tombstone // valid after done
}

// order is one request to the owner: exactly one field is set, or none to ask
// for the status. reply has room for one.
type order struct {
	settings *hostlink.Settings
	end      *hostlink.Tombstone
	capture  *hostlink.Capture
	verdict  *hostlink.Verdict
	drop     bool   // of a target: the session ended meanwhile
	reach    uint64 // answered when the agent's notices up to it were taken
	reply    chan answer

	told      *telling     // how an order about the shell's proxy ended
	awaitTold bool         // answered when the agent knows of the shell's proxy
	event     *event.Event // for the log
}

type answer struct {
	status   hostlink.Status
	captured hostlink.Captured
	await    bool // what was ordered is worth waiting for: see awaitTold
	rec      Record
	err      error
}

var errEnded = errors.New("the session has ended")

// newLive makes the owner of a session in a phase: running, held, or going.
func newLive(h *Host, g *pool.Guest, rec Record, p phase, st agentlink.State) *live {
	ctx, cancel := context.WithCancelCause(h.ctx)
	s := &live{host: h, guest: g, rec: rec, phase: p, id: rec.Acquire.SessionID, epoch: rec.Acquire.Epoch,
		log:    h.log.With("session", rec.Acquire.SessionID, "machine", rec.MachineID),
		orders: make(chan order), heard: make(chan agentlink.Notice), done: make(chan struct{}), ctx: ctx, cancel: cancel,
		deadline: stopped(), left: stopped(), deaf: func() {}}
	if g != nil {
		s.died = g.Machine.Done()
	}
	switch op := rec.Op; {
	case p == running:
		s.gate.set(true)
	case p == going, op != nil && op.Role == hostlink.Target:
		s.gate.soon()
	}
	s.count(st)
	return s
}

func stopped() *time.Timer {
	t := time.NewTimer(time.Hour)
	t.Stop()
	return t
}

// count takes over how many clients the agent says it has.
func (s *live) count(st agentlink.State) {
	s.clients, s.hadClients = max(0, st.Clients), s.hadClients || st.HadClients
}

// run owns the session until it is over here, or hostd stops.
func (s *live) run() {
	defer s.cancel(errEnded)
	s.notice = s.host.events.LastNotice(s.id)
	switch s.phase {
	case running:
		s.awake(session.DisconnectGrace)
	case going:
		s.setGoing()
	}
	for !s.over && s.step() {
	}
	s.settle()
	s.deadline.Stop()
	s.left.Stop()
}

// step takes one thing that happens; false when hostd stops: the session goes
// on without it.
func (s *live) step() bool {
	select {
	case <-s.ctx.Done():
		return false
	case <-s.died:
		s.machineDied()
	case <-s.deadline.C:
		s.end(hostlink.Tombstone{EndedAt: s.rec.expired(), Reason: session.TimedOut})
	case <-s.left.C:
		s.end(hostlink.Tombstone{EndedAt: time.Now(), Reason: session.Disconnected})
	case n := <-s.heard:
		s.take(n)
	case out := <-s.work.result():
		s.worked(out)
	case o := <-s.orders:
		s.obey(o)
	}
	return true
}

func (s *live) obey(o order) {
	switch {
	case o.end != nil:
		s.settle() // release always wins
		s.drain()
		s.end(*o.end)
		o.reply <- answer{}
	case o.drop && s.phase != held: // the verdict came first: it is the session, of a later epoch
		o.reply <- answer{}
	case o.drop:
		o.reply <- answer{err: s.discard(nil)}
	case o.told != nil:
		s.toldShell(*o.told)
		o.reply <- answer{}
	case o.awaitTold:
		s.awaitTold = append(s.awaitTold, o.reply)
		s.answerTold()
	case o.event != nil:
		o.reply <- answer{err: s.recordEvent(*o.event)}
	case o.settings != nil:
		fresh, err := s.patch(*o.settings)
		o.reply <- answer{await: fresh || s.untold == 0, err: err}
	case o.capture != nil:
		s.capture(*o.capture, o.reply)
	case o.verdict != nil:
		s.judge(*o.verdict, o.reply)
	case o.reach > 0:
		s.reach = append(s.reach, reach{o.reach, o.reply})
		s.reached()
	default:
		o.reply <- answer{status: s.status(), rec: s.rec}
	}
}

func (s *live) status() hostlink.Status {
	st := hostlink.Status{SessionID: s.id, Epoch: s.epoch, Since: s.rec.Since,
		Warm: s.rec.Warm, Clients: s.clients, Setup: s.rec.Setup, SetupErr: s.rec.SetupErr, Version: s.rec.Acquire.Version,
		PassExpires: s.rec.Acquire.PassExpires}
	if op := s.rec.Op; op != nil && !op.Going {
		st.Held = &hostlink.Held{OpID: op.ID, Role: op.Role}
	}
	return st
}

// awake starts what a running session has: its clocks, its listener, its
// tunnels. grace is what a first client has to come back.
func (s *live) awake(grace time.Duration) {
	s.phase = running
	s.deadline.Reset(time.Until(s.rec.deadline()))
	s.watchClients(grace)
	s.hear()
	s.tellShell()
	s.gate.set(true)
}

// still stops the clocks: while a machine stands still no time of its passes.
func (s *live) still() {
	s.deadline.Stop()
	s.left.Stop()
}

// watchClients starts or stops the clock of "last client left" (spec lifetime
// rules 2 and 3).
func (s *live) watchClients(grace time.Duration) {
	counts := s.rec.Acquire.Kind == session.Browser && !s.rec.Acquire.KeepAlive
	if counts && s.hadClients && s.clients == 0 && s.phase == running {
		s.left.Reset(grace)
	} else {
		s.left.Stop()
	}
}

// machineDied ends the session, unless it is held: then the verdict says what
// the death means, for the session may live on elsewhere.
func (s *live) machineDied() {
	s.died = nil
	if s.phase == held {
		s.log.Warn("the machine ended while it was held for an operation", "op", s.rec.Op.ID)
		return
	}
	s.settle()
	s.end(hostlink.Tombstone{EndedAt: time.Now(), Error: "The session's machine ended unexpectedly."})
}

// patch carries an order of settings out; fresh says that it was more than
// another pass.
func (s *live) patch(set hostlink.Settings) (fresh bool, err error) {
	now, fresh, ok := newer(s.rec.Acquire.Settings, set, s.epoch)
	if !ok {
		return false, nil // an older order that came late
	}
	rec := s.rec
	if rec.Acquire.Settings = now; fresh {
		rec.Patched = time.Now().UTC()
	}
	news, changed := proxyNews(s.rec.Acquire.Settings, now)
	if err := s.write(rec); err != nil {
		if !fresh && s.phase != held && s.way != nil {
			s.way.Show(now.Pass) // good all the same: a full disk locks no session out
		}
		return fresh, err
	}
	if s.phase != held {
		s.openWay()
		if changed {
			s.host.record(s.id, news)
		}
	}
	s.tellShell()
	if s.phase == running && fresh {
		s.deadline.Reset(time.Until(s.rec.deadline()))
		s.watchClients(session.DisconnectGrace)
	}
	return fresh, nil
}

// write puts the record into the book and, if that takes it, in force.
func (s *live) write(rec Record) error {
	put := s.host.book.PutSession
	if rec.Op != nil && rec.Op.Role == hostlink.Target && !rec.Op.Going {
		put = s.host.book.PutTarget
	}
	if err := put(rec); err != nil {
		return err
	}
	s.rec = rec
	return nil
}

// end writes the tombstone, tells the watchers and takes the machine down. The
// tombstone is durable first: whatever dies after it, the session is over.
func (s *live) end(t hostlink.Tombstone) {
	t.SessionID, t.Epoch = s.id, s.epoch
	s.host.bury(t, s.rec.MachineID)
	s.tomb = t
	s.host.finish(t)
	if s.rec.Op != nil || s.rec.Snapshot != "" {
		s.host.later("the snapshots of a session that has ended", s.id, s.host.snapshots.DeleteSession)
	}
	s.leave()
	s.host.tell(hostlink.Notice{Ended: &t})
	s.log.Info("session ended", "reason", t.Reason, "error", t.Error)
}

// leave makes the host forget the session and takes its machine down.
func (s *live) leave() {
	s.over = true
	s.gate.set(false)
	s.shutWay()
	s.host.forget(s)
	close(s.done)
	if s.guest != nil {
		s.host.discard(s.guest)
	}
}

// kept is the machine where it keeps its memory, nil where it does not.
func (s *live) kept() machine.Kept {
	k, _ := s.guest.Machine.(machine.Kept)
	return k
}

// ask sends an order to the owner and waits for its answer.
func (s *live) ask(ctx context.Context, o order) (answer, error) {
	o.reply = make(chan answer, 1)
	select {
	case s.orders <- o:
	case <-s.done:
		return answer{}, errEnded
	case <-s.ctx.Done():
		return answer{}, s.stopped()
	case <-ctx.Done():
		return answer{}, context.Cause(ctx)
	}
	select {
	case a := <-o.reply:
		return a, a.err
	case <-ctx.Done():
		return answer{}, context.Cause(ctx)
	case <-s.ctx.Done():
		select {
		case a := <-o.reply: // the owner's last
			return a, a.err
		default:
			return answer{}, s.stopped()
		}
	}
}

// stopped is why an owner takes no orders any more.
func (s *live) stopped() error {
	select {
	case <-s.done: // the owner's end also ends its context
		return errEnded
	default:
		return stopping()
	}
}

func mustJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain maps of strings and numbers cannot fail
	}
	return b
}
