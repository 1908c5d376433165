// Package freeze makes what runs in the machine stand still and go on again:
// the customer's processes, however detached, and Chrome.
//
//	Freezer ── gates: nothing new starts while its part is shut
//	   └────── mechanism ─┬─ cgroups: one guest cgroup a part (cgroup v2, a microVM)
//	                      └─ signals: SIGSTOP and SIGCONT in order (a container)
//
// Which mechanism works is found out at start.
package freeze

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os/exec"
	"sync"
	"time"
)

// Part is what stands still as one.
type Part int

// The parts of a machine.
const (
	Customer Part = iota // shells, terminals, fresh processes and all they started
	Browser              // Chrome
	parts
)

func (p Part) String() string { return [parts]string{"customer", "browser"}[p] }

// Limit bounds how long a part may take to stand still, while this process runs.
const Limit = 2 * time.Second

// enough is how many looks come before the Limit counts: one that passed while
// this process itself did not run says nothing about what it looks at.
const enough = 20

// again waits for the next look, or says why there is none.
func again(ctx context.Context, look *time.Ticker, looks int) error {
	<-look.C
	if looks < enough {
		return nil
	}
	return context.Cause(ctx)
}

// mechanism is one way to stop processes. Calls come one at a time, but for
// place and started.
type mechanism interface {
	// place makes the process of a command, not started yet, one of the part.
	place(part Part, cmd *exec.Cmd)
	started(part Part, pid int)
	// freeze returns when nothing of the part runs; after an error some of it
	// may stand still, and thaw undoes that.
	freeze(ctx context.Context, part Part) error
	thaw(part Part) error
	close() error
}

// Freezer stops and continues the parts. A nil Freezer never freezes. Safe for
// concurrent use.
type Freezer struct {
	how mechanism

	change sync.Mutex // held by Shut, Freeze and Thaw
	mu     sync.Mutex // guards gates
	gates  [parts]gate
}

// gate keeps new work of a part waiting while it is shut.
type gate struct {
	open   chan struct{} // nil while open; else closed when it opens again
	inside int           // between Enter and leave
	empty  chan struct{} // closed when the last one inside leaves; nil when nobody waits for that
	frozen bool
	since  time.Time     // when it was shut
	stood  time.Duration // how long it was shut in all, the present time not counted
}

// Config says where and on whom to act.
type Config struct {
	// Cgroup is where a cgroup v2 hierarchy is mounted, or a folder in one, ""
	// for none.
	Cgroup string
	// Machine says that this process is the child of a machine's init: then
	// signals go to whatever runs in it, else to this process's descendants only.
	Machine bool
	// BrowserGID tells Chrome's processes from the customer's, 0 when it has no
	// group of its own.
	BrowserGID int
}

// Open finds a mechanism that works.
func Open(cfg Config, log *slog.Logger) *Freezer {
	if cfg.Cgroup != "" {
		groups, err := openCgroups(cfg.Cgroup)
		if err == nil {
			return &Freezer{how: groups}
		}
		log.Debug("processes are frozen by signals: no cgroup to do it", "err", err)
	}
	return &Freezer{how: &signals{machine: cfg.Machine, gid: cfg.BrowserGID, chrome: map[int]bool{}}}
}

// Close lets everything go on and gives back what Open made.
func (f *Freezer) Close() error {
	if f == nil {
		return nil
	}
	return errors.Join(f.Thaw(Customer, Browser), f.how.close())
}

