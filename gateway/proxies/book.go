package proxies

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/proxylink"
)

const (
	askWithin  = 5 * time.Second // for one proxyd's whole ledger, and for an acknowledgement
	bookWithin = 10 * time.Second
)

var (
	booked   = daemon.Counter("berth_gateway_usage_rows_total")
	unusable = daemon.Counter("berth_gateway_usage_rows_unusable_total")
)

// bookOn books one proxyd's rows about once a second, on the gateway that leads
// the record.
func (p *Proxies) bookOn(ctx context.Context, f *follower) {
	for {
		n := 0
		if p.record.Leader() {
			behind := f.isBehind()
			var err error
			if n, err = p.settle(ctx, f, behind); err == nil && behind {
				f.caughtUp()
			} else if err != nil && ctx.Err() == nil {
				p.log.Warn("what a proxyd counted is not in the record yet", "proxyd", f.member.Name, "error", err)
			}
		} else {
			f.skip() // the leader hears them itself; this gateway asks for them should it lead
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(max(bookEvery, time.Duration(n)*time.Second/bookRate)):
		}
	}
}

// settle books what the stream brought, after asking for all of the ledger if
// told to, and says how many rows that was.
func (p *Proxies) settle(ctx context.Context, f *follower, all bool) (n int, err error) {
	rows := f.take()
	defer func() {
		if err == nil {
			n, rows = len(rows), nil
		}
		f.settled(rows)
	}()
	if all && f.isOpen() {
		asked, err := p.ask(ctx, f)
		if err != nil {
			return 0, err
		}
		rows = append(rows, asked...)
	}
	return 0, p.book(ctx, f, rows)
}

func (p *Proxies) ask(ctx context.Context, f *follower) ([]proxylink.Row, error) {
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	l, err := f.client.Ledger(ctx)
	return l.Rows, err
}

// book brings one proxyd's rows into the record and says so to it. An
// acknowledgement that fails costs nothing but that the rows come again.
func (p *Proxies) book(ctx context.Context, f *follower, rows []proxylink.Row) error {
	if len(rows) == 0 {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, bookWithin)
	defer cancel()
	if err := p.record.RecordUsage(ctx, p.countable(f, rows)); err != nil {
		return err
	}
	booked.Add(len(rows))
	if err := f.client.Acknowledge(ctx, proxylink.Ledger{Rows: rows}); err != nil {
		p.log.Debug("a proxyd did not hear that its rows are booked", "proxyd", f.member.Name, "error", err)
	}
	return nil
}

// countable leaves out what the record would refuse, so that one such row does
// not hold up the others for ever.
func (p *Proxies) countable(f *follower, rows []proxylink.Row) []proxylink.Row {
	good := make([]proxylink.Row, 0, len(rows))
	for _, r := range rows {
		if placement.Countable(r) {
			good = append(good, r)
			continue
		}
		unusable.Inc()
		p.log.Error("a proxyd counted what nobody can be billed for", "proxyd", f.member.Name, "session", r.SessionID, "type", r.Type,
			"hour", r.Hour, "up", r.Up, "down", r.Down)
	}
	return good
}

// Refresh asks every proxyd that answers for its ledger, so that the record
// then has all that was counted before the call. Calls at once share the work.
func (p *Proxies) Refresh(ctx context.Context) error {
	return p.pulls.do(ctx, p.pull)
}

func (p *Proxies) pull(ctx context.Context) error {
	var wg sync.WaitGroup
	followers := p.all()
	errs := make([]error, len(followers))
	for i, f := range followers {
		wg.Go(func() { _, errs[i] = p.settle(ctx, f, true) })
	}
	wg.Wait()
	return errors.Join(errs...)
}

// coalesced runs one call of a function at a time. Who comes while one runs
// waits for the next, together with all others who came meanwhile: what it
// answers began after they asked.
type coalesced struct {
	mu   sync.Mutex
	busy bool
	next *flight // nil: nobody waits; guarded by mu
}

type flight struct {
	done chan struct{}
	err  error // set before done closes
}

func (c *coalesced) do(ctx context.Context, work func(context.Context) error) error {
	c.mu.Lock()
	f := c.next
	if f == nil {
		f = &flight{done: make(chan struct{})}
		c.next = f
		if !c.busy {
			c.busy = true
			go c.run(context.WithoutCancel(ctx), work) // for the others too, whoever leaves
		}
	}
	c.mu.Unlock()
	select {
	case <-f.done:
		return f.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (c *coalesced) run(ctx context.Context, work func(context.Context) error) {
	for {
		c.mu.Lock()
		f := c.next
		c.next = nil
		if f == nil {
			c.busy = false
			c.mu.Unlock()
			return
		}
		c.mu.Unlock()
		within, cancel := context.WithTimeout(ctx, bookWithin)
		f.err = work(within)
		cancel()
		close(f.done)
	}
}
