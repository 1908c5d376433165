package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"iter"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/berth-dev/berth/hostd/machine"
)

func TestWriteAndLoad(t *testing.T) {
	for _, count := range []int{0, 1, 255, 256, 257, 3000} {
		t.Run(fmt.Sprint(count), func(t *testing.T) {
			s, m := newStore(t, nil), newMachine(count)
			info := write(t, s, order("a", ""), m)
			if info.Pages != int64(count) || !info.Memory || info.Template != "t1" || info.Bytes != info.Total {
				t.Fatalf("%+v", info)
			}
			if err := loads(s, ref("a"), testKey, m); err != nil {
				t.Fatal(err)
			}
			s = reopen(t, s.dir, nil)
			if err := loads(s, ref("a"), testKey, m); err != nil {
				t.Fatalf("after a restart: %v", err)
			}
			if _, err := s.Write(t.Context(), order("a", ""), m); !errors.Is(err, ErrExists) {
				t.Fatalf("a second one of that id: %v", err)
			}
		})
	}
}

func TestPartsMayBeReadAtOnceAndAgain(t *testing.T) {
	s, m := newStore(t, nil), newMachine(1000)
	write(t, s, order("a", ""), m)
	l, err := s.Load(t.Context(), ref("a"), testKey)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	errs := make(chan error)
	for range 3 {
		go func() { errs <- errors.Join(same(l.Memory, m), same(l.Memory, m)) }()
	}
	for range 3 {
		if err := <-errs; err != nil {
			t.Error(err)
		}
	}
	for p, err := range l.Memory.Pages() { // leaving early leaves nothing behind
		if err != nil || p.Index > 1000 {
			break
		}
	}
}

func TestASecondPauseStoresOnlyWhatChanged(t *testing.T) {
	s, m := newStore(t, nil), newMachine(5000)
	first := write(t, s, order("a", ""), m)
	untouched := write(t, s, order("b", "a"), m)
	if untouched.Bytes*20 > first.Bytes {
		t.Errorf("untouched: %d bytes after %d", untouched.Bytes, first.Bytes)
	}
	for i := range uint64(50) {
		m.pages[1000+i*10] = page(1_000_000 + i)
	}
	m.pages[500] = page(7)
	delete(m.pages, 1001)
	m.layers = append(m.layers, fakeLayer{"layer-3", []byte("more")})
	changed := write(t, s, order("c", "b"), m)
	if changed.Bytes*20 > first.Bytes || changed.Bytes <= untouched.Bytes {
		t.Errorf("changed: %d bytes after %d", changed.Bytes, first.Bytes)
	}
	if err := s.Delete(t.Context(), ref("a")); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(t.Context(), ref("b")); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(loads(s, ref("c"), testKey, m), wantFiles(s)); err != nil {
		t.Fatal(err)
	}
	if err := s.Delete(t.Context(), ref("c")); err != nil {
		t.Fatal(err)
	}
	if left := filesIn(t, s.dir); len(left) > 0 {
		t.Fatalf("left: %q", left)
	}
}

func TestAPreviousThatDoesNotFitCostsSpaceOnly(t *testing.T) {
	s, m := newStore(t, nil), newMachine(1000)
	first := write(t, s, order("a", ""), m)
	other := order("other", "a")
	other.SessionID = "another"
	for _, o := range []Order{order("b", "none"), other, {Ref: ref("c"), Key: Key{9}, Previous: "a"}} {
		if got := write(t, s, o, m); got.Bytes < first.Bytes*9/10 {
			t.Errorf("%s: refers to what it must not: %d bytes", o.ID, got.Bytes)
		}
		if err := loads(s, o.Ref, o.Key, m); err != nil {
			t.Error(err)
		}
	}
	m.template = "t2" // the same pages differ from another template
	if got := write(t, s, order("d", "a"), m); got.Bytes < first.Bytes*9/10 {
		t.Errorf("refers over templates: %d bytes", got.Bytes)
	}
}

