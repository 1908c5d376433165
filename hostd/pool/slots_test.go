package pool

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
)

// slotMaker counts slots, and makes at most room of them at a time.
type slotMaker struct {
	mu    sync.Mutex
	made  int
	there map[int]bool
	room  int
}

type countedSlot struct {
	from *slotMaker
	n    int
}

func (m *slotMaker) make(context.Context) (Slot, error) {
	time.Sleep(20 * time.Millisecond)
	m.mu.Lock()
	defer m.mu.Unlock()
	if len(m.there) == m.room {
		return nil, errors.New("no free slot")
	}
	m.made++
	m.there[m.made] = true
	return countedSlot{m, m.made}, nil
}

func (m *slotMaker) left() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.there)
}

func (s countedSlot) Info() machine.Slot                                { return machine.Slot{Index: s.n} }
func (s countedSlot) SetEgress(func(context.Context) (net.Conn, error)) {}
func (s countedSlot) Close(context.Context) error {
	s.from.mu.Lock()
	defer s.from.mu.Unlock()
	delete(s.from.there, s.n)
	return nil
}

// withSlots runs a test with Slots that run, and sees that they end without a spare.
func withSlots(t *testing.T, room int, test func(m *slotMaker, s *Slots)) {
	synctest.Test(t, func(t *testing.T) {
		m := &slotMaker{there: map[int]bool{}, room: room}
		s := NewSlots(m.make, 5*time.Second, slog.New(slog.NewTextHandler(io.Discard, nil)))
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- s.Run(ctx) }()
		test(m, s)
		cancel()
		if err := <-ended; !errors.Is(err, context.Canceled) {
			t.Errorf("Run: %v", err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.spare != nil {
			t.Error("a spare is left")
		}
	})
}

func take(t *testing.T, get func(context.Context) (Slot, error), most time.Duration) Slot {
	t.Helper()
	began := time.Now()
	got, err := get(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if took := time.Since(began); took > most {
		t.Errorf("took %s, want at most %s", took, most)
	}
	return got
}

func TestSpareSlotIsThereAtOnceAndReplacedInTheCalm(t *testing.T) {
	withSlots(t, 8, func(m *slotMaker, s *Slots) {
		time.Sleep(6 * time.Second)
		if n := m.left(); n != 1 {
			t.Fatalf("%d slots made ahead, want 1", n)
		}
		first := take(t, s.Take, 0)
		time.Sleep(4 * time.Second)
		if n := m.left(); n != 1 {
			t.Errorf("%d slots soon after one was taken, want 1", n)
		}
		second := take(t, s.Take, 20*time.Millisecond) // no spare: it is made
		time.Sleep(4 * time.Second)
		if n := m.left(); n != 2 {
			t.Errorf("%d slots, want the two taken: it is not calm yet", n)
		}
		time.Sleep(2 * time.Second)
		if n := m.left(); n != 3 || first.Info() == second.Info() {
			t.Errorf("%d slots, want the two taken and a spare", n)
		}
		third := take(t, s.Make, 20*time.Millisecond) // who has the time leaves the spare
		fourth := take(t, s.Take, 0)
		for _, got := range []Slot{first, second, third, fourth} {
			if err := got.Close(t.Context()); err != nil {
				t.Error(err)
			}
		}
	})
}

func TestSpareSlotEndsWithHostd(t *testing.T) {
	var m *slotMaker
	withSlots(t, 8, func(made *slotMaker, _ *Slots) {
		m = made
		time.Sleep(6 * time.Second)
		if m.left() != 1 {
			t.Error("no spare was made")
		}
	})
	if n := m.left(); n != 0 {
		t.Errorf("%d slots left", n)
	}
}

func TestSpareSlotIsTheLastOne(t *testing.T) {
	withSlots(t, 1, func(m *slotMaker, s *Slots) {
		time.Sleep(6 * time.Second)
		last := take(t, s.Make, 20*time.Millisecond)
		if _, err := s.Take(t.Context()); err == nil {
			t.Error("a slot beyond the last")
		}
		time.Sleep(time.Minute) // nothing is there to be made
		if err := last.Close(t.Context()); err != nil {
			t.Error(err)
		}
		if _, err := s.Take(t.Context()); err != nil {
			t.Errorf("after one was given back: %v", err)
		}
	})
}
