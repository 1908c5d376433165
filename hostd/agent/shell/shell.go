// Package shell runs a session's commands: in persistent bash shells that have
// names, or in fresh processes. DESIGN.md beside it tells how a command is fed
// to bash, how its end is seen and how it is stopped.
package shell

import (
	"context"
	"log/slog"
	"maps"
	"path/filepath"
	"regexp"
	"sync"
	"sync/atomic"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/workspace"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
)

// Default is the name of the shell that commands without one run in.
const Default = "default"

// MaxShells is how many named shells live at once.
const MaxShells = 32

var nameForm = regexp.MustCompile(`^[a-zA-Z0-9_.-]{1,64}$`)

// errClosed is what every call after Close gets.
var errClosed = apierr.New(apierr.Unavailable, "the shells of this session are closing")

// Config says for whom and where commands run.
type Config struct {
	Account   account.Account
	Workspace *workspace.Tree
	// StateDir is an existing folder, root's own, best on a tmpfs: it holds the
	// named pipes between agent and bash. The account must be able to enter it.
	StateDir string
	// OnExec, if set, hears of every exec that ran (not of setup steps).
	OnExec func(Done)
	// Freezer makes what the shells start stand still; nil: never.
	Freezer *freeze.Freezer
	Log     *slog.Logger // slog.Default() when nil
}

// Done is the data of an exec event (decisions "Streams").
type Done struct {
	Command    string `json:"command"` // cut to 4 KiB of JSON
	Shell      any    `json:"shell"`   // a name, or false
	ExitCode   *int   `json:"exitCode"`
	TimedOut   bool   `json:"timedOut"`
	DurationMs int64  `json:"durationMs"`
}

// Shells are all shells of one machine. Safe for concurrent use.
type Shells struct {
	cfg   Config
	log   *slog.Logger
	ids   atomic.Uint64 // of commands, for their marks
	ctx   context.Context
	stop  context.CancelCauseFunc
	tails sync.WaitGroup // commands, and what outlives them: drains, waits for processes

	mu    sync.Mutex
	lanes map[string]*lane // guarded by mu
	env   *vars            // guarded by mu; the session's, replaced whole
	gate  chan struct{}    // guarded by mu; open while setup keeps others waiting, nil otherwise
}

// vars is one version of the session's environment; never altered.
type vars struct {
	m     map[string]string
	proxy bool // and agentlink.ProxyVars, where a program has no others of these names
}

// all is what programs start with.
func (v *vars) all() map[string]string {
	all := map[string]string{}
	if v.proxy {
		all = agentlink.ProxyVars()
	}
	maps.Copy(all, v.m)
	return all
}

// New makes the shells; nothing runs until Warm or the first Exec.
func New(cfg Config) *Shells {
	s := &Shells{cfg: cfg, log: cfg.Log, lanes: make(map[string]*lane), env: &vars{}}
	if s.log == nil {
		s.log = slog.Default()
	}
	s.ctx, s.stop = context.WithCancelCause(context.Background())
	return s
}

// busy counts the caller among tails, who calls Done, unless Close has begun.
func (s *Shells) busy() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ctx.Err() != nil {
		return errClosed
	}
	s.tails.Add(1)
	return nil
}

// Warm starts the default shell, so that the first command finds it waiting.
func (s *Shells) Warm(ctx context.Context) error {
	if err := s.busy(); err != nil {
		return err
	}
	defer s.tails.Done()
	l, err := s.enter(ctx, Default)
	if err != nil {
		return err
	}
	defer s.leave(l)
	return l.ready(ctx)
}

// SetEnv replaces the session's own variables: commands that start from now on
// see them, in shells that already run too.
func (s *Shells) SetEnv(env map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.env = &vars{maps.Clone(env), s.env.proxy}
}

// SetProxy says whether commands that start from now on are told of the
// session's egress listener, in shells that already run too: those where the
// customer set one of the variables otherwise keep it.
func (s *Shells) SetProxy(on bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.env.proxy != on {
		s.env = &vars{s.env.m, on}
	}
}

// sessionEnv is the newest version.
func (s *Shells) sessionEnv() *vars {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.env
}