// Enter waits until the part is not shut, and keeps it from being frozen until
// leave is called, which must be soon.
func (f *Freezer) Enter(ctx context.Context, part Part) (leave func(), err error) {
	if f == nil {
		return func() {}, nil
	}
	for {
		f.mu.Lock()
		g := &f.gates[part]
		open := g.open
		if open == nil {
			g.inside++
			f.mu.Unlock()
			return sync.OnceFunc(func() { f.leave(g) }), nil
		}
		f.mu.Unlock()
		select {
		case <-open:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (f *Freezer) leave(g *gate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	g.inside--
	if g.inside == 0 && g.empty != nil {
		close(g.empty)
		g.empty = nil
	}
}

// Await waits until the part is not shut.
func (f *Freezer) Await(ctx context.Context, part Part) error {
	if f == nil {
		return nil
	}
	for {
		f.mu.Lock()
		open := f.gates[part].open
		f.mu.Unlock()
		if open == nil {
			return nil
		}
		select {
		case <-open:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Start starts a command as one of the part. The caller is between Enter and
// leave: a child that was born frozen would keep every fork of this process
// waiting.
func (f *Freezer) Start(part Part, cmd *exec.Cmd) error {
	if f == nil {
		return cmd.Start()
	}
	f.how.place(part, cmd)
	if err := cmd.Start(); err != nil {
		return err
	}
	f.how.started(part, cmd.Process.Pid)
	return nil
}

// Shut keeps new work of the part waiting, and waits for that under way. What
// runs goes on until Freeze. After an error the part is as it was.
func (f *Freezer) Shut(ctx context.Context, part Part) error {
	if f == nil {
		return nil
	}
	f.change.Lock()
	defer f.change.Unlock()
	return f.shut(ctx, part)
}

func (f *Freezer) shut(ctx context.Context, part Part) error {
	f.mu.Lock()
	g := &f.gates[part]
	if g.open != nil {
		f.mu.Unlock()
		return nil
	}
	g.open, g.since = make(chan struct{}), time.Now()
	if g.inside == 0 {
		f.mu.Unlock()
		return nil
	}
	empty := make(chan struct{})
	g.empty = empty
	f.mu.Unlock()
	ctx, cancel := context.WithTimeoutCause(ctx, Limit, errors.New("work under way does not end"))
	defer cancel()
	select {
	case <-empty:
		return nil
	case <-ctx.Done():
		f.unshut(g)
		return fmt.Errorf("shut %s: %w", part, context.Cause(ctx))
	}
}

func (f *Freezer) unshut(g *gate) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if g.open == nil {
		return
	}
	close(g.open)
	g.stood += time.Since(g.since)
	g.open, g.empty, g.frozen = nil, nil, false
}

// Freeze returns when nothing of the part runs any more, at most 2 Limits
// later. After an error the part goes on. Idempotent.
func (f *Freezer) Freeze(ctx context.Context, part Part) error {
	if f == nil {
		return nil
	}
	f.change.Lock()
	defer f.change.Unlock()
	if err := f.shut(ctx, part); err != nil {
		return err
	}
	if f.Frozen(part) {
		return nil
	}
	ctx, cancel := context.WithTimeoutCause(ctx, Limit, fmt.Errorf("some of it still ran after %s", Limit))
	defer cancel()
	if err := f.how.freeze(ctx, part); err != nil {
		err = errors.Join(err, f.how.thaw(part))
		f.unshut(&f.gates[part])
		return fmt.Errorf("freeze %s: %w", part, err)
	}
	f.mu.Lock()
	f.gates[part].frozen = true
	f.mu.Unlock()
	return nil
}

// Frozen says whether the part stands still.
func (f *Freezer) Frozen(part Part) bool {
	if f == nil {
		return false
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.gates[part].frozen
}

// Thaw lets the parts go on and opens their gates. Idempotent.
func (f *Freezer) Thaw(which ...Part) error {
	if f == nil {
		return nil
	}
	f.change.Lock()
	defer f.change.Unlock()
	var all error
	for _, part := range which {
		if f.Frozen(part) {
			if err := f.how.thaw(part); err != nil {
				all = errors.Join(all, fmt.Errorf("thaw %s: %w", part, err))
				continue
			}
		}
		f.unshut(&f.gates[part])
	}
	return all
}

// WithTimeout is context.WithTimeoutCause with a clock that stands still
// while the part does.
func (f *Freezer) WithTimeout(ctx context.Context, part Part, d time.Duration, cause error) (context.Context, context.CancelFunc) {
	if f == nil {
		return context.WithTimeoutCause(ctx, d, cause)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	end := f.ran(part) + d
	go func() {
		timer := time.NewTimer(d)
		defer timer.Stop()
		for {
			select {
			case <-timer.C:
			case <-ctx.Done():
				return
			}
			if f.Await(ctx, part) != nil {
				return
			}
			left := end - f.ran(part)
			if left <= 0 {
				cancel(cause)
				return
			}
			timer.Reset(left)
		}
	}()
	return ctx, func() { cancel(context.Canceled) }
}

var epoch = time.Now()

// ran is how long the part was open since this process began.
func (f *Freezer) ran(part Part) time.Duration {
	f.mu.Lock()
	defer f.mu.Unlock()
	g := &f.gates[part]
	now := time.Since(epoch) - g.stood
	if g.open != nil {
		now -= time.Since(g.since)
	}
	return now
}