// TestSizeStaysBounded pauses and resumes many times with changing pages and layers.
func TestSizeStaysBounded(t *testing.T) {
	for name, share := range map[string]float64{"a little": 0.02, "a third": 0.33, "most": 0.9} {
		t.Run(name, func(t *testing.T) {
			s, m := newStore(t, nil), newMachine(1500)
			m.layers[0].data = m.layers[0].data[:5000]
			rng := rand.New(rand.NewPCG(1, 2))
			whole, last := write(t, s, order("s0", ""), m).Bytes, int64(0)
			for n := 1; n <= 25; n++ {
				for i := range m.pages {
					if rng.Float64() < share {
						m.pages[i] = page(rng.Uint64())
					}
				}
				m.layers[1] = fakeLayer{fmt.Sprintf("live-%d", n), page(uint64(n))}
				id, before := fmt.Sprintf("s%d", n), fmt.Sprintf("s%d", n-1)
				info := write(t, s, order(id, before), m)
				if err := s.Delete(t.Context(), ref(before)); err != nil {
					t.Fatal(err)
				}
				if packs := len(s.entries[id].Packs); packs > maxPacks+4 {
					t.Fatalf("%d packs after %d pauses", packs, n)
				}
				last = info.Total
			}
			if last > whole*5/2 {
				t.Errorf("%d bytes after 25 pauses, %d whole", last, whole)
			}
			if err := errors.Join(loads(s, ref("s25"), testKey, m), wantFiles(s)); err != nil {
				t.Fatal(err)
			}
		})
	}
}

func TestWorthStoringAgain(t *testing.T) {
	slots := []slot{{"own", 10}, {"a", 100}, {"b", 100}, {"c", 100}, {"d", 100}}
	if got := worthStoringAgain(slots, []uint64{10, 49, 50, 100, 0}); !slices.Equal(got, []byte{1}) {
		t.Errorf("under half: %d", got)
	}
	many, used := make([]slot, 14), make([]uint64, 14)
	for i := range many {
		many[i], used[i] = slot{fmt.Sprint(i), uint64(i)}, uint64(i)
	}
	if got := worthStoringAgain(many, used); !slices.Equal(got, []byte{1, 2, 3, 4, 5, 6, 7}) {
		t.Errorf("too many: %d", got)
	}
}

func TestPortable(t *testing.T) {
	for _, size := range []int{0, 1, chunkBytes, chunkBytes + 1, 5*chunkBytes + 77} {
		s := newStore(t, nil)
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(i * i >> 8)
		}
		if _, err := s.WritePortable(t.Context(), order("p", ""), bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		l, err := s.Load(t.Context(), ref("p"), testKey)
		if err != nil {
			t.Fatal(err)
		}
		if l.Memory != nil || l.Info.Memory {
			t.Error("a portable snapshot with memory")
		}
		got, err := io.ReadAll(l.Portable)
		if err := errors.Join(err, l.Close()); err != nil || !bytes.Equal(got, data) {
			t.Fatalf("%d bytes of %d, %v", len(got), size, err)
		}
	}
}

