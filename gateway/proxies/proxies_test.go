package proxies

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

func TestRowsAreBookedAndAcknowledged(t *testing.T) {
	b, d := record(t), startProxyd(t, "127.0.0.1:0")
	d.carry("s", "i", now, 3, 4)
	p := run(t, newTown(member("p1", d)), b)
	until(t, "the booking", func() bool { return b.platform() == 7 })
	until(t, "the acknowledgement", d.allAcked)
	d.carry("s", "i", now, 1, 0)
	d.carry("s", "i", now.Add(time.Hour), 10, 0)
	until(t, "the second booking", func() bool { return b.platform() == 18 })
	if !p.Reachable("local") || p.Reachable("mars") || !p.Any() {
		t.Error("reachable is wrong")
	}
}

// A killed proxyd is known to be gone by the broken connection, long before
// gossip; a new one at its address is found again, and tells the old rows again.
func TestAKilledProxydIsNotReachable(t *testing.T) {
	b, d := record(t), startProxyd(t, "127.0.0.1:0")
	p := run(t, newTown(member("p1", d)), b)
	until(t, "the stream", func() bool { return p.Reachable("local") })
	d.carry("s", "i", now, 5, 0)
	until(t, "the booking", func() bool { return b.platform() == 5 })
	d.kill()
	until(t, "the news of its death", func() bool { return !p.Reachable("local") })
	d.carry("s", "j", now, 7, 0) // another incarnation, beside the old rows
	d.mu.Lock()
	clear(d.acked)
	d.mu.Unlock()
	d.listen(d.addr)
	until(t, "its return", func() bool { return p.Reachable("local") })
	until(t, "the replay", func() bool { return d.allAcked() && b.platform() == 12 })
}

// A proxyd that left gossip takes no new work, and is heard out.
func TestADrainingProxydIsHeardOut(t *testing.T) {
	b, d := record(t), startProxyd(t, "127.0.0.1:0")
	w := newTown(member("p1", d))
	p := run(t, w, b)
	until(t, "the stream", func() bool { return p.Reachable("local") })
	w.set()
	until(t, "the goodbye", func() bool { return !p.Reachable("local") })
	d.carry("s", "i", now, 9, 0)
	until(t, "the last rows", func() bool { return b.platform() == 9 })
	d.kill()
	until(t, "its end", func() bool { return len(p.all()) == 0 })
}

func TestOnlyTheLeaderBooks(t *testing.T) {
	b, d := record(t), startProxyd(t, "127.0.0.1:0")
	b.set(true, nil)
	d.carry("s", "i", now, 5, 0)
	p := run(t, newTown(member("p1", d)), b)
	until(t, "rows to go by", func() bool {
		for _, f := range p.all() {
			if f.isBehind() {
				return true
			}
		}
		return false
	})
	if b.platform() != 0 || d.allAcked() {
		t.Fatal("a gateway that does not lead booked")
	}
	d.mu.Lock()
	d.quiet = true // the row does not change any more: its stream is silent
	d.mu.Unlock()
	b.set(false, nil)
	until(t, "the new leader's booking", func() bool { return b.platform() == 5 })
}

// What the record refused is kept, even when the proxyd dies without having
// written it.
func TestRowsOfADeadProxydAreNotLost(t *testing.T) {
	b, d := record(t), startProxyd(t, "127.0.0.1:0")
	b.set(false, errors.New("no quorum"))
	p := run(t, newTown(member("p1", d)), b)
	until(t, "the stream", func() bool { return p.Reachable("local") })
	d.carry("s", "i", now, 5, 0)
	until(t, "the rows", func() bool { return p.all()[0].waiting() })
	d.kill()
	until(t, "the news of its death", func() bool { return !p.Any() })
	b.set(false, nil)
	until(t, "the booking", func() bool { return b.platform() == 5 })
}

