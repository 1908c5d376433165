package sessions

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Create makes a session. existing says that the idempotency key had made it
// before.
func (s *Service) Create(ctx context.Context, caller accounts.Caller, req CreateRequest) (v View, existing bool, err error) {
	if err := accounts.CheckTimeout(caller.Plan, req.Timeout); err != nil {
		return v, false, err
	}
	ctx, cancel := context.WithTimeoutCause(ctx, s.cfg.CreateDeadline,
		apierr.New(apierr.NoCapacity, "no machine was ready within %s; try again soon", s.cfg.CreateDeadline).After(2*time.Second))
	defer cancel()
	if req.IdempotencyKey != "" {
		finish, err := s.once.begin(ctx, caller.ProjectID+"\x00"+req.IdempotencyKey)
		if err != nil {
			return v, false, err
		}
		defer finish()
	}
	found, existing, err := s.place(ctx, caller, req)
	if err != nil {
		return v, false, err
	}
	return s.view(found), existing, nil
}

// place tries the hosts in order of preference until one has a machine.
func (s *Service) place(ctx context.Context, caller accounts.Caller, req CreateRequest) (found session.Session, existing bool, err error) {
	hosts, err := placement.Choose(s.hosts.List(), req.Kind, req.Region, req.StrictRegion)
	if err != nil {
		return found, false, err
	}
	for _, host := range hosts {
		var next bool
		found, existing, next, err = s.attempt(ctx, caller, s.draft(caller, req, host), req)
		if !next || ctx.Err() != nil {
			break
		}
	}
	return found, existing, err
}

func (s *Service) draft(caller accounts.Caller, req CreateRequest, host placement.Host) session.Session {
	now := time.Now().UTC().Truncate(time.Millisecond)
	d := session.Session{ID: uuid.NewString(), ProjectID: caller.ProjectID, Region: host.Region, Kind: req.Kind,
		KeepAlive: req.KeepAlive, Timeout: req.Timeout, Viewport: req.Viewport, UserMetadata: req.UserMetadata,
		Captcha: req.Captcha, Status: session.Running, CreatedAt: now, StartedAt: now,
		ExpiresAt: session.Expiry(now, req.Timeout), Host: host.Name, Epoch: 1, URLKeyVersion: 1, SettingsVersion: 1,
		RunningSince: now, Key: newKey(), StrictRegion: req.StrictRegion && req.Region != ""}
	if len(req.Setup) > 0 {
		d.SetupStatus = session.SetupRunning
	}
	return d
}

// attempt commits the session and acquires its machine; side by side when the
// record is sure to agree, so that the latency is the larger of the two. Where
// it may well refuse, it speaks before a machine is taken: creates over the
// limit must not use the warm machines up. Whatever fails, nothing is left: the machine is given back and the record
// forgets what nobody was told of. next says that another host may do better;
// when the record is what failed, none does.
func (s *Service) attempt(ctx context.Context, caller accounts.Caller, draft session.Session, req CreateRequest) (found session.Session, existing, next bool, err error) {
	fits, decided, err := s.turn(ctx, caller)
	if err != nil {
		return found, false, false, fmt.Errorf("create: %w", err)
	}
	sure := fits && req.IdempotencyKey == "" && s.record.Leader()
	order := hostlink.Acquire{SessionID: draft.ID, ProjectID: draft.ProjectID, Epoch: draft.Epoch, Kind: draft.Kind,
		Viewport: draft.Viewport, Setup: req.Setup, Settings: settings(draft)}
	acquired := make(chan error, 1)
	actx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	acquire := func() {
		_, err := s.hosts.Acquire(actx, draft.Host, order)
		acquired <- err
	}
	if sure {
		go acquire()
	}
	found, existing, err = s.record.CreateSession(ctx, draft, req.IdempotencyKey)
	decided()
	switch {
	case err != nil && sure:
		cancel(err)
		<-acquired
		s.undo(ctx, draft)
	case err != nil && apierr.Is(err, apierr.Unavailable): // it may be in the log all the same
		s.undo(ctx, draft)
	}
	if err != nil {
		return found, false, false, fmt.Errorf("create: %w", causeOf(ctx, err))
	}
	if existing {
		return found, true, false, nil
	}
	if !sure {
		acquire()
	}
	if err := <-acquired; err != nil {
		s.undo(ctx, draft)
		next = apierr.Is(err, apierr.NoCapacity) || apierr.Is(err, apierr.Unavailable)
		return found, false, next, fmt.Errorf("create: %w", causeOf(ctx, err))
	}
	return found, false, false, nil
}

