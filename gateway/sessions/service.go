package sessions

import (
	"context"
	"crypto/rand"
	"log/slog"
	"net"
	"net/http"
	"time"

	"golang.org/x/sync/singleflight"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

// Hosts is what the use cases need of the living hosts.
type Hosts interface {
	List() []placement.Host
	Changed() <-chan struct{}
	Client(name string) (*hostlink.Client, error)
	Acquire(ctx context.Context, host string, a hostlink.Acquire) (hostlink.Status, error)
	End(ctx context.Context, host string, t hostlink.Tombstone) (hostlink.Tombstone, error)
	// DialAgent opens a stream of the session link to a session's agent.
	DialAgent(ctx context.Context, s session.Session) (net.Conn, error)
	// RoundTrip sends a request to a session's agent over a kept stream.
	RoundTrip(s session.Session, req *http.Request) (*http.Response, error)
	// Forget drops the kept streams of a session that has ended.
	Forget(sessionID string)
}

// Proxyds knows which proxyds answer.
type Proxyds interface {
	// Reachable says whether one of the region does.
	Reachable(region string) bool
}

// Config is what differs between installations.
type Config struct {
	PublicURL      string // base of signed URLs, no slash at the end
	Rates          accounts.Rates
	Proxyds        Proxyds
	CreateDeadline time.Duration // a create without a machine by then fails
	HostLostAfter  time.Duration // a host silent for longer has lost its running sessions
	// PausedLostAfter is the same for paused ones that only the host has; never
	// before HostLostAfter.
	PausedLostAfter time.Duration

	Name              string        // this gateway's: what an earlier run of it left open is aborted
	OperationDeadline time.Duration // a pause, resume or move that is not done by then is undone
	PauseDurable      bool          // a pause answers only when its snapshot is in the blob store

	Secret *trust.Secret // seals passes and passwords for proxyd
}

// Service is the use cases. Safe for concurrent use.
type Service struct {
	cfg      Config
	record   *placement.Record
	hosts    Hosts
	log      *slog.Logger
	once     flights // creates under way, by project and idempotency key
	creating turns

	run      string             // names this run of the gateway in operations
	resuming singleflight.Group // by session
	telling  telling            // verdicts that hosts are found to wait for
	verdicts singleflight.Group // by host and verdict: those on their way
	after    tasks              // work that goes on behind answers
	pace     pace
	onStep   func(string) error // tests: where the gateway dies
}

// pace is how long things are waited for; tests are more hasty.
type pace struct {
	look      time.Duration // between looks at what is overdue
	reconcile time.Duration // between inventories
	host      time.Duration // how long a host may be away that an operation needs: about a restart of hostd
	tell      time.Duration // for a host to take a verdict, and for the machine to go on after it
}

var usualPace = pace{look: time.Second, reconcile: 10 * time.Second, host: 5 * time.Second, tell: UndoTime}

// runMark parts a gateway's name from what tells its runs apart.
const runMark = "#"

// New makes the use cases over the record and the hosts.
func New(cfg Config, record *placement.Record, hosts Hosts, log *slog.Logger) *Service {
	return &Service{cfg: cfg, record: record, hosts: hosts, log: log, run: cfg.Name + runMark + rand.Text(), pace: usualPace}
}

// find gives a session of the caller's project. Another project's is as
// unknown as one that never was.
func (s *Service) find(ctx context.Context, caller accounts.Caller, id string) (session.Session, error) {
	found, err := s.session(ctx, id, 0)
	if err == nil && found.ProjectID != caller.ProjectID {
		err = notFound(id)
	}
	return found, err
}

// session looks a session up. A miss is believed only once this gateway has
// caught up with the record.
func (s *Service) session(ctx context.Context, id string, minIndex uint64) (session.Session, error) {
	if found, ok := s.record.View().Session(id); ok {
		return found, nil
	}
	if err := s.record.Fresh(ctx, minIndex); err != nil {
		return session.Session{}, err
	}
	if found, ok := s.record.View().Session(id); ok {
		return found, nil
	}
	return session.Session{}, notFound(id)
}

func notFound(id string) error { return apierr.New(apierr.NotFound, "there is no session %s", id) }

// Get gives one session.
func (s *Service) Get(ctx context.Context, caller accounts.Caller, id string) (View, error) {
	found, err := s.find(ctx, caller, id)
	if err != nil {
		return View{}, err
	}
	return s.view(found), nil
}

// Running gives a session that has not ended; see Awake for one to work with.
func (s *Service) Running(ctx context.Context, caller accounts.Caller, id string) (session.Session, error) {
	found, err := s.find(ctx, caller, id)
	if err == nil {
		err = running(found)
	}
	return found, err
}

func running(found session.Session) error {
	if found.Status.Ended() {
		return apierr.New(apierr.SessionNotRunning, "session %s has ended", found.ID)
	}
	return nil
}

// List gives a page of the project's sessions, newest first, and the cursor of
// the next page, empty on the last.
func (s *Service) List(_ context.Context, caller accounts.Caller, req ListRequest) ([]View, string, error) {
	found, next, err := s.record.View().Sessions(placement.Filter{Project: caller.ProjectID, Status: req.Status,
		Region: req.Region, Metadata: req.Metadata, Cursor: req.Cursor, Limit: req.Limit})
	if err != nil {
		return nil, "", err
	}
	views := make([]View, len(found))
	for i, f := range found {
		views[i] = s.view(f)
	}
	return views, next, nil
}

// Patch changes settings: the record first, then the host that enforces them.
// A host that cannot be told now hears it when it is reconciled.
func (s *Service) Patch(ctx context.Context, caller accounts.Caller, id string, req PatchRequest) (View, error) {
	found, err := s.Running(ctx, caller, id)
	if err != nil {
		return View{}, err
	}
	p := session.Patch{KeepAlive: req.KeepAlive, UserMetadata: req.UserMetadata, Timeout: req.Timeout, Captcha: req.Captcha}
	if req.Proxy != nil {
		if p.Proxy, err = s.proxyPatch(caller, found, *req.Proxy); err != nil {
			return View{}, err
		}
	}
	if req.Timeout != nil {
		if err := accounts.CheckTimeout(caller.Plan, *req.Timeout); err != nil {
			return View{}, err
		}
	}
	changed, err := s.record.PatchSession(ctx, id, p)
	if err != nil {
		return View{}, err
	}
	if req.KeepAlive != nil || req.Timeout != nil || req.Proxy != nil {
		s.spread(ctx, changed)
	}
	return s.view(changed), nil
}

// proxyPatch is a change of the proxy that the project may make, as the record
// keeps it.
func (s *Service) proxyPatch(caller accounts.Caller, found session.Session, req session.ProxyPatch) (*session.ProxyPatch, error) {
	if err := s.mayProxy(caller.ProjectID, caller.Plan, req.To); err != nil {
		return nil, err
	}
	to, err := s.sealed(found.ID, req.To)
	return &session.ProxyPatch{To: to}, err
}

// RotateProxy gives every proxy of a session a new address: the record first,
// then the host, whose new connections take it.
func (s *Service) RotateProxy(ctx context.Context, caller accounts.Caller, id string) (View, error) {
	if _, err := s.Running(ctx, caller, id); err != nil {
		return View{}, err
	}
	changed, err := s.record.RotateProxy(ctx, id)
	if err != nil {
		return View{}, err
	}
	s.spread(ctx, changed)
	return s.view(changed), nil
}

// spread tells a session's host of changed settings, if it runs.
func (s *Service) spread(ctx context.Context, changed session.Session) {
	if changed.Status != session.Running {
		return
	}
	if err := s.tellSettings(ctx, changed); err != nil {
		s.log.Warn("a host does not know new settings yet", "session", changed.ID, "host", changed.Host, "error", err)
	}
}

func (s *Service) tellSettings(ctx context.Context, changed session.Session) error {
	set, err := s.settings(changed, changed.Epoch)
	if err != nil {
		return err
	}
	c, err := s.hosts.Client(changed.Host)
	if err != nil {
		return err
	}
	_, err = c.Patch(ctx, changed.ID, set)
	return err
}
