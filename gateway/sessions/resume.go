package sessions

import (
	"context"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// Resume brings a paused session back; a running one stays as it is, and a
// resume under way is joined.
func (s *Service) Resume(ctx context.Context, caller accounts.Caller, id string) (View, error) {
	found, err := s.Running(ctx, caller, id)
	if err == nil {
		found, err = s.awake(ctx, found, false)
	}
	if err != nil {
		return View{}, err
	}
	return s.view(found), nil
}

// Awake gives the session as it runs now, for a request that has to work with
// it: a paused one is resumed first, an open operation is waited for, but a pause
// that is not committed yet is called off. Errors: session_not_running when it
// has ended, plan_limit (402), spend_limit, concurrency_limit, no_capacity,
// unavailable.
func (s *Service) Awake(ctx context.Context, found session.Session) (session.Session, error) {
	return s.awake(ctx, found, true)
}

// Watch gives a session and a channel that closes when it may have changed;
// false when the record does not know it.
func (s *Service) Watch(id string) (session.Session, bool, <-chan struct{}) {
	return s.record.View().WatchSession(id)
}

// awake waits until the session runs and nothing is under way. Without the
// right to interfere, an operation that is no resume is operation_in_progress.
func (s *Service) awake(ctx context.Context, found session.Session, interfere bool) (session.Session, error) {
	giveUp := time.Now().Add(s.cfg.OperationDeadline)
	for wait := awakeAgain; ; {
		now, ok, changed := s.Watch(found.ID)
		if !ok {
			return found, notFound(found.ID)
		}
		if err := running(now); err != nil {
			return now, err
		}
		switch {
		case now.Op == nil && now.Status == session.Running:
			return now, nil
		case now.Op == nil:
			resumed, err := s.resume(ctx, now)
			if !apierr.Is(err, apierr.OperationInProgress) || time.Now().After(giveUp) {
				return resumed, err
			}
			// Another request was quicker, or a host still has to hear of the
			// operation before.
			if err := waitFor(ctx, wait); err != nil {
				return now, err
			}
			wait = min(2*wait, time.Second)
		case now.Op.Kind != session.Resume && !interfere:
			return now, apierr.New(apierr.OperationInProgress, "session %s is in the middle of a %s; try again when it is done", now.ID, now.Op.Kind)
		case now.Op.Kind == session.Pause:
			if err := s.callOff(ctx, now); err != nil && !apierr.Is(err, apierr.OperationInProgress) {
				return now, err
			}
		default:
			if err := OutlastOperation(ctx, now, changed, s.pace.tell); err != nil {
				return now, err
			}
		}
	}
}

// awakeAgain is the first wait before another look at a session that could not
// be resumed because something else was under way.
const awakeAgain = 20 * time.Millisecond

func waitFor(ctx context.Context, d time.Duration) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
		return nil
	}
}

// callOff ends a pause before its commit, if it comes first.
func (s *Service) callOff(ctx context.Context, found session.Session) error {
	ctx = context.WithoutCancel(ctx)
	_, committed, err := s.record.AbortOperation(ctx, found.ID, found.Op.ID)
	if err == nil && !committed {
		s.log.Info("a request called a pause off", "operation", found.Op.ID, "session", found.ID)
		s.tellAborted(ctx, found.ID, *found.Op)
	}
	return err
}

// resume brings a paused session back. Of many at once one does it, and all
// have its answer; it goes on when they have left.
func (s *Service) resume(ctx context.Context, found session.Session) (session.Session, error) {
	answer := s.resuming.DoChan(found.ID, func() (any, error) {
		defer s.after.begin()()
		return s.resumeSomewhere(context.WithoutCancel(ctx), found)
	})
	select {
	case r := <-answer:
		return r.Val.(session.Session), r.Err
	case <-ctx.Done():
		return found, context.Cause(ctx)
	}
}

// resumeSomewhere tries the hosts in order of preference until one has room.
func (s *Service) resumeSomewhere(ctx context.Context, found session.Session) (session.Session, error) {
	if err := s.mayProxyAgain(found); err != nil {
		return found, err
	}
	targets, err := placement.ResumeTargets(s.hosts.List(), found)
	if err != nil {
		return found, err
	}
	resumed := found
	for _, to := range targets {
		var next bool
		if resumed, next, err = s.resumeAt(ctx, found, to); !next {
			break
		}
	}
	return resumed, err
}

func (s *Service) resumeAt(ctx context.Context, found session.Session, to placement.Host) (_ session.Session, next bool, _ error) {
	o, err := s.open(ctx, found, session.Operation{Kind: session.Resume, To: to.Name, Region: to.Region, Epoch: found.Epoch + 1,
		SnapshotID: found.Snapshot.ID, Portable: !found.Snapshot.Memory})
	if err != nil {
		return found, false, err
	}
	defer o.stop()
	if err := o.restore(*found.Snapshot); err != nil {
		next = apierr.Is(err, apierr.NoCapacity) || apierr.Is(err, apierr.Unavailable) || apierr.Is(err, apierr.OperationInProgress) ||
			found.Snapshot.Durable && apierr.Is(err, apierr.Internal) // the host's copy may be damaged: another takes the blob store's
		return found, next, staysPaused(o.giveUp(err))
	}
	resumed, err := o.commit(nil)
	return resumed, false, err
}

// staysPaused is the answer to a resume that no host could do: nothing is lost
// by it. What the snapshot holds cannot be had in another form: a memory is
// written for a machine like its own, and nothing beside it.
func staysPaused(err error) error {
	e := apierr.From(err)
	code := e.Code
	switch code {
	case apierr.NotFound: // the snapshot; the session is there
		code = apierr.Internal
	case apierr.Internal, apierr.Unavailable:
	default:
		return err
	}
	return apierr.Wrap(err, code, "%s; the session stays paused", e.Message).After(e.RetryAfter)
}
