// Package refusals keeps what proxyd refused until the host that the connection
// came from fetches it, for the session's events.
//
// Nothing waits for a host: each has a bounded queue, of which the oldest goes
// first and is counted.
package refusals

import (
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/proxylink"
)

const (
	maxQueue = 1024            // refusals of a host that wait
	maxHosts = 4096            // queues
	keep     = 5 * time.Minute // a queue that nobody reads
)

var dropped = daemon.Counter("berth_proxyd_refusals_dropped_total")

// Feed keeps the queues. Safe for concurrent use.
type Feed struct {
	mu    sync.Mutex
	hosts map[string]*queue
}

// queue is one host's; the Feed's mu guards all of it.
type queue struct {
	waiting []proxylink.Refused
	wake    chan struct{} // has room for one; whoever reads looks again
	taken   chan struct{} // closed when another reader takes over; nil: nobody reads
	used    time.Time
}

// New makes a feed.
func New() *Feed { return &Feed{hosts: map[string]*queue{}} }

// Put keeps r for host.
func (f *Feed) Put(host string, r proxylink.Refused) {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.queue(host)
	if q == nil {
		dropped.Inc()
		return
	}
	if len(q.waiting) >= maxQueue {
		q.waiting = q.waiting[1:]
		dropped.Inc()
	}
	q.waiting = append(q.waiting, r)
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// queue finds or makes a host's queue, nil when there are too many; f.mu is held.
func (f *Feed) queue(host string) *queue {
	now := time.Now()
	if q := f.hosts[host]; q != nil {
		if q.taken != nil || now.Sub(q.used) < keep {
			q.used = now
			return q
		}
		dropped.Add(len(q.waiting)) // of a host that was away: its sessions are over
	}
	if f.hosts[host] == nil && len(f.hosts) >= maxHosts && !f.sweep(now) {
		return nil
	}
	q := &queue{wake: make(chan struct{}, 1), used: now}
	f.hosts[host] = q
	return q
}

// sweep drops queues that nobody reads; f.mu is held.
func (f *Feed) sweep(now time.Time) (room bool) {
	for host, q := range f.hosts {
		if q.taken == nil && now.Sub(q.used) >= keep {
			dropped.Add(len(q.waiting))
			delete(f.hosts, host)
			room = true
		}
	}
	return room
}

// reader is the one who reads a host's queue.
type reader struct {
	f     *Feed
	q     *queue
	taken chan struct{}
}

// read takes a host's queue over from whoever read it.
func (f *Feed) read(host string) (*reader, bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	q := f.queue(host)
	if q == nil {
		return nil, false
	}
	if q.taken != nil {
		close(q.taken)
	}
	q.taken = make(chan struct{})
	return &reader{f, q, q.taken}, true
}

// next takes what waits.
func (r *reader) next() []proxylink.Refused {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	if r.q.taken != r.taken {
		return nil
	}
	r.q.used = time.Now()
	list := r.q.waiting
	r.q.waiting = nil
	return list
}

// close gives the queue up, and back what could not be written.
func (r *reader) close(unsent []proxylink.Refused) {
	r.f.mu.Lock()
	defer r.f.mu.Unlock()
	all := append(unsent, r.q.waiting...)
	if over := len(all) - maxQueue; over > 0 {
		all = all[over:]
		dropped.Add(over)
	}
	r.q.waiting = all
	if r.q.taken == r.taken {
		r.q.taken = nil
		return
	}
	select { // the one who took over
	case r.q.wake <- struct{}{}:
	default:
	}
}
