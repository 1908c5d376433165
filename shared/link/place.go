package link

import (
	"context"
	"time"
)

// Place tells the dialler's side what the record says of the machine. still:
// it stands still, because its session is paused or an operation on it is open.
// Then nothing is dialled, and neither the keep clock nor Dial's limit runs;
// both count anew when it goes on. changed is closed when the answer, or the
// place, may be another: time to ask again, and to dial at once. It is called
// when a stream is broken, never while it is sound, and must not block.
type Place func() (still bool, changed <-chan struct{})

// still asks Place. Not to be called with the lock.
func (o *Options) still() bool {
	if o.Place == nil {
		return false
	}
	still, _ := o.Place()
	return still
}

const (
	// A place that has changed is dialled eagerly for a while: the machine is
	// about to go on there, and whatever it takes longer a client sees as a gap.
	eagerFor     = 5 * time.Second
	eagerBackoff = 20 * time.Millisecond
)

// pacer decides when a broken stream dials.
type pacer struct {
	place Place // nil: there is no record to ask
	tries int   // failures since the place changed
	eager time.Time
	clock func(run bool) // stops the clock that limits the dialling, or starts it anew
}

// wait returns when the next dial is due; false: ctx ended first.
func (p *pacer) wait(ctx context.Context, wake <-chan struct{}) bool {
	for ctx.Err() == nil {
		changed := p.standstill(ctx)
		if p.tries == 0 || p.pause(ctx, wake, changed) {
			p.tries++
			break
		}
		p.renew()
	}
	return ctx.Err() == nil
}

// standstill waits until the machine does not stand still, or ctx ends.
func (p *pacer) standstill(ctx context.Context) (changed <-chan struct{}) {
	if p.place == nil {
		return nil
	}
	still, changed := p.place()
	if !still {
		return changed
	}
	p.clock(false)
	defer p.clock(true)
	for still && ctx.Err() == nil {
		select {
		case <-ctx.Done():
		case <-changed:
		}
		still, changed = p.place()
	}
	p.renew()
	return changed
}

func (p *pacer) renew() {
	p.tries, p.eager = 0, time.Now().Add(eagerFor)
}

// pause waits for the backoff; false: the place changed first.
func (p *pacer) pause(ctx context.Context, wake, changed <-chan struct{}) bool {
	d := backoff(p.tries - 1)
	if time.Now().Before(p.eager) {
		d = min(d, eagerBackoff)
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-wake:
	case <-t.C:
	case <-changed:
		return false
	}
	return true
}

// runKeep stops the clocks of a broken stream, or starts them anew.
func (c *Conn) runKeep(run bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.standing = !run
	c.keep.stop()
	if !run || c.t != nil || c.over {
		return
	}
	c.keep.start(c.opt.Keep, c.expire)
	if c.closed {
		c.linger.stop()
		c.linger.start(c.opt.Keep, c.onLinger)
	}
}
