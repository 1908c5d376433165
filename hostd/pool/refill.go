package pool

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/session"
)

var (
	boots      = daemon.Counter(`berth_pool_boots_total{result="ok"}`)
	bootsError = daemon.Counter(`berth_pool_boots_total{result="error"}`)
)

// Run keeps the pool filled until ctx ends. The waiting machines stay: a
// restarted hostd adopts them.
func (p *Pool) Run(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { p.cancel(context.Cause(ctx)) })
	defer stop()
	defer p.work.Wait()
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	paced := time.NewTimer(0) // fires when the pace allows another boot
	defer paced.Stop()
	calm := time.NewTimer(0) // fires when it may be calm again
	defer calm.Stop()
	ready := false
	for {
		p.retire()
		for {
			if wait := p.unrest(time.Now()); wait > 0 {
				calm.Reset(wait)
				break
			}
			kind, ok := p.next(ready)
			if !ok {
				break
			}
			ready = p.cfg.Pace <= 0
			paced.Reset(p.cfg.Pace)
			p.work.Go(func() { p.fill(kind) })
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-paced.C:
			ready = true
		case <-calm.C:
		case <-p.kick:
		case <-tick.C:
		}
	}
}

// unrest says how long the refill still waits for calm. A boot takes the
// processors that those who have just got a machine want for their first page;
// without end it does not wait, since the pool must keep up with steady use.
func (p *Pool) unrest(now time.Time) time.Duration {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held.IsZero() {
		return 0
	}
	wait := min(p.taken.Add(p.cfg.Calm).Sub(now), p.held.Add(4*p.cfg.Calm).Sub(now))
	if wait <= 0 {
		p.held = time.Time{}
	}
	return wait
}

// next picks the kind whose pool lacks most, relative to its target, and counts
// its boot as begun. Below its minimum a kind does not wait for the pace.
func (p *Pool) next(paced bool) (session.Kind, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	under := 0
	for _, n := range p.booting {
		under += n
	}
	if under >= p.cfg.Parallel || p.total >= p.cfg.MaxTotal {
		return "", false
	}
	best, lack := session.Kind(""), 0.0
	for _, k := range session.Kinds() {
		target, have := p.cfg.Target[k], len(p.ready[k])+p.booting[k]
		if have >= target || !paced && have >= p.cfg.Minimum[k] {
			continue
		}
		missing := float64(target-have) / float64(target)
		if have < p.cfg.Minimum[k] {
			missing += 1 // before any kind that has its minimum
		}
		if missing > lack {
			best, lack = k, missing
		}
	}
	if best == "" {
		return "", false
	}
	p.booting[best]++
	p.total++
	return best, true
}

// fill boots one machine for the pool. A failed boot waits before it gives its
// place back, so that a broken image does not spin.
func (p *Pool) fill(kind session.Kind) {
	g, err := p.bootWhole(kind)
	if err != nil && p.ctx.Err() == nil {
		bootsError.Inc()
		p.log.Warn("a machine for the pool did not start", "kind", kind, "error", err)
		select {
		case <-p.ctx.Done():
		case <-time.After(2 * time.Second):
		}
	}
	p.mu.Lock()
	p.booting[kind]--
	p.failed = err
	if err == nil {
		boots.Inc()
		p.waitsLocked(g)
	} else {
		p.total--
	}
	p.notifyLocked()
	p.mu.Unlock()
}

func (p *Pool) bootWhole(kind session.Kind) (*Guest, error) {
	g, err := p.boot(p.ctx, kind)
	if err != nil {
		return nil, err
	}
	if err := p.finish(g); err != nil {
		return nil, errors.Join(fmt.Errorf("finish machine: %w", err), g.Destroy())
	}
	return g, nil
}

// retire ends waiting machines that died or grew old. All of a pool have about
// one age: the old ones go one at a time, each when the one before has been
// replaced, so that nobody finds the pool empty.
func (p *Pool) retire() {
	p.mu.Lock()
	defer p.mu.Unlock()
	before := 0
	for _, n := range p.booting {
		before += n
	}
	for kind, waiting := range p.ready {
		full := len(waiting) >= p.cfg.Target[kind] || p.total >= p.cfg.MaxTotal
		kept := make([]*Guest, 0, len(waiting))
		for _, g := range waiting {
			old := p.cfg.MaxAge > 0 && time.Since(g.Born) > p.cfg.MaxAge && full && before == 0
			if old {
				before++
			}
			if old || dead(g) {
				p.work.Go(func() { p.destroyLogged(g) })
			} else {
				kept = append(kept, g)
			}
		}
		p.ready[kind] = kept
	}
}

func dead(g *Guest) bool {
	select {
	case <-g.Machine.Done():
		return true
	default:
		return false
	}
}
