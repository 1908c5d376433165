package sessions

import (
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// A machine that takes its time to go on keeps no other news of its host
// waiting, and its verdict is not told twice at once.
func TestAVerdictThatTakesLongDelaysNothing(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	slow, other := r.create(), r.create()
	hang := make(chan struct{})
	var told atomic.Int32
	r.setFault(r.host, func(step string) *fault {
		if step != "verdict" {
			return nil
		}
		told.Add(1)
		return &fault{hang: hang}
	})
	st := held(slow.ID, 1, "earlier", hostlink.Source)
	r.host.run(st)
	r.run()
	until(t, "the verdict is on its way", func() bool { return told.Load() == 1 })
	r.host.bury(hostlink.Tombstone{SessionID: other.ID, Epoch: 1, EndedAt: time.Now(), Reason: session.Released})
	until(t, "the other session's end is in the record", func() bool { return r.session(other.ID).Status.Ended() })
	c := r.client()
	for range 3 { // as those that come with the watch
		r.use.compare(t.Context(), "h1", c, r.host.inventory(), time.Now())
	}
	if n := told.Load(); n != 1 {
		t.Errorf("told %d times at once", n)
	}
	close(hang)
	until(t, "the machine goes on", func() bool { return r.host.inventory().Sessions[0].Held == nil })
}

// So many verdicts are told at once, each once, and nothing stays behind them.
func TestTellingIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var (
			all       telling
			mu        sync.Mutex
			now, most = map[string]int{}, map[string]int{}
			done      = map[string]int{}
			goOn      = make(chan struct{})
		)
		for range 2 { // the second inventory has the same
			for i := range 20 {
				for _, host := range []string{"a", "b"} {
					name := fmt.Sprint(i)
					all.add(host, name, func() {
						mu.Lock()
						now[host]++
						most[host] = max(most[host], now[host])
						done[host+name]++
						mu.Unlock()
						if host == "a" {
							<-goOn
						}
						mu.Lock()
						now[host]--
						mu.Unlock()
					}, func(work func()) { go work() })
				}
			}
		}
		synctest.Wait()
		mu.Lock()
		if most["a"] != tellAtOnce || now["b"] != 0 || len(done) != 20+tellAtOnce {
			t.Errorf("at most %v at once, now %v, %d told", most, now, len(done))
		}
		mu.Unlock()
		close(goOn)
		synctest.Wait()
		for name, n := range done {
			if n != 1 && name[0] == 'a' {
				t.Errorf("%s was told %d times", name, n)
			}
		}
		if len(done) != 40 || len(all.hosts) != 0 || most["a"] != tellAtOnce {
			t.Errorf("%d told, %d hosts left, at most %v at once", len(done), len(all.hosts), most)
		}
	})
}
