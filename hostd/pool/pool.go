// Package pool keeps machines that are already booted, with agent and Chrome
// waiting, so that a create costs no boot. Taking one never waits for the
// refill; an empty pool starts a machine on demand.
package pool

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/control"
	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/session"
)

// Guest is a booted machine with its place in the network and its agent. It
// belongs to whoever took it: Destroy gives everything back.
type Guest struct {
	Machine machine.Machine
	Slot    Slot
	Agent   *control.Agent
	Kind    session.Kind
	Born    time.Time
	Forget  func() error // takes the machine out of the book; nil: it is in none
}

// Slot is what the pool needs of a network slot.
type Slot interface {
	Info() machine.Slot
	SetEgress(dial func(context.Context) (net.Conn, error))
	Close(ctx context.Context) error
}

// Boot makes a machine of a kind and returns it ready, or leaves nothing.
type Boot func(ctx context.Context, kind session.Kind) (*Guest, error)

// Config sizes the pool.
type Config struct {
	Target   map[session.Kind]int // machines of each kind kept ready
	Minimum  map[session.Kind]int // below it the refill does not wait for Pace
	Parallel int                  // boots under way at once for the refill
	Pace     time.Duration        // least time between two refill boots
	Calm     time.Duration        // a refill boot waits until none was taken for so long, at most four times that
	MaxAge   time.Duration        // a machine that waited longer is replaced
	MaxTotal int                  // machines on this host, taken ones included
	// Finish makes in a waiting machine what one that somebody waits for gets
	// later; nil: there is nothing.
	Finish func(context.Context, *Guest) error
}

// Pool keeps the machines. Safe for concurrent use.
type Pool struct {
	cfg  Config
	boot Boot
	log  *slog.Logger

	ctx    context.Context
	cancel context.CancelCauseFunc
	kick   chan struct{} // capacity 1: something to refill
	cold   chan struct{} // a permit for each start on demand under way
	work   sync.WaitGroup

	mu      sync.Mutex // guards what follows
	ready   map[session.Kind][]*Guest
	booting map[session.Kind]int
	total   int                    // machines booting, ready or taken
	taken   time.Time              // of the last machine that was taken
	held    time.Time              // since when the refill waits for calm, zero: it does not
	kept    map[string]*time.Timer // places promised, which end the promise; counted in total
	changed chan struct{}          // closed and replaced whenever ready changes
	had     map[session.Kind]bool  // kinds of which a machine has waited
	failed  error                  // of the last boot for the pool
}

// New makes a pool that begins to fill when Run is called.
func New(cfg Config, boot Boot, log *slog.Logger) *Pool {
	ctx, cancel := context.WithCancelCause(context.Background())
	p := &Pool{cfg: cfg, boot: boot, log: log, ctx: ctx, cancel: cancel, kick: make(chan struct{}, 1), cold: make(chan struct{}, max(2, 2*cfg.Parallel)),
		ready: map[session.Kind][]*Guest{}, booting: map[session.Kind]int{}, kept: map[string]*time.Timer{}, changed: make(chan struct{}), had: map[session.Kind]bool{}}
	for _, k := range session.Kinds() {
		daemon.Gauge(`berth_pool_ready{kind="`+string(k)+`"}`, func() float64 { return float64(p.Ready()[k]) })
	}
	return p
}

// Ready counts the waiting machines of each kind.
func (p *Pool) Ready() map[session.Kind]int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := make(map[session.Kind]int, len(p.ready))
	for k, g := range p.ready {
		n[k] = len(g)
	}
	return n
}

// Filled is nil once a machine of each kind that is kept ready has waited, or
// the host is full, and else says what is missing: the first of a kind may need
// a template made.
func (p *Pool) Filled() error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, k := range session.Kinds() {
		switch {
		case p.cfg.Target[k] == 0 || p.had[k] || p.total-p.booting[k] >= p.cfg.MaxTotal:
		case p.failed != nil:
			return fmt.Errorf("no machine of kind %s is ready yet; the last one did not start: %w", k, p.failed)
		default:
			return fmt.Errorf("the first machine of kind %s is being made", k)
		}
	}
	return nil
}

// Free says how many more machines this host would start.
func (p *Pool) Free() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	free := p.cfg.MaxTotal - p.total
	for _, g := range p.ready {
		free += len(g)
	}
	return max(free, 0)
}

// Changed is closed at the next change of Ready or Free.
func (p *Pool) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

func (p *Pool) notifyLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
	select {
	case p.kick <- struct{}{}:
	default:
	}
}

// Take gives a machine of the kind to the caller: a waiting one (warm), else
// one started now. A crowd on an empty pool starts machines a few at a time, or
// none would be ready before its caller's deadline, and takes what the refill
// brings meanwhile. NoCapacity when the host is full.
func (p *Pool) Take(ctx context.Context, kind session.Kind) (g *Guest, warm bool, err error) {
	return p.TakeKept(ctx, kind, "")
}

