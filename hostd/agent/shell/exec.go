package shell

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"sync"
	"time"
	"unicode/utf8"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/shared/apierr"
)

// Command is what to run, already checked (see parse).
type Command struct {
	Text    string
	Timeout time.Duration
	Cwd     string            // absolute, "" for where the shell is
	Env     map[string]string // for this command only
	Shell   string            // name of a persistent shell; "" for a fresh process
	hidden  bool              // our own, while nothing else may start (Save)
}

// Sinks take a command's output. Begin, if set, is called when the command has
// started, before any output.
type Sinks struct {
	Stdout, Stderr io.Writer
	Begin          func()
}

// Outcome is how a command ended.
type Outcome struct {
	ExitCode *int // nil when the timeout stopped it
	TimedOut bool
	Duration time.Duration // without the wait for its turn
}

// errTimeout is the cause of the end of a command's context at its timeout.
var errTimeout = errors.New("the command's timeout")

// Exec runs a command and returns when it has ended and its output is in the
// sinks. When ctx ends first, what the command started is killed and ctx's
// cause is returned.
func (s *Shells) Exec(ctx context.Context, c *Command, to Sinks) (Outcome, error) {
	if err := s.busy(); err != nil {
		return Outcome{}, err
	}
	defer s.tails.Done()
	if err := s.pass(ctx); err != nil {
		return Outcome{}, err
	}
	out, err := s.exec(ctx, c, to)
	if err == nil && s.cfg.OnExec != nil {
		s.cfg.OnExec(done(c, out))
	}
	return out, err
}

// exec is Exec for setup too, which nothing keeps waiting.
func (s *Shells) exec(ctx context.Context, c *Command, to Sinks) (Outcome, error) {
	if c.Shell == "" {
		return s.execFresh(ctx, c, to)
	}
	l, err := s.enter(ctx, c.Shell)
	if err != nil {
		return Outcome{}, err
	}
	defer s.leave(l)
	// A command before may have doomed its bash (closed what it reads from), or
	// a restart ends it just now: what never began runs in a fresh one.
	if to.Begin != nil {
		to.Begin = sync.OnceFunc(to.Begin)
	}
	for range maxStarts {
		if err = l.ready(ctx); err != nil {
			return Outcome{}, err
		}
		out, err := l.run(ctx, c, to)
		if !errors.Is(err, errNotBegun) {
			return out, err
		}
	}
	return Outcome{}, apierr.New(apierr.Unavailable, "the shell ended %d times before the command began; try again", maxStarts)
}

// maxStarts is how many shells a command is given to before it is refused.
const maxStarts = 3

// errNotBegun is of a bash that ended before it came to the command.
var errNotBegun = errors.New("bash ended before the command began")

// run runs c in the lane's bash, or returns errNotBegun with nothing in the
// sinks. The caller has the turn.
func (l *lane) run(ctx context.Context, c *Command, to Sinks) (Outcome, error) {
	s, b, id := l.s, l.current(), l.s.ids.Add(1)
	pipes, err := b.pipes(id, s.cfg.Account)
	if err != nil {
		b.end()                             // its folder is unusable; the next command gets a fresh shell
		if errors.Is(err, fs.ErrNotExist) { // bash's end took it
			return Outcome{}, errNotBegun
		}
		return Outcome{}, fmt.Errorf("exec: %w", err)
	}
	defer pipes.remove()
	load, err := b.loadLine(c.Text)
	if err != nil {
		pipes.abandon()
		if errors.Is(err, fs.ErrNotExist) {
			return Outcome{}, errNotBegun
		}
		return Outcome{}, fmt.Errorf("exec: %w", err)
	}
	text := b.script(c, id, load, pipes.path[0], pipes.path[1])
	if env := s.sessionEnv(); env != b.env.Load() {
		text = exports(b.env.Load(), env) + text
		b.env.Store(env)
	}
	ctx, cancel := s.cfg.Freezer.WithTimeout(ctx, freeze.Customer, c.Timeout, errTimeout)
	defer cancel()
	began, since := time.Now(), ticks()
	begin(to)
	taps := [2]*tap{openTap(pipes.r[0], to.Stdout), openTap(pipes.r[1], to.Stderr)}
	_ = b.write(s, text) // fails only when bash is dead, which await sees
	code, ended := b.await(ctx, id)
	if !ended {
		if !c.hidden {
			defer s.stopping()()
		}
		b.abort(s, target{shell: b.mark, command: b.commandMark(id), bash: b.cmd.Process.Pid, since: since, spare: b.jobs}, id)
	}
	pipes.release()
	for _, t := range taps {
		t.finish(s)
	}
	if ended && code == neverBegan && s.ctx.Err() == nil {
		return Outcome{}, errNotBegun
	}
	return outcome(ctx, s.ctx, code, ended, began)
}