// Restart ends the named shell and everything it started, commands under way
// included; the next command gets a fresh one. A name not in use is fine.
func (s *Shells) Restart(ctx context.Context, name string) error {
	if !nameForm.MatchString(name) {
		return badName("shell")
	}
	s.mu.Lock()
	l := s.lanes[name]
	s.mu.Unlock()
	if l == nil {
		return nil
	}
	l.end()
	s.mu.Lock()
	defer s.mu.Unlock()
	if l.users == 0 && s.lanes[name] == l {
		delete(s.lanes, name) // its place is free for another name
	}
	return nil
}

// Close ends all shells and what they started, and waits until nothing of this
// package runs. Commands under way answer 503.
func (s *Shells) Close() {
	s.mu.Lock()
	s.stop(errClosed)
	lanes := maps.Clone(s.lanes)
	s.mu.Unlock()
	for _, l := range lanes {
		l.end()
	}
	s.tails.Wait()
}

func badName(field string) error {
	return apierr.New(apierr.InvalidRequest, "%s: must be the name of a shell (1 to 64 letters, digits, '.', '_' or '-') or false", field)
}

// lane is one named shell: the queue for it and the bash that serves it now.
type lane struct {
	s    *Shells
	name string
	// turn holds one token while somebody runs in the lane. Go serves blocked
	// senders first come, first served.
	turn  chan struct{}
	users int // guarded by Shells.mu: who runs or waits

	mu    sync.Mutex
	bash  *bash  // guarded by mu for its replacement; the turn's holder replaces it
	saved *Saved // guarded by mu: what the next bash begins with, if not nil
}

// enter waits for the named lane's turn.
func (s *Shells) enter(ctx context.Context, name string) (*lane, error) {
	s.mu.Lock()
	l := s.lanes[name]
	if l == nil {
		if len(s.lanes) >= MaxShells {
			s.mu.Unlock()
			return nil, apierr.New(apierr.InvalidRequest, "shell: must be one of the %d shells in use; restart one to free its name", MaxShells)
		}
		l = &lane{s: s, name: name, turn: make(chan struct{}, 1)}
		s.lanes[name] = l
	}
	l.users++
	s.mu.Unlock()
	select {
	case l.turn <- struct{}{}:
		return l, nil
	case <-ctx.Done():
		s.drop(l)
		return nil, context.Cause(ctx)
	case <-s.ctx.Done():
		s.drop(l)
		return nil, errClosed
	}
}

// leave gives the turn to the next in the queue.
func (s *Shells) leave(l *lane) {
	<-l.turn
	s.drop(l)
}

func (s *Shells) drop(l *lane) {
	s.mu.Lock()
	defer s.mu.Unlock()
	l.users--
}

// ready makes sure that a live bash serves the lane. The caller has the turn.
func (l *lane) ready(ctx context.Context) error {
	if b := l.current(); b != nil && b.alive() {
		return nil
	}
	for {
		if l.s.ctx.Err() != nil {
			return errClosed
		}
		l.mu.Lock()
		saved := l.saved
		l.mu.Unlock()
		b, err := l.start(ctx, saved)
		if err != nil {
			return err
		}
		if l.take(b, saved) {
			break
		}
		b.end()
	}
	if l.s.ctx.Err() != nil { // Close may have looked before bash stood here
		l.end()
		return errClosed
	}
	return nil
}

// take gives the lane a bash that was started as saved, unless the lane was
// restored meanwhile: a start may take as long as the customer's processes stand
// still.
func (l *lane) take(b *bash, saved *Saved) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.saved != saved {
		return false
	}
	l.bash, l.saved = b, nil
	return true
}

// start starts a bash as the one was that the lane continues, else a new one.
func (l *lane) start(ctx context.Context, saved *Saved) (*bash, error) {
	if saved != nil {
		b, err := startBash(ctx, l.s, saved)
		if err == nil || ctx.Err() != nil {
			return b, err
		}
		l.s.log.Warn("a shell is not what it was", "shell", l.name, "err", err) // its folder is gone, perhaps
	}
	return startBash(ctx, l.s, nil)
}

func (l *lane) current() *bash {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.bash
}

// end kills the lane's bash with everything it started.
func (l *lane) end() {
	if b := l.current(); b != nil {
		b.end()
	}
}

// folder is the path bash may enter for a shell's state.
func (s *Shells) folder(mark string) string { return filepath.Join(s.cfg.StateDir, mark) }
