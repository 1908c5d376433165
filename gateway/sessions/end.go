package sessions

import (
	"context"
	"errors"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Release ends a session by request.
func (s *Service) Release(ctx context.Context, caller accounts.Caller, id string) (View, error) {
	found, err := s.find(ctx, caller, id)
	if err == nil {
		err = running(found)
	}
	if err != nil {
		return View{}, err
	}
	// From here on the end does not depend on the client's staying.
	ctx = context.WithoutCancel(ctx)
	ended, err := s.release(ctx, found)
	if err != nil {
		return View{}, err
	}
	return s.view(ended), nil
}

const endTime = 10 * time.Second

// release ends a session at its host and in the record, side by side. Either
// is enough: a host that cannot be reached is told when it is reconciled, and
// without a quorum the host's tombstone is taken into the record later. A paused
// session has no machine: only the record ends it. What an operation under way
// left on hosts is ended after; but while one is open the host is not enough,
// since a commit may yet make another machine the session, or a snapshot.
func (s *Service) release(ctx context.Context, found session.Session) (session.Session, error) {
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	now := time.Now().UTC()
	host := make(chan error, 1)
	machine := found.Status == session.Running
	go func() {
		var err error
		if machine {
			_, err = s.hosts.End(ctx, found.Host, hostlink.Tombstone{SessionID: found.ID, Epoch: found.Epoch, Reason: session.Released})
		}
		host <- err
	}()
	ended, already, err := s.record.EndSession(ctx, found.ID, 0, now, session.Released, "")
	errHost := <-host
	switch {
	case already: // by its timeout, or another's request, a moment ago
		err = running(ended)
	case err == nil:
		if errHost != nil {
			s.log.Warn("a released session's machine is ended later", "session", found.ID, "host", found.Host, "error", errHost)
		}
		s.cleanUp(found, ended)
	case machine && errHost == nil && !apierr.Is(err, apierr.SessionNotRunning) && s.settled(found):
		s.log.Warn("the record learns of a release later", "session", found.ID, "error", err)
		ended, err = session.End(found, now, session.Released, "")
	}
	return ended, err
}

// settled says whether the session's one machine is where found has it.
func (s *Service) settled(found session.Session) bool {
	now, ok := s.record.View().Session(found.ID)
	return ok && now.Op == nil && now.Status == session.Running && now.Epoch == found.Epoch
}

// cleanUp ends what an ended session has on hosts besides the machine that it
// was last seen with.
func (s *Service) cleanUp(found, ended session.Session) {
	s.hosts.Forget(found.ID)
	if found.Status == session.Paused {
		s.closeLog(found, ended)
	}
	if snap := found.Snapshot; snap != nil {
		s.background(func(ctx context.Context) { s.dropSnapshot(ctx, found.ID, *snap) })
	}
	if op := found.Op; op != nil && op.To != "" {
		s.background(func(ctx context.Context) {
			s.tell(ctx, op.To, found.ID, hostlink.Verdict{OpID: op.ID})
		})
	}
	if ended.Host != found.Host || ended.Epoch != found.Epoch {
		s.background(func(ctx context.Context) {
			s.endAt(ctx, ended.Host, hostlink.Tombstone{SessionID: ended.ID, Epoch: ended.Epoch, Reason: session.Released})
		})
	}
}

// closeLog tells the host of a paused session that it has ended: the host has
// no machine of it, but its events, whose readers wait for the last.
func (s *Service) closeLog(found, ended session.Session) {
	s.background(func(ctx context.Context) {
		s.endAt(ctx, found.Host, hostlink.Tombstone{SessionID: found.ID, Epoch: found.Epoch, Reason: ended.EndReason, Error: ended.Error})
	})
}

// releasing is how many sessions ReleaseAll ends at once.
const releasing = 16

// ReleaseAll ends every running or paused session of the project and gives them all;
// what could not be ended is an error beside those that were.
func (s *Service) ReleaseAll(ctx context.Context, caller accounts.Caller) ([]View, error) {
	ctx = context.WithoutCancel(ctx)
	all, err := s.allLiving(caller)
	if err != nil {
		return nil, err
	}
	ended := make([]*View, len(all)) // nil: by itself meanwhile, or not at all
	errs := make([]error, len(all))
	var group errgroup.Group
	group.SetLimit(releasing)
	for i, f := range all {
		group.Go(func() error {
			now, err := s.release(ctx, f)
			if err == nil {
				v := s.view(now)
				ended[i] = &v
			} else if !apierr.Is(err, apierr.SessionNotRunning) {
				errs[i] = err
			}
			return nil
		})
	}
	_ = group.Wait() // each has its own error
	views := []View{}
	for _, v := range ended {
		if v != nil {
			views = append(views, *v)
		}
	}
	return views, errors.Join(errs...)
}

func (s *Service) allLiving(caller accounts.Caller) (all []session.Session, err error) {
	view := s.record.View()
	for _, status := range []session.Status{session.Running, session.Paused} {
		for cursor := ""; ; {
			found, next, err := view.Sessions(placement.Filter{Project: caller.ProjectID, Status: status, Cursor: cursor, Limit: 1000})
			if err != nil {
				return nil, err
			}
			if all = append(all, found...); next == "" {
				break
			}
			cursor = next
		}
	}
	return all, nil
}

// WebSocket close codes (decisions "CDP").
const (
	closeReleased = 1000
	closeRotated  = 1008
	closeLost     = 1011
	closeTimeout  = 4000
)

// WatchEnd waits until sockets of this session, opened with its URLs as found
// says, have to close, and says how. The zero Ended means that ctx ended first.
func (s *Service) WatchEnd(ctx context.Context, found session.Session) Ended {
	for {
		now, ok, changed := s.record.View().WatchSession(found.ID)
		switch {
		case !ok:
			return Ended{CloseCode: closeLost, Reason: "gone", At: time.Now()}
		case now.Status.Ended():
			return endOf(now)
		case found.URLKeyVersion < now.CutBelow:
			return Ended{CloseCode: closeRotated, Reason: "rotated", At: time.Now()}
		}
		select {
		case <-ctx.Done():
			return Ended{}
		case <-changed:
		}
	}
}

func endOf(s session.Session) Ended {
	e := Ended{CloseCode: closeReleased, Reason: string(s.EndReason), At: s.EndedAt}
	switch {
	case s.Status == session.Error:
		e.CloseCode, e.Reason = closeLost, "error"
	case s.EndReason == session.TimedOut:
		e.CloseCode = closeTimeout
	}
	return e
}
