// Package proxies knows the living proxyds and brings what they counted into
// the record.
//
//	gossip ─▶ one follower for each proxyd ──ledger stream──▶ rows to book ─┐ once a second, on the leader
//	                └─ Reachable: listed and streaming       Refresh ───────┴▶ Record.RecordUsage ─▶ acknowledge
//
// Only rows that the record has are acknowledged; it merges equal keys by
// maximum. So a gateway may die at any point of this, or several do it at once,
// and no byte is lost or counted twice.
package proxies

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// Members is what this package needs of gossip.
type Members interface {
	Members(role gossip.Role) []gossip.Member
	Changed() <-chan struct{}
}

// Record is what this package needs of the record.
type Record interface {
	Leader() bool
	RecordUsage(ctx context.Context, rows []proxylink.Row) error
}

const (
	// bookEvery is the pause between two bookings; bookRate stretches it when
	// many rows change, so that the record's log never gets more rows a second.
	bookEvery = time.Second
	bookRate  = 2000 // rows a second

	redial = 250 * time.Millisecond // between two tries of a stream; a refused dial costs nothing
)

// Proxies are the proxyds of this gateway's region. Safe for concurrent use.
type Proxies struct {
	members Members
	secret  *trust.Secret
	record  Record
	log     *slog.Logger
	pulls   coalesced

	mu        sync.Mutex
	followers map[memberKey]*follower // guarded by mu
}

// New makes the view of the proxyds that members knows. Run makes it follow them.
func New(members Members, secret *trust.Secret, record Record, log *slog.Logger) *Proxies {
	p := &Proxies{members: members, secret: secret, record: record, log: log, followers: map[memberKey]*follower{}}
	daemon.Gauge("berth_gateway_proxyds_reachable", func() float64 { return float64(len(p.reachable())) })
	return p
}

// Reachable says whether a proxyd of the region answers now.
func (p *Proxies) Reachable(region string) bool {
	for _, f := range p.reachable() {
		if f.member.Region == region {
			return true
		}
	}
	return false
}

// Any says whether any proxyd answers now.
func (p *Proxies) Any() bool { return len(p.reachable()) > 0 }

// reachable gives the proxyds that gossip knows and whose stream is open.
func (p *Proxies) reachable() (all []*follower) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.followers {
		if f.listed && f.isOpen() {
			all = append(all, f)
		}
	}
	return all
}

// all gives every proxyd that is followed: those that drain, too.
func (p *Proxies) all() (all []*follower) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.followers {
		all = append(all, f)
	}
	return all
}

// Run follows proxyds and books what they counted until ctx ends.
func (p *Proxies) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	defer wg.Wait()
	for {
		changed := p.members.Changed()
		p.meet(ctx, &wg)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		}
	}
}

// meet starts a follower for each proxyd that is new and notes which are gone.
func (p *Proxies) meet(ctx context.Context, wg *sync.WaitGroup) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range p.followers {
		f.listed = false
	}
	for _, m := range p.members.Members(gossip.Proxyd) {
		if m.Control == "" {
			continue // of a Berth older than ledgers
		}
		f := p.followers[key(m)]
		if f == nil {
			f = &follower{member: m, client: proxylink.NewClient(m.Control, p.secret)}
			p.followers[key(m)] = f
			wg.Go(func() { p.follow(ctx, f) })
		}
		f.listed = true
	}
}

// follow keeps a proxyd's stream open as long as gossip lists it. One that left
// is heard out: its connections end, and are counted, while it drains.
func (p *Proxies) follow(ctx context.Context, f *follower) {
	ctx, cancel := context.WithCancel(ctx)
	var booking sync.WaitGroup
	booking.Go(func() { p.bookOn(ctx, f) })
	defer f.client.Close()
	defer booking.Wait()
	defer cancel()
	for {
		err := f.client.FollowLedger(ctx, func(l proxylink.Ledger) error {
			if f.hear(l.Rows) {
				p.log.Info("proxyd is there", "proxyd", f.member.Name, "control", f.member.Control)
			}
			return nil
		})
		if f.close() && ctx.Err() == nil {
			p.log.Warn("proxyd is gone", "proxyd", f.member.Name, "control", f.member.Control, "error", err)
		}
		if ctx.Err() != nil || p.dismiss(f) {
			return
		}
		select {
		case <-ctx.Done():
		case <-time.After(redial):
		}
	}
}

// dismiss forgets a proxyd that gossip does not list, once its rows are booked.
func (p *Proxies) dismiss(f *follower) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if f.listed || f.waiting() {
		return false
	}
	delete(p.followers, key(f.member))
	return true
}
