package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

const (
	// thawTime is what a machine has to go on, thawTry its agent for one answer.
	thawTime = time.Minute
	thawTry  = 20 * time.Second
	// thawAgain is how long an agent that did not answer is left alone.
	thawAgain = 100 * time.Millisecond
)

// judge carries a verdict out. Whatever it changes is in the book first.
func (s *live) judge(v hostlink.Verdict, reply chan answer) {
	op := s.rec.Op
	if op == nil || op.ID != v.OpID {
		reply <- answer{err: unknownOp(v.OpID, s.id)}
		return
	}
	forUs := v.Committed == (op.Role == hostlink.Target)
	switch {
	case s.phase == held && !forUs:
		reply <- answer{err: s.discard(&v)}
	case s.phase == held && s.died == nil:
		reply <- answer{err: s.bereave(v)}
	case s.phase == held:
		s.goOn(v, reply)
	case s.phase == capturing && forUs: // called off while it is captured
		s.settle()
		s.answer(answer{err: notCaptured(errors.New("the operation was aborted"))})
		s.goOn(v, reply)
	case s.phase == going && forUs:
		s.waiting = append(s.waiting, reply)
	default:
		reply <- answer{err: fmt.Errorf("verdict on %s: committed %v contradicts what this host knows", v.OpID, v.Committed)}
	}
}

// bereave ends a session whose verdict is for a machine that has died.
func (s *live) bereave(v hostlink.Verdict) error {
	op := *s.rec.Op
	if op.Role == hostlink.Target {
		if err := s.host.book.Discard(s.rec, &v, nil); err != nil {
			return unwritten(err)
		}
	}
	s.end(hostlink.Tombstone{EndedAt: time.Now(), Error: "The session's machine ended unexpectedly while it stood still for " + a(op.Kind) + "."})
	return errEnded
}

// unwritten is the answer to a verdict that the book refuses.
func unwritten(err error) error {
	return apierr.Wrap(err, apierr.Unavailable, "the host cannot write the verdict down; tell it again").After(time.Second)
}

func unknownOp(op, id string) error {
	return apierr.New(apierr.NotFound, "operation %s of session %s is not known on this host", op, id)
}

// a names an operation in a sentence.
func a(k session.OpKind) string { return "a " + string(k) }

// goOn sets the machine going after a verdict for it; reply is answered when
// the session runs.
func (s *live) goOn(v hostlink.Verdict, reply chan answer) {
	rec, op := s.rec, *s.rec.Op
	op.Going = true
	rec.Op = &op
	if err := s.host.book.GoOn(rec, v); err != nil {
		if s.phase == capturing { // it was called off all the same, and no answer was given
			s.setGoing()
		}
		reply <- answer{err: unwritten(err)}
		return
	}
	s.rec = rec
	s.host.place(s)
	s.waiting = append(s.waiting, reply)
	s.setGoing()
}

// setGoing begins to thaw the machine.
func (s *live) setGoing() {
	s.phase = going
	s.gate.soon()
	op := *s.rec.Op
	op.Going = true
	s.rec.Op = &op
	s.openWay() // in place before anything inside runs
	proxy := shellProxy(s.rec.Acquire)
	s.knows = &proxy
	s.begin(func(ctx context.Context) (out outcome) {
		ctx, cancel := context.WithTimeoutCause(ctx, thawTime, fmt.Errorf("not going within %s", thawTime))
		defer cancel()
		out.state, out.err = s.thaw(ctx, op, proxy)
		return out
	})
}

// thaw lets the machine go on. The customer's processes run when clock, entropy
// and identity are right, which is the agent's part.
func (s *live) thaw(ctx context.Context, op Op, proxy agentlink.Proxy) (st agentlink.State, err error) {
	step := newSteps("thaw")
	defer step.log(s.log)
	if op.Role == hostlink.Target {
		if err := s.guest.Machine.Promote(ctx); err != nil {
			return st, err
		}
	}
	if k := s.kept(); k != nil {
		if err := k.Thaw(ctx); err != nil {
			return st, err
		}
	}
	step.done("cont")
	if op.Memory { // its agent is the one that the streams know, and keeps them waiting where it must
		s.gate.set(true)
	}
	// Asked before the customer's processes want the processors too; who comes or
	// leaves from here on the agent tells.
	err = s.insist(ctx, func(ctx context.Context) (err error) {
		st, err = s.guest.Agent.State(ctx)
		return err
	})
	if err == nil && st.SessionID != s.id {
		err = fmt.Errorf("the machine says it is session %q", event.Cut(st.SessionID, 64))
	}
	step.done("answer")
	if err == nil {
		order := pool.Thaw(false)
		order.Proxy = &proxy
		err = s.insist(ctx, func(ctx context.Context) error { return s.guest.Agent.Thaw(ctx, order) })
	}
	step.done("agent")
	return st, err
}

// insist asks until the agent has answered: the first connections after a
// restore may be lost.
func (s *live) insist(ctx context.Context, ask func(context.Context) error) error {
	for {
		try, cancel := context.WithTimeoutCause(ctx, thawTry, fmt.Errorf("no answer within %s", thawTry))
		err := ask(try)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return errors.Join(context.Cause(ctx), err)
		case <-time.After(thawAgain):
		}
	}
}

