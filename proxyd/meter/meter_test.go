package meter

import (
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/egress"
)

func TestLimitIsPerSession(t *testing.T) {
	m := New(2)
	a, err := m.Open("a", "p")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := m.Open("a", "p"); err != nil {
		t.Fatal(err)
	}
	_, err = m.Open("a", "p")
	var r *egress.Refusal
	if !errors.As(err, &r) || r.Reason != egress.TooManyConnections {
		t.Fatalf("third: %v", err)
	}
	if _, err := m.Open("b", "p"); err != nil {
		t.Fatalf("another session: %v", err)
	}
	a.Close()
	a.Close() // gives one place free, not two
	if _, err := m.Open("a", "p"); err != nil {
		t.Fatal(err)
	}
	if _, err := m.Open("a", "p"); err == nil {
		t.Fatal("closing twice freed two places")
	}
	if got := m.Session("a"); got != (Counts{Connections: 3, Open: 2}) {
		t.Fatalf("%+v", got)
	}
	if m.OpenConnections() != 3 {
		t.Fatalf("%d open", m.OpenConnections())
	}
}

// Whatever connections do at once, a session's counts are the sum of theirs.
func TestCountsAreSumsProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := New(egress.MaxConnections)
		sizes := rapid.SliceOfN(rapid.Int64Range(0, 1<<40), 0, 30).Draw(t, "sizes")
		var up, down int64
		var wg sync.WaitGroup
		for i, size := range sizes {
			c, err := m.Open("s", "p")
			if err != nil {
				t.Fatal(err)
			}
			up, down = up+size, down+2*size
			wg.Go(func() {
				f := c.Via(egress.Custom)
				f.Up(size)
				f.Down(size)
				c.Via(egress.None).Down(size)
				if u, d := c.Bytes(); u != size || d != 2*size {
					t.Errorf("connection %d: %d %d", i, u, d)
				}
				c.Close()
			})
		}
		wg.Wait()
		if got := m.Session("s"); got != (Counts{Up: up, Down: down, Connections: int64(len(sizes))}) {
			t.Fatalf("%+v, want %d up, %d down", got, up, down)
		}
	})
}

func TestOldSessionsAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := New(10)
		gone, _ := m.Open("gone", "p")
		gone.Via(egress.None).Up(5)
		gone.Close()
		busy, _ := m.Open("busy", "p")
		busy.Via(egress.None).Up(7)
		time.Sleep(forgetAfter + time.Hour)
		if _, err := m.Open("new", "p"); err != nil {
			t.Fatal(err)
		}
		if got := m.Session("gone"); got != (Counts{}) {
			t.Errorf("gone: %+v", got)
		}
		if got := m.Session("busy"); got.Up != 7 || got.Open != 1 {
			t.Errorf("busy: %+v", got)
		}
	})
}