// Nor when it is gone, from gossip too, while its last rows are on their way
// into a record that takes long.
func TestRowsUnderWayOfADeadProxydAreNotLost(t *testing.T) {
	b, d := record(t), startProxyd(t, "127.0.0.1:0")
	bookings := make(chan chan struct{})
	b.mu.Lock()
	b.hold = bookings
	b.mu.Unlock()
	w := newTown(member("p1", d))
	p := run(t, w, b)
	d.carry("s", "i", now, 5, 0)
	goOn := <-bookings
	d.kill()
	until(t, "the news of its death", func() bool { return !p.Any() })
	w.set()
	until(t, "the goodbye", func() bool {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, f := range p.followers {
			if f.listed {
				return false
			}
		}
		return true
	})
	tried := dials(t, d.addr)
	for range 2 { // it looks twice whether it has to go on
		select {
		case <-tried:
		case <-time.After(20 * time.Second):
			t.Fatal("the proxyd was forgotten before its rows were booked")
		}
	}
	b.mu.Lock()
	b.hold = nil
	b.mu.Unlock()
	close(goOn)
	until(t, "the booking", func() bool { return b.platform() == 5 })
	until(t, "its end", func() bool { return len(p.all()) == 0 })
}

func TestARowThatCannotBeBookedHoldsUpNone(t *testing.T) {
	b, d := record(t), startProxyd(t, "127.0.0.1:0")
	d.put(proxylink.Row{SessionID: "s", ProjectID: "p", Type: egress.None, Hour: 1, Incarnation: "i", Up: 1})
	d.carry("s", "i", now, 5, 0)
	run(t, newTown(member("p1", d)), b)
	until(t, "the booking", func() bool { return b.platform() == 5 && d.allAcked() })
}

// What was counted before Refresh was called is in the record when it returns.
func TestRefreshIsCurrent(t *testing.T) {
	b, d, e := record(t), startProxyd(t, "127.0.0.1:0"), startProxyd(t, "127.0.0.1:0")
	p := run(t, newTown(member("p1", d), member("p2", e)), b)
	until(t, "the streams", func() bool { return len(p.reachable()) == 2 })
	var wg sync.WaitGroup
	var carried atomic.Int64
	for _, x := range []*proxyd{d, e} {
		wg.Go(func() {
			for range 50 {
				x.carry("s", x.addr, now, 1, 0)
				low := carried.Add(1)
				if err := p.Refresh(context.Background()); err != nil {
					t.Error(err)
				}
				if got := b.platform(); got < low {
					t.Errorf("%d bytes after Refresh, want at least %d", got, low)
				}
			}
		})
	}
	wg.Wait()
	if got := b.platform(); got != 100 {
		t.Errorf("%d bytes in all", got)
	}
}

func TestRefreshSaysWhatFailed(t *testing.T) {
	b, d := record(t), startProxyd(t, "127.0.0.1:0")
	p := run(t, newTown(member("p1", d)), b)
	until(t, "the stream", func() bool { return p.Reachable("local") })
	no := errors.New("no quorum")
	b.set(true, no) // and the rounds stay out of it
	d.carry("s", "i", now, 1, 0)
	if err := p.Refresh(t.Context()); !errors.Is(err, no) {
		t.Error(err)
	}
	b.set(true, nil)
	if err := p.Refresh(t.Context()); err != nil || b.platform() != 1 {
		t.Error(err, b.platform())
	}
}

// Calls at once share a run, but none is answered by one that began before it.
func TestCoalesced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c coalesced
		var runs atomic.Int32
		work := func(context.Context) error {
			runs.Add(1)
			time.Sleep(time.Second)
			return nil
		}
		var wg sync.WaitGroup
		call := func() {
			wg.Go(func() {
				before := runs.Load()
				if err := c.do(t.Context(), work); err != nil || runs.Load() == before {
					t.Errorf("%v after %d runs, %d at the call", err, runs.Load(), before)
				}
			})
		}
		call()
		synctest.Wait()
		for range 10 {
			call()
		}
		wg.Wait()
		if n := runs.Load(); n != 2 {
			t.Errorf("%d runs for 11 calls", n)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.do(ctx, work); !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
		time.Sleep(2 * time.Second) // the run that nobody waits for ends
	})
}