// turn is when a create may ask the record. One that fits into its project's
// limit beside all that came before asks at once; one that does not asks after
// those that do, or it would take the place of one that has a machine already.
// decided has to be called when the record has answered.
func (s *Service) turn(ctx context.Context, caller accounts.Caller) (fits bool, decided func(), err error) {
	fits, before, decided := s.creating.enter(caller.ProjectID, func(others int) bool {
		return s.record.View().Counted(caller.ProjectID)+others < caller.Plan.ConcurrentSessions
	})
	for _, other := range before {
		select {
		case <-other:
		case <-ctx.Done():
			decided()
			return false, nil, context.Cause(ctx)
		}
	}
	return fits, decided, nil
}

// causeOf prefers why the context ended over what that broke.
func causeOf(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return cause
	}
	return err
}

const undoTime = 10 * time.Second

// undo takes back a create that nobody was told of. It goes on when the client
// has left; what it cannot reach now, reconciling ends.
func (s *Service) undo(ctx context.Context, draft session.Session) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), undoTime)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := s.hosts.End(ctx, draft.Host, hostlink.Tombstone{SessionID: draft.ID, Epoch: draft.Epoch, Reason: session.Released})
		ended <- err
	}()
	errDrop := s.record.DropSession(ctx, draft.ID)
	if err := errors.Join(<-ended, errDrop); err != nil {
		s.log.Warn("a failed create is cleared later", "session", draft.ID, "host", draft.Host, "error", err)
	}
}

// flights lets one create at a time run for each idempotency key.
type flights struct {
	mu  sync.Mutex
	now map[string]chan struct{} // guarded by mu; closed at the end
}

func (f *flights) begin(ctx context.Context, key string) (finish func(), err error) {
	for {
		f.mu.Lock()
		if f.now == nil {
			f.now = map[string]chan struct{}{}
		}
		other, busy := f.now[key]
		if !busy {
			mine := make(chan struct{})
			f.now[key] = mine
			f.mu.Unlock()
			return func() {
				f.mu.Lock()
				delete(f.now, key)
				f.mu.Unlock()
				close(mine)
			}, nil
		}
		f.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// tally keeps the creates of each project that the record has not decided yet.
type tally struct {
	mu  sync.Mutex
	now map[string][]undecided // guarded by mu
}

// undecided is one such create.
type undecided struct {
	fits bool          // into the limit, beside all that came before
	done chan struct{} // closed when it is decided
}

// enter notes one more, until decided is called. fits is asked whether it fits
// beside others; one that does not has to wait for those before it that do.
func (t *tally) enter(project string, fits func(others int) bool) (ok bool, before []chan struct{}, decided func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	others := t.now[project]
	mine := undecided{fits(len(others)), make(chan struct{})}
	for _, other := range others {
		if other.fits && !mine.fits {
			before = append(before, other.done)
		}
	}
	if t.now == nil {
		t.now = map[string][]undecided{}
	}
	t.now[project] = append(others, mine)
	return mine.fits, before, func() { t.leave(project, mine) }
}

func (t *tally) leave(project string, mine undecided) {
	t.mu.Lock()
	defer t.mu.Unlock()
	close(mine.done)
	t.now[project] = slices.DeleteFunc(t.now[project], func(u undecided) bool { return u.done == mine.done })
	if len(t.now[project]) == 0 {
		delete(t.now, project)
	}
}
