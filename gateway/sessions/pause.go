package sessions

import (
	"context"
	"errors"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// Pause captures a session and frees its machine; a paused one stays so. A
// request that needs the session running calls a pause off.
func (s *Service) Pause(ctx context.Context, caller accounts.Caller, id string) (View, error) {
	found, err := s.Running(ctx, caller, id)
	if err != nil {
		return View{}, err
	}
	err = s.onLatest(ctx, &found, func() error {
		if found.Status == session.Paused && found.Op == nil {
			return nil
		}
		paused, err := s.pause(ctx, found)
		if err == nil {
			found = paused
		}
		return err
	})
	if err != nil {
		return View{}, err
	}
	return s.view(found), nil
}

func (s *Service) pause(ctx context.Context, found session.Session) (session.Session, error) {
	op := session.Operation{Kind: session.Pause, From: found.Host, Epoch: found.Epoch, Portable: !s.host(found.Host).KeepsMemory()}
	if err := s.mayCapture(found, op); err != nil {
		return found, err
	}
	o, err := s.open(ctx, found, op)
	if err != nil {
		return found, err
	}
	defer o.stop()
	snap, err := o.capture()
	if err != nil {
		return found, o.giveUp(err)
	}
	return o.commit(&snap)
}

// Move takes a running session to another machine, and says how long that
// took. A host that turns out to be full, or away, is passed over, unless it was
// asked for.
func (s *Service) Move(ctx context.Context, caller accounts.Caller, id string, req MoveRequest) (View, Timings, error) {
	var timings Timings
	found, err := s.Running(ctx, caller, id)
	if err == nil {
		err = s.onLatest(ctx, &found, func() error {
			targets, err := placement.MoveTargets(s.hosts.List(), found, req.Host, req.Region)
			if err != nil {
				return err
			}
			for _, to := range targets[:min(len(targets), moveTries)] {
				var next bool
				if found, timings, next, err = s.move(ctx, found, to); !next {
					break
				}
			}
			return err
		})
	}
	if err != nil {
		return View{}, Timings{}, err
	}
	return s.view(found), timings, nil
}

// moveTries bounds the targets of one move: the session stands still for each.
const moveTries = 3

func (s *Service) move(ctx context.Context, found session.Session, to placement.Host) (_ session.Session, _ Timings, next bool, _ error) {
	began := time.Now()
	op := session.Operation{Kind: session.Move, From: found.Host, To: to.Name, Region: to.Region, Epoch: found.Epoch + 1,
		Portable: !s.host(found.Host).FitsMemory(to)}
	if err := s.mayCapture(found, op); err != nil {
		return found, Timings{}, false, err
	}
	o, err := s.open(ctx, found, op)
	if err != nil {
		return found, Timings{}, false, err
	}
	defer o.stop()
	another := func(err error) bool { return apierr.Is(err, apierr.NoCapacity) || apierr.Is(err, apierr.Unavailable) }
	if err := o.prepare(); err != nil {
		return found, Timings{}, another(err), o.giveUp(err)
	}
	snap, err := o.capture()
	if err != nil {
		return found, Timings{}, false, o.giveUp(err)
	}
	if err := o.restore(snap); err != nil {
		return found, Timings{}, another(err), o.giveUp(err)
	}
	moved, err := o.commit(&snap)
	if err != nil {
		return found, Timings{}, false, err
	}
	o.timings.Total = time.Since(began)
	return moved, o.timings, false, nil
}

// mayCapture refuses, before anything stops, what would fail or do harm.
func (s *Service) mayCapture(found session.Session, op session.Operation) error {
	if found.Op != nil || found.Status != session.Running {
		return nil // the record says it better
	}
	if op.Portable && found.SetupStatus == session.SetupRunning {
		return apierr.New(apierr.OperationInProgress, "setup is still running, and this %s would cut it; try again when it is done", op.Kind).After(time.Second)
	}
	_, err := s.hosts.Client(found.Host)
	return err
}

// host gives what gossip says of a host; nothing of one that it does not know.
func (s *Service) host(name string) placement.Host {
	for _, h := range s.hosts.List() {
		if h.Name == name {
			return h
		}
	}
	return placement.Host{}
}

// lookAgain bounds how often an operation is made anew for a session that
// another one has changed meanwhile.
const lookAgain = 3

// onLatest does something with a session, and again with its latest state if
// that had changed.
func (s *Service) onLatest(ctx context.Context, found *session.Session, do func() error) error {
	for try := 1; ; try++ {
		err := do()
		if !errors.Is(err, session.ErrStale) || try == lookAgain {
			return err
		}
		if *found, err = s.session(ctx, found.ID, 0); err != nil {
			return err
		}
	}
}
