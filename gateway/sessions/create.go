package sessions

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/google/uuid"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Create makes a session. existing says that the idempotency key had made it
// before.
func (s *Service) Create(ctx context.Context, caller accounts.Caller, req CreateRequest) (v View, existing bool, err error) {
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
	if err := s.mayCreate(caller, req); err != nil {
		// What was made with the key was allowed then.
		if made, ok := s.record.View().MadeWith(caller.ProjectID, req.IdempotencyKey); ok {
			return s.view(made), true, nil
		}
		return v, false, err
	}
	found, existing, err := s.place(ctx, caller, req)
	if err != nil {
		return v, false, err
	}
	return s.view(found), existing, nil
}

// mayCreate holds a request against the project's plan, what was used of it
// (402) before its bounds (403).
func (s *Service) mayCreate(caller accounts.Caller, req CreateRequest) error {
	if err := s.mayProxy(caller.ProjectID, caller.Plan, req.Proxy); err != nil {
		return err
	}
	return accounts.CheckTimeout(caller.Plan, req.Timeout)
}

// place tries the hosts in order of preference until one has a machine.
func (s *Service) place(ctx context.Context, caller accounts.Caller, req CreateRequest) (found session.Session, existing bool, err error) {
	hosts, err := placement.Choose(s.hosts.List(), req.Kind, req.Region, req.StrictRegion)
	if err != nil {
		return found, false, err
	}
	if hosts, err = s.withProxyd(hosts, req); err != nil {
		if made, ok := s.record.View().MadeWith(caller.ProjectID, req.IdempotencyKey); ok {
			return made, true, nil
		}
		return found, false, err
	}
	for _, host := range hosts {
		var draft session.Session
		if draft, err = s.draft(caller, req, host); err != nil {
			return found, false, err
		}
		t := s.creating.enter(caller.ProjectID, func(others int) bool {
			return s.record.View().Counted(caller.ProjectID)+others < caller.Plan.ConcurrentSessions
		})
		var next bool
		found, existing, next, err = s.attempt(ctx, draft, req, t)
		t.leave()
		if !next || ctx.Err() != nil {
			break
		}
	}
	return found, existing, err
}

// proxydRetry is how soon a proxyd may be back.
const proxydRetry = 2 * time.Second

// withProxyd leaves out the hosts in whose region no proxyd answers, where the
// session needs one: its browser has no other way out, nor has a shell whose
// traffic is to go through a proxy. proxy_unavailable when none is left.
func (s *Service) withProxyd(hosts []placement.Host, req CreateRequest) ([]placement.Host, error) {
	if !req.Kind.HasBrowser() && req.Proxy.Scope() != egress.ScopeAll {
		return hosts, nil
	}
	var fit []placement.Host
	for _, h := range hosts {
		if s.cfg.Proxyds.Reachable(h.Region) {
			fit = append(fit, h)
		}
	}
	if len(fit) == 0 {
		return nil, apierr.New(apierr.ProxyUnavailable, "the proxy service that sessions reach the internet through is away: try again shortly").After(proxydRetry)
	}
	return fit, nil
}

func (s *Service) draft(caller accounts.Caller, req CreateRequest, host placement.Host) (d session.Session, err error) {
	now := time.Now().UTC().Truncate(time.Millisecond)
	d = session.Session{ID: uuid.NewString(), ProjectID: caller.ProjectID, Region: host.Region, Kind: req.Kind,
		KeepAlive: req.KeepAlive, Timeout: req.Timeout, Viewport: req.Viewport, UserMetadata: req.UserMetadata,
		Captcha: req.Captcha, Status: session.Running, CreatedAt: now, StartedAt: now,
		ExpiresAt: session.Expiry(now, req.Timeout), Host: host.Name, Epoch: 1, URLKeyVersion: 1, SettingsVersion: 1,
		RunningSince: now, Key: newKey(), ProxySeed: newSeed(), StrictRegion: req.StrictRegion && req.Region != ""}
	if len(req.Setup) > 0 {
		d.SetupStatus = session.SetupRunning
	}
	d.Proxy, err = s.sealed(d.ID, req.Proxy)
	return d, err
}

// newSeed makes what a session's sticky ids are drawn from.
func newSeed() []byte {
	seed := make([]byte, 16)
	_, _ = rand.Read(seed) // never fails since Go 1.24
	return seed
}

// attempt commits the session and acquires its machine; side by side when the
// record is sure to agree, so that the latency is the larger of the two. Where it
// may well refuse, it speaks before a machine is taken: creates over the limit
// must not use the warm machines up.
// Whatever fails, nothing is left: the machine is given back and the record
// forgets what nobody was told of. next says that another host may do better;
// when the record is what failed, none does.
func (s *Service) attempt(ctx context.Context, draft session.Session, req CreateRequest, t *turn) (found session.Session, existing, next bool, err error) {
	set, err := s.settings(draft, draft.Epoch)
	if err != nil {
		return found, false, false, err
	}
	order := hostlink.Acquire{SessionID: draft.ID, ProjectID: draft.ProjectID, Epoch: draft.Epoch, Kind: draft.Kind,
		Viewport: draft.Viewport, Setup: req.Setup, Settings: set}
	sure := t.room && req.IdempotencyKey == "" && s.record.Leader()
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
	if err = t.wait(ctx); err == nil {
		found, existing, err = s.record.CreateSession(ctx, draft, req.IdempotencyKey)
	}
	t.answered()
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
