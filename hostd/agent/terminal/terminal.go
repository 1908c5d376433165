// Package terminal is the session's interactive terminal: one bash on a pty,
// shared by all clients that are attached, which goes on without them.
//
// A client gets the newest 64 KiB of output first and then everything as it
// comes. When bash exits, clients are closed with 1000 and "exit:<code>"; the
// next connect starts another.
package terminal

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/ws"
)

// Config says for whom and where the terminal runs.
type Config struct {
	Account   account.Account
	Workspace string
	Log       *slog.Logger // slog.Default() when nil
	// Stall is how long a client may take nothing while others wait for it;
	// 10 s when zero.
	Stall time.Duration
	// Freezer makes what runs in the terminal stand still; nil: never.
	Freezer *freeze.Freezer
}

// Terminal is the terminal of one machine. Safe for concurrent use.
type Terminal struct {
	cfg Config

	mu     sync.Mutex
	env    map[string]string // guarded by mu: the session's own variables
	proxy  bool              // guarded by mu: and those of its egress listener
	now    *shell            // guarded by mu: the running one, nil when none
	closed bool              // guarded by mu

	ctx context.Context // ends with Close
	end context.CancelFunc
}

// New makes the terminal; bash starts with the first client.
func New(cfg Config) *Terminal {
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if cfg.Stall == 0 {
		cfg.Stall = 10 * time.Second
	}
	t := &Terminal{cfg: cfg}
	t.ctx, t.end = context.WithCancel(context.Background())
	return t
}

// SetEnv replaces the session's own variables for terminals that start later.
func (t *Terminal) SetEnv(env map[string]string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.env = maps.Clone(env)
}

// SetProxy says whether terminals that start later are told of the session's
// egress listener.
func (t *Terminal) SetProxy(on bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.proxy = on
}

// Close ends the running bash; clients see 1001.
func (t *Terminal) Close() {
	t.end()
	t.mu.Lock()
	t.closed = true
	s := t.now
	t.mu.Unlock()
	if s != nil {
		s.end(ws.StatusGoingAway, "closing")
		<-s.done
	}
}

// ServeHTTP upgrades the request and attaches the client until it leaves or
// bash exits.
func (t *Terminal) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !reply.Method(w, r, http.MethodGet) {
		return
	}
	s, err := t.running(r.Context())
	if err != nil {
		reply.Error(w, r, err)
		return
	}
	conn, err := ws.Accept(w, r)
	if err != nil {
		return // answered
	}
	c := newClient(conn)
	for !s.attach(c) { // bash ended since: this client gets its successor
		<-s.done
		if s, err = t.running(t.ctx); err != nil {
			conn.Close(ws.StatusGoingAway, "closing")
			return
		}
	}
	s.serve(c)
}

// running is the current bash, started when there is none.
func (t *Terminal) running(ctx context.Context) (*shell, error) {
	leave, err := t.cfg.Freezer.Enter(ctx, freeze.Customer)
	if err != nil {
		return nil, apierr.Wrap(err, apierr.Canceled, "the client left")
	}
	defer leave()
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil, apierr.New(apierr.Unavailable, "the terminal of this session is closing")
	}
	if t.now != nil {
		return t.now, nil
	}
	s, err := t.start()
	if err != nil {
		return nil, fmt.Errorf("start terminal: %w", err)
	}
	t.now = s
	return s, nil
}

// Size at the start, as terminals have had since the VT100.
const startCols, startRows = 80, 24

func (t *Terminal) start() (*shell, error) {
	cmd := exec.Command("/bin/bash", "-l")
	cmd.Args[0] = "bash"
	cmd.Dir = t.cfg.Workspace
	cmd.Env = append(t.cfg.Account.Env("xterm-256color"), "PWD="+t.cfg.Workspace, "COLORTERM=truecolor")
	if t.proxy {
		cmd.Env = add(cmd.Env, agentlink.ProxyVars())
	}
	cmd.Env = add(cmd.Env, t.env)
	tty, err := t.launch(cmd)
	if err != nil {
		return nil, err
	}
	s := newShell(cmd, tty, t.cfg)
	go s.read()
	go func() {
		s.wait()
		t.mu.Lock()
		if t.now == s {
			t.now = nil
		}
		t.mu.Unlock()
		close(s.done)
	}()
	return s, nil
}

func add(env []string, vars map[string]string) []string {
	for k, v := range vars {
		env = append(env, k+"="+v)
	}
	return env
}

// launch starts cmd as the leader of a session whose terminal is a new pty,
// the account's own, so that programs can open it by name.
func (t *Terminal) launch(cmd *exec.Cmd) (*os.File, error) {
	who := t.cfg.Account
	ptm, pts, err := pty.Open()
	if err != nil {
		return nil, err
	}
	defer pts.Close()
	cmd.Stdin, cmd.Stdout, cmd.Stderr = pts, pts, pts
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true, Credential: who.Credential()}
	err = errors.Join(who.Owns(pts.Chown), pty.Setsize(ptm, &pty.Winsize{Cols: startCols, Rows: startRows}))
	if err == nil {
		err = t.cfg.Freezer.Start(freeze.Customer, cmd)
	}
	defer ptm.Close()
	if err != nil {
		return nil, err
	}
	return pollable(ptm)
}

// pollable is the same pty on a descriptor that Go polls, so that deadlines and
// Close end its reads; creack/pty's ioctls leave the file blocking.
func pollable(ptm *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(ptm.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err == nil {
		err = unix.SetNonblock(fd, true)
	}
	if err != nil {
		return nil, fmt.Errorf("pty: %w", err)
	}
	return os.NewFile(uintptr(fd), ptm.Name()), nil
}

// exitCode is what bash's parent would show: its code, or 128 and the signal.
func exitCode(err error) int {
	var exit *exec.ExitError
	switch {
	case err == nil:
		return 0
	case !errors.As(err, &exit):
		return 255
	}
	if st, ok := exit.Sys().(syscall.WaitStatus); ok && st.Signaled() {
		return 128 + int(st.Signal())
	}
	return exit.ExitCode()
}
