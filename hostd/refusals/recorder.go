package refusals

import (
	"context"
	"fmt"
	"hash/maphash"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/proxylink"
)

const (
	// perSecond is how many refusals of a session become events of their own
	// within a second; the rest of that second becomes one event.
	perSecond = 20
	// writers append at once, each for its share of the sessions; queue is how
	// much waits for one.
	writers = 8
	queue   = 256
)

var (
	unheard = daemon.Counter("berth_hostd_refusals_dropped_total") // of sessions that are not here in that epoch
	summed  = daemon.Counter("berth_hostd_refusals_summed_total")
)

// key is a session in an epoch.
type key struct {
	session string
	epoch   uint64
}

// entry is an event on its way into a log.
type entry struct {
	key
	event event.Event
}

// recorder bounds what comes in and writes it, in order within a session.
type recorder struct {
	sessions Sessions
	seed     maphash.Seed
	queues   [writers]chan entry

	mu     sync.Mutex
	second map[key]*count // guarded by mu: of the second that runs
}

// count is how many refusals a session had this second.
type count struct {
	own  int // events of their own
	more int
	last proxylink.Refused
}

func newRecorder(s Sessions) *recorder {
	r := &recorder{sessions: s, seed: maphash.MakeSeed(), second: map[key]*count{}}
	for i := range r.queues {
		r.queues[i] = make(chan entry, queue)
	}
	return r
}

// run writes until ctx ends.
func (r *recorder) run(ctx context.Context) {
	var wg sync.WaitGroup
	defer wg.Wait()
	for _, q := range r.queues {
		wg.Go(func() { r.write(ctx, q) })
	}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			r.sum()
		}
	}
}

func (r *recorder) write(ctx context.Context, q chan entry) {
	for {
		select {
		case <-ctx.Done():
			return
		case e := <-q:
			if !r.sessions.Record(ctx, e.session, e.epoch, e.event) {
				unheard.Inc()
			}
		}
	}
}

// take takes one refusal in; it never waits.
func (r *recorder) take(one proxylink.Refused) {
	daemon.Counter(fmt.Sprintf("berth_hostd_refusals_total{reason=%q}", one.Reason)).Inc()
	k := key{one.SessionID, one.Epoch}
	r.mu.Lock()
	defer r.mu.Unlock()
	c := r.second[k]
	if c == nil {
		c = &count{}
		r.second[k] = c
	}
	if c.own < perSecond && r.put(entry{k, describe(one)}) {
		c.own++
		return
	}
	summed.Inc()
	c.more++
	c.last = one
}

// put queues an event; false when its writer is behind.
func (r *recorder) put(e entry) bool {
	select {
	case r.queues[maphash.String(r.seed, e.session)%writers] <- e:
		return true
	default:
		return false
	}
}

// sum ends a second: what was too much becomes one event a session.
func (r *recorder) sum() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for k, c := range r.second {
		if c.more > 0 && !r.put(entry{k, more(c)}) {
			*c = count{more: c.more, last: c.last} // the next second's
			continue
		}
		delete(r.second, k)
	}
}