func TestAFailingSourceLeavesNothing(t *testing.T) {
	s, cut := newStore(t, nil), errors.New("cut")
	m := newMachine(2000)
	m.fail = cut
	if _, err := s.Write(t.Context(), order("a", ""), m); !errors.Is(err, cut) {
		t.Errorf("pages: %v", err)
	}
	broken := io.MultiReader(bytes.NewReader(make([]byte, 3*chunkBytes)), &failing{cut})
	if _, err := s.WritePortable(t.Context(), order("a", ""), broken); !errors.Is(err, cut) {
		t.Errorf("stream: %v", err)
	}
	if _, err := s.Write(t.Context(), order("a", ""), &unruly{newMachine(300)}); err == nil {
		t.Error("pages out of order were taken")
	}
	grown := newMachine(1)
	if _, err := s.Write(t.Context(), order("a", ""), &grownLayer{grown}); err == nil || !strings.Contains(err.Error(), "layer-1") {
		t.Errorf("a layer that grew: %v", err)
	}
	if left := filesIn(t, s.dir); len(left) > 0 {
		t.Errorf("left: %q", left)
	}
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

// TestAFullDiskLeavesNothing fails each change to the disk in turn.
func TestAFullDiskLeavesNothing(t *testing.T) {
	dir := t.TempDir()
	var left atomic.Int64 // packs are synced side by side
	s, err := open(dir, nil, quiet(), func(op, _ string) error {
		if left.Add(-1) == -1 && op != "remove" {
			return syscall.ENOSPC
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	left.Store(-1)
	write(t, s, order("a", ""), newMachine(600))
	before := filesIn(t, dir)
	m := newMachine(700)
	for n := 0; ; n++ {
		left.Store(int64(n))
		_, err := s.Write(t.Context(), order("b", "a"), m)
		if err == nil && left.Load() >= 0 {
			if n < 10 {
				t.Fatalf("only %d changes", n)
			}
			return
		}
		if err == nil { // the failed change was a removal, which was let through
			if err := s.Delete(t.Context(), ref("b")); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("change %d: %v", n, err)
		}
		if after := filesIn(t, dir); !slices.Equal(after, before) {
			t.Fatalf("change %d left %q, there was %q", n, after, before)
		}
	}
}

func TestDeleteWhileItIsRead(t *testing.T) {
	s, m := newStore(t, nil), newMachine(2000)
	write(t, s, order("a", ""), m)
	l, err := s.Load(t.Context(), ref("a"), testKey)
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	e, err := s.Export(t.Context(), ref("a"))
	if err != nil {
		t.Fatal(err)
	}
	defer e.Close()
	if err := s.Delete(t.Context(), ref("a")); err != nil {
		t.Fatal(err)
	}
	if err := same(l.Memory, m); err != nil {
		t.Error(err)
	}
	other := newStore(t, nil)
	if err := errors.Join(other.Import(t.Context(), ref("a"), e), loads(other, ref("a"), testKey, m)); err != nil {
		t.Error(err)
	}
}

func TestSweep(t *testing.T) {
	s, m := newStore(t, nil), newMachine(500)
	write(t, s, order("a", ""), m)
	write(t, s, order("b", "a"), m)
	for _, stray := range []string{"packs/" + strings.Repeat("0", 32), "manifests/x.tmp", "upload/gone"} {
		if err := os.WriteFile(s.dir+"/"+stray, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(s.dir+"/manifests/broken", []byte("BERTHSNP"), 0o600); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s.dir, nil)
	var refused *Refused
	if _, err := s.Load(t.Context(), ref("broken"), testKey); !errors.As(err, &refused) || refused.Reason != Truncated {
		t.Errorf("broken: %v", err)
	}
	if err := s.Sweep(func(id string) bool { return id == "b" }); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(wantFiles(s), loads(s, ref("b"), testKey, m)); err != nil {
		t.Error(err)
	}
	if names := s.List(); len(names) != 1 || names[0].ID != "b" {
		t.Errorf("%+v", names)
	}
}

// unruly gives its pages in falling order.
type unruly struct{ *fakeMachine }

func (m *unruly) Pages() iter.Seq2[machine.Page, error] {
	return func(yield func(machine.Page, error) bool) {
		for i := range uint64(2) {
			if !yield(machine.Page{Index: 9 - i}, nil) {
				return
			}
		}
	}
}

// grownLayer has a layer with more bytes than it said.
type grownLayer struct{ *fakeMachine }

func (m *grownLayer) Layers() []machine.Layer {
	l := m.fakeMachine.Layers()
	l[0].Size--
	return l
}