// gone takes in how the thaw ended.
func (s *live) gone(out outcome) {
	op := *s.rec.Op
	if out.err != nil {
		s.log.Error("a machine did not go on", "op", op.ID, "error", out.err)
		s.end(hostlink.Tombstone{EndedAt: time.Now(), Error: "The session's machine did not go on after " + a(op.Kind) + "."})
		return
	}
	rec := s.rec
	rec.Op = nil
	if op.Role == hostlink.Target {
		rec.Snapshot = op.SnapshotID
		s.arrived(op) // before the book has it: twice is better than never
	} else {
		rec.Stood += time.Since(op.Since)
	}
	if err := s.write(rec); err != nil { // then the next hostd thaws it again, which does nothing
		s.log.Warn("that the session goes on is not in the book", "error", err)
		s.rec = rec
	}
	s.count(out.state)
	grace := session.DisconnectGrace
	if op.Role == hostlink.Target && !op.Memory && op.HadClients {
		s.hadClients, grace = true, agentlink.GraceAfterPlatformClose
	}
	s.awake(grace)
	if op.Role == hostlink.Source && s.host.snapshots.Has(op.SnapshotID) {
		s.host.later("a snapshot of no more use", op.SnapshotID, func(ctx context.Context, id string) error {
			return s.host.snapshots.Delete(ctx, id, s.id)
		})
	}
	st := s.status()
	s.host.tell(hostlink.Notice{Status: &st})
	s.answer(answer{status: st})
}

// arrived says, in the session's log, that it runs again, and how.
func (s *live) arrived(op Op) {
	if !op.Memory { // another agent, which numbers what it tells anew
		if err := s.host.events.SetNotice(s.id, 0); err != nil {
			s.log.Warn("the agent's first events may be lost", "error", err)
		}
	}
	reason := "resumed"
	if op.Kind == session.Move {
		reason = "moved"
	}
	s.host.record(s.id, event.Event{Type: event.Lifecycle, Text: "Session is running.",
		Data: mustJSON(withProxy(s.rec.Acquire.Settings, map[string]any{"state": session.Running, "reason": reason, "memory": op.Memory}))})
	s.log.Info("session goes on here", "op", op.ID, "reason", reason, "memory", op.Memory)
}

// discard gives the machine up after a verdict against it, nil when the session
// ended meanwhile. A source leaves a mark, so that orders of its epoch come too
// late, and no tombstone: the session has not ended.
func (s *live) discard(v *hostlink.Verdict) error {
	op := *s.rec.Op
	var left *Left
	if op.Role == hostlink.Source {
		left = &Left{SessionID: s.id, Epoch: s.epoch, At: time.Now().UTC(), Kind: op.Kind, SnapshotID: op.SnapshotID, Memory: op.Memory, Baggage: s.baggage(s.rec)}
		if op.Captured != nil {
			left.Bytes = op.Captured.Snapshot.Bytes
		}
	}
	if err := s.host.book.Discard(s.rec, v, left); err != nil {
		return unwritten(err)
	}
	switch {
	case op.Role == hostlink.Target:
		s.host.abandon(s.id, op)
	case op.Kind == session.Pause:
		s.host.paused(*left)
	case s.host.findTarget(s.id) == nil: // not a move to this very host
		s.host.leaveLog(s.id)
	}
	s.log.Info("machine given up", "op", op.ID, "kind", op.Kind, "role", op.Role)
	s.leave()
	return nil
}

// paused says, in the session's log, that it is in a snapshot now.
func (h *Host) paused(l Left) {
	h.record(l.SessionID, event.Event{At: l.At, Type: event.Lifecycle, Text: "Session is paused.",
		Data: mustJSON(map[string]any{"state": session.Paused, "reason": "paused", "memory": l.Memory, "bytes": l.Bytes})})
}

// baggage is what goes with the session to its next host.
func (s *live) baggage(rec Record) hostlink.Baggage {
	return hostlink.Baggage{Setup: rec.Setup, SetupErr: rec.SetupErr, HadClients: rec.Op.HadClients,
		Notice: s.host.events.LastNotice(s.id), LastSeq: s.host.events.Last(s.id)}
}

// Verdict carries out what the record decided about an operation. Told again it
// does nothing. On a host that is both source and target the source goes first:
// two of a session never run.
func (h *Host) Verdict(ctx context.Context, id string, v hostlink.Verdict) error {
	known, err := h.callOff(ctx, id, v)
	for _, s := range []*live{h.find(id), h.findTarget(id)} {
		if s == nil || err != nil {
			continue
		}
		switch _, err = s.ask(ctx, order{verdict: &v}); {
		case err == nil:
			known = true
		case errors.Is(err, errEnded):
			err = h.gone(id)
		case apierr.Is(err, apierr.NotFound):
			err = nil
		}
	}
	if err != nil || known {
		return err
	}
	old, known, err := h.book.Verdict(v.OpID)
	if err == nil && !known {
		err = unknownOp(v.OpID, id)
	} else if err == nil && old.Committed != v.Committed {
		err = fmt.Errorf("verdict on %s: committed %v, and the opposite before", v.OpID, v.Committed)
	}
	return err
}
