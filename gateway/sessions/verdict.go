package sessions

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// commit proposes that the operation is done. Whatever the record says then is
// told to the hosts; the session as it is now comes back only if it was this.
func (o *operation) commit(snap *session.Snapshot) (session.Session, error) {
	if err := o.s.step("commit"); err != nil {
		return o.found, err
	}
	o.cutStreams(snap)
	now, committed, err := o.propose(func(ctx context.Context) (session.Session, bool, error) {
		return o.s.record.CommitOperation(ctx, o.found.ID, o.op.ID, snap)
	})
	if err == nil {
		err = o.s.step("committed")
	}
	if err != nil {
		return now, o.without(err)
	}
	if !committed {
		o.aborted()
		return now, fmt.Errorf("%s: %w", o.op.Kind, calledOff(now, o.op))
	}
	o.s.log.Info("operation committed", "operation", o.op.ID, "kind", o.op.Kind, "session", now.ID, "host", now.Host, "epoch", now.Epoch)
	o.committed(now)
	return now, nil
}

// cutStreams drops the kept streams to an agent whose memory a commit gives up:
// none goes on without it, and requests that wait for the commit must not take
// one. After an abort they are merely opened anew.
func (o *operation) cutStreams(snap *session.Snapshot) {
	if snap == nil {
		snap = o.found.Snapshot
	}
	if !snap.Memory {
		o.s.hosts.Forget(o.found.ID)
	}
}

// giveUp proposes that the operation never was, for a reason, which comes back.
func (o *operation) giveUp(why error) error {
	if errors.Is(why, errDied) {
		return why
	}
	why = fmt.Errorf("%s: %w", o.op.Kind, causeOf(o.ctx, why)) // now: the abort ends ctx too
	o.s.log.Warn("operation given up", "operation", o.op.ID, "kind", o.op.Kind, "session", o.found.ID, "error", why)
	_, _, err := o.propose(func(ctx context.Context) (session.Session, bool, error) {
		return o.s.record.AbortOperation(ctx, o.found.ID, o.op.ID)
	})
	if err != nil {
		_ = o.without(err) // the reason is the better answer
		return why
	}
	o.aborted() // a commit is proposed only after every step went well
	return why
}

// propose asks the record for a verdict until there is one: after an unknown
// result the same proposal is made again.
func (o *operation) propose(ask func(context.Context) (session.Session, bool, error)) (now session.Session, committed bool, err error) {
	ctx := context.WithoutCancel(o.ctx)
	err = patiently(ctx, time.Until(o.op.Deadline), func() error {
		now, committed, err = ask(ctx)
		return err
	})
	return now, committed, err
}

// without ends an operation that the record gave no verdict on.
func (o *operation) without(err error) error {
	switch {
	case errors.Is(err, errDied):
	case apierr.Is(err, apierr.SessionNotRunning) || apierr.Is(err, apierr.NotFound): // it ended meanwhile
		o.s.background(func(ctx context.Context) {
			if o.op.To != "" {
				o.s.tell(ctx, o.op.To, o.found.ID, hostlink.Verdict{OpID: o.op.ID})
			}
			if o.op.From != "" {
				o.s.endAt(ctx, o.op.From, hostlink.Tombstone{SessionID: o.found.ID, Epoch: o.found.Epoch, Reason: session.Released})
			}
		})
	default: // the leader aborts it at its deadline, and reconciling tells the hosts
		o.s.log.Warn("an operation is without a verdict", "operation", o.op.ID, "session", o.found.ID, "error", err)
	}
	return fmt.Errorf("%s: %w", o.op.Kind, err)
}

