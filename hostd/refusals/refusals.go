// Package refusals takes the connections that proxyds refused into the events
// of the sessions they were for. It follows the feed of every proxyd of its
// region, across broken streams, and never keeps one waiting: what is too much
// for a session's log is counted.
package refusals

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
)

// Sessions are those of this host.
type Sessions interface {
	// Record adds an event to the log of a session that runs here in this epoch;
	// false when it does not.
	Record(ctx context.Context, sessionID string, epoch uint64, e event.Event) bool
}

// Feed is one proxyd's; *proxylink.Client is one.
type Feed interface {
	// FollowRefusals calls see for each refused connection that came from host.
	FollowRefusals(ctx context.Context, host string, see func(proxylink.Refused) error) error
	Close()
}

// Members is what this package needs of gossip.
type Members interface {
	Members(role gossip.Role) []gossip.Member
	Changed() <-chan struct{}
}

// Config says whose refusals are followed, for whom.
type Config struct {
	Host     string // name of this hostd
	Region   string
	Members  Members
	Open     func(controlAddr string) Feed
	Sessions Sessions
	Log      *slog.Logger
}

const (
	firstWait = 100 * time.Millisecond // before a broken feed is opened again
	lastWait  = 5 * time.Second
)

var broken = daemon.Counter("berth_hostd_refusal_feed_breaks_total")

// Run follows the feeds of the region's proxyds until ctx ends.
func Run(ctx context.Context, c Config) {
	var wg sync.WaitGroup
	defer wg.Wait()
	r := newRecorder(c.Sessions)
	wg.Go(func() { r.run(ctx) })
	followed := map[string]bool{}
	left := make(chan string) // addresses whose feed is not followed any more
	for {
		changed := c.Members.Changed() // before the look, so that nothing falls between
		for addr := range c.proxyds() {
			if !followed[addr] {
				followed[addr] = true
				wg.Go(func() {
					c.follow(ctx, addr, r)
					select {
					case left <- addr:
					case <-ctx.Done():
					}
				})
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case addr := <-left: // it may be back already: look again
			delete(followed, addr)
		}
	}
}

// proxyds are the control addresses of the region's.
func (c Config) proxyds() map[string]bool {
	addrs := map[string]bool{}
	for _, m := range c.Members.Members(gossip.Proxyd) {
		if m.Region == c.Region && m.Control != "" {
			addrs[m.Control] = true
		}
	}
	return addrs
}

// follow hears one proxyd until it is gone. One that has left the pool may still
// finish connections: its feed is followed until it breaks.
func (c Config) follow(ctx context.Context, addr string, r *recorder) {
	feed := c.Open(addr)
	defer feed.Close()
	for wait := firstWait; ; wait = min(2*wait, lastWait) {
		err := feed.FollowRefusals(ctx, c.Host, func(one proxylink.Refused) error {
			wait = firstWait
			r.take(one)
			return nil
		})
		if ctx.Err() != nil {
			return
		}
		broken.Inc()
		c.Log.Debug("a proxyd's refusals are not heard", "proxyd", addr, "error", err)
		if !c.proxyds()[addr] {
			return
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
