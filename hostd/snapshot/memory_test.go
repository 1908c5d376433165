package snapshot

import (
	"iter"
	"runtime"
	"testing"

	"github.com/berth-dev/berth/hostd/machine"
)

// endless has many pages that it makes as they are read, and watches the heap.
type endless struct {
	*fakeMachine
	count  uint64
	source [][]byte
	most   uint64
}

func (e *endless) Pages() iter.Seq2[machine.Page, error] {
	return func(yield func(machine.Page, error) bool) {
		for i := range e.count {
			if i%8192 == 0 {
				e.most = max(e.most, heap())
			}
			if !yield(machine.Page{Index: i, Data: e.source[i%uint64(len(e.source))]}, nil) {
				return
			}
		}
	}
}

// heap is what is in use. Twice: the first collection keeps what became garbage
// while it ran, which takes long on a busy computer, and what pools hold.
func heap() uint64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

// TestMemoryDoesNotGrowWithTheCapture writes and reads 256 MiB.
func TestMemoryDoesNotGrowWithTheCapture(t *testing.T) {
	const most = 48 << 20
	s, e := newStore(t, nil), &endless{fakeMachine: newMachine(0), count: 65536}
	for i := range uint64(256) {
		e.source = append(e.source, page(i))
	}
	before := heap()
	write(t, s, order("a", ""), e)
	write(t, s, order("b", "a"), e)
	if e.most > before+most {
		t.Errorf("writing took %d MiB", (e.most-before)>>20)
	}
	l, err := s.Load(t.Context(), ref("b"), testKey)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	n, peak := 0, uint64(0)
	for _, err := range l.Memory.Pages() {
		if err != nil {
			t.Fatal(err)
		}
		if n++; n%8192 == 0 {
			peak = max(peak, heap())
		}
	}
	if peak > before+most {
		t.Errorf("reading took %d MiB", (peak-before)>>20)
	}
	t.Logf("writing %d MiB, reading %d MiB", (e.most-before)>>20, (peak-before)>>20)
}