// committed lets the hosts know: first the one that the session waits for.
func (o *operation) committed(now session.Session) {
	s, v := o.s, hostlink.Verdict{OpID: o.op.ID, Committed: true}
	ctx := context.WithoutCancel(o.ctx)
	first, then := o.op.To, o.op.From
	if first == "" {
		first, then = then, ""
	}
	o.catchUp(ctx, now)
	s.tell(ctx, first, now.ID, v)
	s.background(func(ctx context.Context) {
		if then != "" {
			s.tell(ctx, then, now.ID, v)
		}
		if old := o.found.Snapshot; old != nil && now.Snapshot != nil && old.ID != now.Snapshot.ID {
			s.dropSnapshot(ctx, now.ID, *old) // now: reconciling would let those of many pauses pile up
		}
		if now.Status == session.Running { // what was changed since the restore began
			if err := s.tellSettings(ctx, now); err != nil {
				s.log.Debug("settings are told later", "session", now.ID, "error", err)
			}
		}
	})
}

// catchUp tells the target, before the verdict that lets its machine go on,
// what a PATCH has changed since its order: nothing runs by the proxy of before.
func (o *operation) catchUp(ctx context.Context, now session.Session) {
	had := o.told
	if o.op.Kind == session.Resume {
		had++ // the commit's own change, when it ends, is told after: it can wait
	}
	if o.op.To == "" || now.SettingsVersion <= had {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, o.s.pace.tell)
	defer cancel()
	o.s.spread(ctx, now)
}

// aborted lets the hosts know: first the source, where the session goes on.
func (o *operation) aborted() { o.s.tellAborted(context.WithoutCancel(o.ctx), o.found.ID, o.op) }

func (s *Service) tellAborted(ctx context.Context, id string, op session.Operation) {
	v := hostlink.Verdict{OpID: op.ID}
	if op.To != "" {
		s.background(func(ctx context.Context) { s.tell(ctx, op.To, id, v) })
	}
	if op.From != "" {
		s.tell(ctx, op.From, id, v)
	}
}

// tell gives a host the verdict. What it cannot be told now it hears when it
// is reconciled.
func (s *Service) tell(ctx context.Context, host, id string, v hostlink.Verdict) {
	ctx, cancel := context.WithTimeout(ctx, s.pace.tell)
	defer cancel()
	err := s.step("verdict " + host)
	if err == nil {
		err = patiently(ctx, s.pace.host, func() error {
			c, err := s.hosts.Client(host)
			if err == nil {
				err = s.giveVerdict(ctx, host, c, id, v)
			}
			return err
		})
	}
	if err != nil && !apierr.Is(err, apierr.NotFound) {
		s.log.Warn("a host hears the verdict later", "session", id, "operation", v.OpID, "committed", v.Committed, "host", host, "error", err)
	}
}

// endAt ends a session's machine at a host.
func (s *Service) endAt(ctx context.Context, host string, t hostlink.Tombstone) {
	_, err := s.hosts.End(ctx, host, t)
	if err != nil && !apierr.Is(err, apierr.SessionNotRunning) && !apierr.Is(err, apierr.NotFound) {
		s.log.Warn("a machine is ended later", "session", t.SessionID, "host", host, "error", err)
	}
}

// dropSnapshot deletes a snapshot that its session needs no more. While the host
// that holds it is away, another clears the blob store: the holder may never
// come back, and no inventory would tell of it.
func (s *Service) dropSnapshot(ctx context.Context, id string, snap session.Snapshot) {
	hosts := []string{snap.Host}
	for _, h := range s.hosts.List() {
		if h.Name != snap.Host {
			hosts = append(hosts, h.Name)
		}
	}
	for _, host := range hosts {
		c, err := s.hosts.Client(host)
		if err == nil && s.deleteSnapshot(ctx, host, c, snap.ID, id) == nil {
			return
		}
	}
	s.log.Warn("a snapshot is deleted when its host tells of it", "session", id, "snapshot", snap.ID, "host", snap.Host)
}

// background does something after the answer, not for long. Run waits for it.
func (s *Service) background(do func(ctx context.Context)) {
	done := s.after.begin()
	go func() {
		defer done()
		ctx, cancel := context.WithTimeout(context.Background(), s.pace.tell+endTime)
		defer cancel()
		do(ctx)
	}()
}
