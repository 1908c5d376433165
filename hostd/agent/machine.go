package main

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"sync/atomic"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/hostd/agent/shell"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/session"
)

// chrome is the machine's browser, shells its bash: what the machine's own
// control paths need of them.
type chrome interface {
	Await(ctx context.Context) error
	Ready() bool
	Note() string
	SetViewport(ctx context.Context, v session.Viewport) error
}

type shells interface {
	Warm(ctx context.Context) error
	Hold() (release func())
	RunSetup(ctx context.Context, commands []string, onStep func(shell.Step)) error
}

// environment is what starts programs with the session's own variables, and
// those of its egress listener.
type environment interface {
	SetEnv(env map[string]string)
	SetProxy(on bool)
}

// counter counts CDP clients.
type counter interface {
	Clients() int
	HadClients() bool
}

// nobody is the count of a machine without a browser.
type nobody struct{}

func (nobody) Clients() int     { return 0 }
func (nobody) HadClients() bool { return false }

// machine is what hostd controls: a machine that warms up, waits, and is given
// to one session for the rest of its life.
type machine struct {
	kind    session.Kind
	chrome  chrome // nil when the kind has none
	shells  shells // nil likewise
	counted counter

	capture      *capture
	environments []environment
	notices      *notices
	log          *slog.Logger

	ctx     context.Context // of setup, ends with the agent
	end     context.CancelFunc
	work    sync.WaitGroup // setup
	settled chan struct{}  // closed when warm has ended

	failed   string // written before settled closes, read after
	starting sync.Mutex
	session  atomic.Pointer[agentlink.Start] // nil while the machine waits; set under starting

	telling sync.Mutex
	proxied uint64 // guarded by telling: Version of the last order about the proxy that was obeyed
}

func newMachine(kind session.Kind, log *slog.Logger) *machine {
	m := &machine{kind: kind, log: log, notices: newNotices(), settled: make(chan struct{})}
	m.counted = nobody{}
	m.ctx, m.end = context.WithCancel(context.Background())
	return m
}

// warm waits until everything the kind has is up, or one of it never will be.
func (m *machine) warm(ctx context.Context) {
	defer close(m.settled)
	var wg sync.WaitGroup
	var chromeErr, shellErr error
	if m.chrome != nil {
		wg.Go(func() { chromeErr = m.chrome.Await(ctx) })
	}
	if m.shells != nil {
		wg.Go(func() { shellErr = m.shells.Warm(ctx) })
	}
	wg.Wait()
	if err := errors.Join(chromeErr, shellErr); err != nil {
		m.log.Error("machine does not become ready", "err", err)
		m.failed = err.Error()
	}
}

// state is what hostd asks for.
func (m *machine) state() agentlink.State {
	s := agentlink.State{Clients: m.counted.Clients(), HadClients: m.counted.HadClients(), LastNotice: m.notices.newest()}
	select {
	case <-m.settled:
		s.Failed = m.failed
		s.Ready = m.failed == "" && (m.chrome == nil || m.chrome.Ready())
	default:
	}
	if m.chrome != nil {
		s.Note = m.chrome.Note()
	}
	if taken := m.session.Load(); taken != nil {
		s.SessionID = taken.SessionID
	}
	return s
}

// start gives the machine to a session. Repeated for the same session it does
// nothing, so that hostd may ask again after a lost answer.
func (m *machine) start(ctx context.Context, s agentlink.Start) error {
	if s.SessionID == "" {
		return apierr.New(apierr.InvalidRequest, "sessionId: must be set")
	}
	if s.Kind != m.kind {
		return apierr.New(apierr.InvalidRequest, "kind: this machine is of kind %q", m.kind)
	}
	if len(s.Setup) > 0 && m.shells == nil {
		return apierr.New(apierr.InvalidRequest, "setup: needs a session with a shell")
	}
	m.starting.Lock()
	defer m.starting.Unlock() // a repetition waits for the first to be done
	if taken := m.session.Load(); taken != nil {
		if taken.SessionID == s.SessionID {
			return nil
		}
		return apierr.New(apierr.InvalidRequest, "sessionId: this machine belongs to another session")
	}
	if m.chrome != nil && s.Viewport != (session.Viewport{}) {
		if err := m.chrome.SetViewport(ctx, s.Viewport); err != nil {
			return err
		}
	}
	for _, e := range m.environments {
		e.SetEnv(s.Env)
	}
	m.setProxy(s.Proxy)
	if s.Held {
		if err := m.capture.hold(ctx); err != nil {
			return apierr.Wrap(err, apierr.Internal, "held: %v", err)
		}
	}
	if len(s.Setup) > 0 {
		release := m.shells.Hold() // before the customer can run anything
		m.work.Go(func() { m.runSetup(m.ctx, s.Setup, release) })
	}
	m.session.Store(&s)
	if m.chrome != nil && m.chrome.Note() != "" {
		m.tell("warn", m.chrome.Note(), "browser_weakened")
	}
	m.log.Info("machine taken", "session", s.SessionID)
	return nil
}

// setProxy obeys an order about the shell's proxy unless a later one came first.
func (m *machine) setProxy(p agentlink.Proxy) {
	m.telling.Lock()
	defer m.telling.Unlock()
	if p.Version < m.proxied {
		return
	}
	m.proxied = p.Version
	for _, e := range m.environments {
		e.SetProxy(p.Shell)
	}
}

// taken says whether the machine has a session.
func (m *machine) taken() bool { return m.session.Load() != nil }

// tell adds a lifecycle event to the session's log.
func (m *machine) tell(level, text, state string) {
	data, _ := json.Marshal(map[string]string{"state": state, "reason": text})
	m.notices.event(event.Event{Type: event.Lifecycle, Level: level, Text: text, Data: data})
}

// control serves the Control* paths.
func (m *machine) control() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(agentlink.ControlState, m.serveState)
	mux.HandleFunc(agentlink.ControlStart, m.serveStart)
	mux.HandleFunc(agentlink.ControlProxy, m.serveProxy)
	mux.Handle(agentlink.ControlEvents, m.notices)
	m.capture.register(mux)
	mux.HandleFunc("/", notFound)
	return mux
}

func (m *machine) serveState(w http.ResponseWriter, r *http.Request) {
	if r.URL.Query().Get("wait") == "1" {
		select {
		case <-m.settled:
		case <-r.Context().Done():
			return
		}
	}
	reply.JSON(w, http.StatusOK, m.state())
}

func (m *machine) serveStart(w http.ResponseWriter, r *http.Request) {
	if !reply.Method(w, r, http.MethodPost) {
		return
	}
	var s agentlink.Start
	if err := reply.Decode(w, r, &s); err != nil {
		reply.Error(w, r, err)
		return
	}
	if err := m.start(r.Context(), s); err != nil {
		reply.Error(w, r, err)
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

func (m *machine) serveProxy(w http.ResponseWriter, r *http.Request) {
	serveOrder(w, r, func(p agentlink.Proxy) error {
		if !m.taken() {
			return apierr.New(apierr.InvalidRequest, "this machine has no session yet")
		}
		m.setProxy(p)
		return nil
	})
}