// TakeKept is Take for somebody to whom a place was promised under a name: a
// machine started now gets that place, and a waiting one has its own.
func (p *Pool) TakeKept(ctx context.Context, kind session.Kind, kept string) (g *Guest, warm bool, err error) {
	for {
		changed := p.Changed() // before the look, so that nothing falls between
		if g, err = p.pop(kind); err != nil {
			return nil, false, err
		}
		if g != nil && !dead(g) {
			return g, true, nil
		}
		if g != nil { // it died while it waited
			p.destroyLogged(g)
			continue
		}
		select {
		case p.cold <- struct{}{}:
			g, err := p.Make(kept, func() (*Guest, error) { return p.boot(ctx, kind) })
			<-p.cold
			return g, false, err
		case <-changed:
		case <-ctx.Done():
			return nil, false, context.Cause(ctx)
		}
	}
}

// Make gives a place on this host to a machine that the caller makes: one from
// a capture is no waiting machine. A place kept under the name is taken, "" names
// none. NoCapacity when the host is full.
func (p *Pool) Make(kept string, boot func() (*Guest, error)) (*Guest, error) {
	if !p.takeKept(kept) {
		if err := p.reserve(); err != nil {
			return nil, err
		}
	}
	g, err := boot()
	if err != nil {
		p.forget()
		return nil, err
	}
	return g, nil
}

func (p *Pool) pop(kind session.Kind) (*Guest, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	waiting := p.ready[kind]
	if len(waiting) == 0 {
		return nil, nil
	}
	g := waiting[0]
	p.ready[kind] = waiting[1:]
	if p.taken = time.Now(); p.held.IsZero() {
		p.held = p.taken
	}
	p.notifyLocked()
	return g, nil
}

// reserve counts a machine about to be started for a session. A waiting
// machine of another kind makes room when the host is full.
func (p *Pool) reserve() error {
	p.mu.Lock()
	if p.total < p.cfg.MaxTotal {
		p.total++
		p.mu.Unlock()
		return nil
	}
	var victim *Guest
	for kind, waiting := range p.ready {
		if len(waiting) > 0 {
			victim, p.ready[kind] = waiting[0], waiting[1:]
			p.notifyLocked()
			break
		}
	}
	p.mu.Unlock()
	if victim == nil {
		return apierr.New(apierr.NoCapacity, "all machines of this host are taken; try again soon").After(2 * time.Second)
	}
	if err := victim.Destroy(); err != nil { // its place passes to the caller
		p.log.Warn("a waiting machine did not end cleanly", "machine", victim.Machine.ID(), "error", err)
	}
	return nil
}

func (p *Pool) forget() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total--
	p.notifyLocked()
}

// Adopted counts a machine that an earlier hostd had given to a session.
func (p *Pool) Adopted() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total++
}

// Offer puts an adopted machine back among the waiting ones.
func (p *Pool) Offer(g *Guest) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total++
	p.waitsLocked(g)
	p.notifyLocked()
}

func (p *Pool) waitsLocked(g *Guest) {
	p.ready[g.Kind] = append(p.ready[g.Kind], g)
	p.had[g.Kind] = true
}

// Rejoin is Offer for a machine that has something to do first: nobody knows how
// far an earlier hostd came with it. It counts as booting until wake is done,
// which runs in the background; a machine that does not wake is ended.
func (p *Pool) Rejoin(g *Guest, wake func(context.Context, *Guest) error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.total++
	p.booting[g.Kind]++
	p.work.Go(func() {
		err := wake(p.ctx, g)
		if err == nil {
			err = p.finish(g)
		}
		p.mu.Lock()
		p.booting[g.Kind]--
		if err == nil {
			p.waitsLocked(g)
		}
		p.notifyLocked()
		p.mu.Unlock()
		if err != nil && p.ctx.Err() == nil { // when hostd stops, the next one tries again
			p.log.Warn("an adopted machine did not wake", "machine", g.Machine.ID(), "error", err)
			p.destroyLogged(g)
		}
	})
}

func (p *Pool) finish(g *Guest) error {
	if p.cfg.Finish == nil {
		return nil
	}
	return p.cfg.Finish(p.ctx, g)
}

// Destroy ends a machine that was taken and frees its place.
func (p *Pool) Destroy(g *Guest) error { return p.destroy(g) }

func (p *Pool) destroy(g *Guest) error {
	err := g.Destroy()
	p.forget()
	return err
}

func (p *Pool) destroyLogged(g *Guest) {
	if err := p.destroy(g); err != nil {
		p.log.Warn("a waiting machine did not end cleanly", "machine", g.Machine.ID(), "error", err)
	}
}

// Destroy ends the machine and gives its slot back. The order matters: a closed
// slot is given out again, so by then the machine must be gone and the book must
// not name that slot for it any more, or the next hostd would take the slot
// from its new owner. Where a step fails the rest is left to the next start.
func (g *Guest) Destroy() error {
	g.Agent.Close()
	// Not the caller's context: what was acquired is given back whoever left.
	ctx, cancel := context.WithTimeout(context.Background(), destroyTime)
	defer cancel()
	if err := g.Machine.Stop(ctx); err != nil {
		return err
	}
	if g.Forget != nil {
		if err := g.Forget(); err != nil {
			return fmt.Errorf("forget machine: %w", err)
		}
	}
	return g.Slot.Close(ctx)
}

const destroyTime = 30 * time.Second