// stopping keeps what is to be stopped from standing still until done is
// called: a bash that cannot answer would be taken for one that hangs.
func (s *Shells) stopping() (done func()) {
	done, err := s.cfg.Freezer.Enter(s.ctx, freeze.Customer)
	if err != nil { // the shells are closing: all of it is killed
		return func() {}
	}
	return done
}

func begin(to Sinks) {
	if to.Begin != nil {
		to.Begin()
	}
}

// outcome tells a command that ended by itself from one that was stopped.
func outcome(ctx, shells context.Context, code int, ended bool, began time.Time) (Outcome, error) {
	o := Outcome{Duration: time.Since(began)}
	switch {
	case ended && shells.Err() == nil:
		o.ExitCode = &code
		return o, nil
	case shells.Err() != nil:
		return o, errClosed
	case context.Cause(ctx) == errTimeout:
		o.TimedOut = true
		return o, nil
	}
	return o, context.Cause(ctx)
}

// neverBegan is await's code of a command that bash died before.
const neverBegan = -1

// await waits for the report of command id, or for bash's end, whose exit code
// is the command's if it had begun; ended is false when ctx was first.
func (b *bash) await(ctx context.Context, id uint64) (code int, ended bool) {
	for {
		select {
		case r := <-b.reports:
			if r.id == id {
				b.took(r)
				return r.status, true
			}
		case <-b.dead:
			return b.last(id), true
		case <-ctx.Done():
			return 0, false
		}
	}
}

// last is the code of command id in a bash that is dead: of its report, should
// it have come to that, or else bash's own.
func (b *bash) last(id uint64) int {
	for {
		select {
		case r := <-b.reports:
			if r.id == id {
				return r.status
			}
			continue
		default:
		}
		if b.begun.Load() != id {
			return neverBegan
		}
		return b.exit
	}
}

// took takes a report in. A background job that is new since the last one means
// that processes stay behind, which later commands' timeouts must spare.
func (b *bash) took(r report) {
	b.status = r.status & 0xff
	if r.bg == b.lastBg {
		return
	}
	b.lastBg = r.bg
	b.jobs = make(map[ident]bool)
	for _, p := range (target{shell: b.mark, bash: b.cmd.Process.Pid}).choose(processes()) {
		b.jobs[p.ident] = true
	}
}

// done is the exec event of a command.
func done(c *Command, o Outcome) Done {
	d := Done{Command: cutEncoded(c.Text, maxShown), Shell: c.Shell, ExitCode: o.ExitCode, TimedOut: o.TimedOut, DurationMs: o.Duration.Milliseconds()}
	if c.Shell == "" {
		d.Shell = false
	}
	return d
}

// cut shortens s to at most n bytes without splitting a character.
func cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n]
}

// maxShown is how much of a command an event holds, in bytes of JSON, which may
// be six times as long as the text. The event holds it twice (text and data) and
// must stay below event.MaxEventBytes, or it would lose its exit code.
const maxShown = 4 << 10

// cutEncoded shortens s to at most n bytes of JSON, an ellipsis included,
// without splitting a character.
func cutEncoded(s string, n int) string {
	const ellipsis = "…"
	size, end := 0, 0 // of what is kept; end leaves room for the ellipsis
	for i, r := range s {
		if size <= n-len(ellipsis) {
			end = i
		}
		if size += encodedSize(r); size > n {
			return s[:end] + ellipsis
		}
	}
	return s
}

// encodedSize is at least as long as encoding/json writes r.
func encodedSize(r rune) int {
	switch {
	case r == '"' || r == '\\' || r == '\n' || r == '\r' || r == '\t':
		return 2
	case r < ' ' || r == '<' || r == '>' || r == '&' || r == '\u2028' || r == '\u2029' || r == utf8.RuneError:
		return len(`\u0000`)
	}
	return utf8.RuneLen(r)
}

// invalid is a 400 that names the field.
func invalid(format string, args ...any) error {
	return apierr.New(apierr.InvalidRequest, format, args...)
}
