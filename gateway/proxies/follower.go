package proxies

import (
	"sync"

	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
)

// follower is one proxyd as this gateway hears of it.
type follower struct {
	member gossip.Member
	client *proxylink.Client
	listed bool // gossip knows it; guarded by Proxies.mu

	mu      sync.Mutex // guards what follows
	open    bool       // its stream is
	behind  bool       // rows went by unbooked: the whole ledger has to be asked for
	pending map[rowKey]proxylink.Row
	taken   int // how many have taken rows and are not done with them
}

// rowKey is what two rows that merge have in common.
type rowKey struct {
	session, typ, incarnation string
	hour                      int64
}

func keyOf(r proxylink.Row) rowKey {
	return rowKey{r.SessionID, string(r.Type), r.Incarnation, r.Hour}
}

// hear takes a line of the stream and says whether it was the first.
func (f *follower) hear(rows []proxylink.Row) (first bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	first, f.open = !f.open, true
	f.wait(rows)
	return first
}

// wait puts rows among those to book; f.mu is held.
func (f *follower) wait(rows []proxylink.Row) {
	if f.pending == nil {
		f.pending = make(map[rowKey]proxylink.Row, len(rows))
	}
	for _, r := range rows {
		k := keyOf(r)
		known := f.pending[k]
		r.Up, r.Down = max(r.Up, known.Up), max(r.Down, known.Down)
		f.pending[k] = r
	}
}

// close notes that the stream broke, and says whether it was open.
func (f *follower) close() (was bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	was, f.open = f.open, false
	return was
}

func (f *follower) isOpen() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.open
}

// waiting says whether rows are there to book, or are being booked.
func (f *follower) waiting() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return len(f.pending) > 0 || f.taken > 0
}

// take gives the rows to book; settled follows.
func (f *follower) take() (rows []proxylink.Row) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.pending {
		rows = append(rows, r)
	}
	f.pending = nil
	f.taken++
	return rows
}

// settled says that what take gave is booked but for these, which wait again: a
// proxyd that was killed may not have them any more.
func (f *follower) settled(unbooked []proxylink.Row) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.taken--
	f.wait(unbooked)
}

// skip forgets rows, which proxyd keeps until they are acknowledged.
func (f *follower) skip() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.behind = f.behind || len(f.pending) > 0
	f.pending = nil
}

func (f *follower) isBehind() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.behind
}

func (f *follower) caughtUp() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.behind = false
}

func key(m gossip.Member) memberKey { return memberKey{m.Name, m.Region, m.Control} }

// memberKey tells proxyds apart; another address is another one.
type memberKey struct{ name, region, control string }
