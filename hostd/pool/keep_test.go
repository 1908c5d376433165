package pool

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// A place that was promised is nobody else's until it is used, taken back or
// its time is over.
func TestKeptPlaces(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Parallel: 1, MaxTotal: 2})
		for range 2 { // again is the same place
			if err := p.Keep("a", time.Minute); err != nil {
				t.Fatal(err)
			}
		}
		if err := p.Keep("b", time.Minute); err != nil {
			t.Fatal(err)
		}
		if _, _, err := p.Take(t.Context(), session.Shell); !apierr.Is(err, apierr.NoCapacity) || p.Free() != 0 {
			t.Errorf("a promised place was given away: %v, %d free", err, p.Free())
		}
		if err := p.Keep("c", time.Minute); !apierr.Is(err, apierr.NoCapacity) {
			t.Errorf("a third of two places was promised: %v", err)
		}
		g, err := p.Make("a", func() (*Guest, error) { return p.boot(t.Context(), session.Shell) })
		if err != nil {
			t.Fatal(err)
		}
		p.Release("a") // used: it does nothing
		if p.Free() != 0 {
			t.Errorf("%d free beside a machine and a promise", p.Free())
		}
		p.Release("b")
		p.Release("b")
		if p.Free() != 1 {
			t.Errorf("%d free after a promise was taken back", p.Free())
		}
		if err := p.Keep("d", time.Minute); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute + time.Second)
		if p.Free() != 1 {
			t.Errorf("%d free after a promise ran out", p.Free())
		}
		if err := p.Destroy(g); err != nil {
			t.Error(err)
		}
		stop()
		y.balanced(t, 0)
	})
}

// Whoever was promised a host's last place gets a machine there also when none
// waits: it is booted in that place.
func TestKeptPlaceOfAMachineBootedNow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Parallel: 1, MaxTotal: 1})
		if err := p.Keep("a", time.Minute); err != nil {
			t.Fatal(err)
		}
		g, warm, err := p.TakeKept(t.Context(), session.Shell, "a")
		if err != nil || warm {
			t.Fatalf("warm %v, %v", warm, err)
		}
		p.Release("a")
		if p.Free() != 0 {
			t.Errorf("%d free beside the machine", p.Free())
		}
		if err := p.Destroy(g); err != nil {
			t.Error(err)
		}
		stop()
		y.balanced(t, 0)
	})
}
