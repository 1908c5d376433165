package snapshot

import (
	"bytes"
	"errors"
	"io"
	"slices"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/berth-dev/berth/hostd/machine"
)

// openings counts how often a machine's layers are read.
type openings struct {
	*fakeMachine
	of map[string]int
}

func (m *openings) Layers() []machine.Layer {
	all := m.fakeMachine.Layers()
	for i, l := range all {
		open := l.Open
		all[i].Open = func() (io.ReadCloser, error) { m.of[l.Name]++; return open() }
	}
	return all
}

func draft(t *testing.T, s *Store, o Order) *Draft {
	t.Helper()
	d, err := s.Draft(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// A layer that stands still is read while the machine runs, and not again.
func TestDraftReadsALayerOnce(t *testing.T) {
	s, m := newStore(t, nil), &openings{newMachine(300), map[string]int{}}
	d := draft(t, s, order("a", ""))
	for _, n := range []int{1, 1, 2} {
		if err := d.Layers(t.Context(), m.Layers()[:n]); err != nil {
			t.Fatal(err)
		}
	}
	m.layers = append(m.layers, fakeLayer{"top", page(3)})
	info, err := d.Write(t.Context(), m)
	if err := errors.Join(err, d.Close(), loads(s, ref("a"), testKey, m.fakeMachine), wantFiles(s)); err != nil {
		t.Fatal(err)
	}
	if info.Bytes != info.Total || m.of["layer-1"] != 1 || m.of["layer-2"] != 1 || m.of["top"] != 1 {
		t.Errorf("%+v, layers were read %v times", info, m.of)
	}
	again := draft(t, s, order("b", "a"))
	m.layers = append(m.layers, fakeLayer{"newer", page(4)})
	err = errors.Join(again.Layers(t.Context(), m.Layers()[:3]), s.Delete(t.Context(), ref("a"))) // it is the machine's own that is deleted
	if err == nil {
		_, err = again.Write(t.Context(), m)
	}
	if err := errors.Join(err, again.Close(), loads(s, ref("b"), testKey, m.fakeMachine), wantFiles(s)); err != nil {
		t.Fatal(err)
	}
	if m.of["layer-1"] != 1 || m.of["top"] != 1 || m.of["newer"] != 1 {
		t.Errorf("the second time layers were read %v times", m.of)
	}
}

// What no snapshot came of is gone, and is nobody's meanwhile.
func TestDraftThatCameToNothing(t *testing.T) {
	s, m := newStore(t, nil), newMachine(300)
	write(t, s, order("a", ""), m)
	before := filesIn(t, s.dir)
	m.layers = append(m.layers, fakeLayer{"layer-3", layerData})
	d := draft(t, s, order("b", "a"))
	err := d.Layers(t.Context(), m.Layers())
	if err := errors.Join(err, s.Sweep(func(string) bool { return true })); err != nil {
		t.Fatal(err)
	}
	if len(s.List()) != 1 || len(filesIn(t, s.dir)) != len(before)+1 {
		t.Errorf("%d snapshots, files %q", len(s.List()), filesIn(t, s.dir))
	}
	if err := d.Close(); err != nil {
		t.Fatal(err)
	}
	if after := filesIn(t, s.dir); !slices.Equal(after, before) {
		t.Errorf("left %q, there was %q", after, before)
	}
	lost := draft(t, s, order("b", "a")) // its hostd dies
	if err := lost.Layers(t.Context(), m.Layers()); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s.dir, nil)
	if err := errors.Join(wantFiles(s), lost.Close()); err != nil {
		t.Error(err)
	}
	if _, err := s.Draft(t.Context(), order("a", "")); !errors.Is(err, ErrExists) {
		t.Errorf("a draft of what is there: %v", err)
	}
}

// TestAFullDiskUnderADraft fails each change to the disk in turn.
func TestAFullDiskUnderADraft(t *testing.T) {
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
	write(t, s, order("a", ""), newMachine(60))
	before := filesIn(t, dir)
	m := newMachine(70)
	m.layers = append(m.layers, fakeLayer{"layer-3", layerData}, fakeLayer{"top", page(1)})
	for n := 0; ; n++ {
		left.Store(int64(n))
		d := draft(t, s, order("b", "a"))
		err := d.Layers(t.Context(), m.Layers()[:3])
		if err == nil {
			_, err = d.Write(t.Context(), m)
		}
		reached := left.Load() < 0
		if err := errors.Join(err, d.Close()); err == nil && !reached {
			if n < 10 {
				t.Fatalf("only %d changes", n)
			}
			return
		} else if err == nil { // the failed change was a removal, which was let through
			err = s.Delete(t.Context(), ref("b"))
			if err != nil {
				t.Fatal(err)
			}
			continue
		} else if !errors.Is(err, syscall.ENOSPC) {
			t.Fatalf("change %d: %v", n, err)
		}
		if after := filesIn(t, dir); !slices.Equal(after, before) {
			t.Fatalf("change %d left %q, there was %q", n, after, before)
		}
	}
}

// ahead gives a draft's layers to another host.
func ahead(t *testing.T, d *Draft, to *Store) (held *Held, bytes int64) {
	t.Helper()
	e, err := d.Export(t.Context(), to.Packs("session")...)
	if err != nil {
		t.Fatal(err)
	}
	held, err = to.Hold(t.Context(), "session", e)
	if err := errors.Join(err, e.Close()); err != nil {
		t.Fatal(err)
	}
	return held, e.Size
}

// What went ahead does not go again, and is whose it was.
func TestLayersGoAhead(t *testing.T) {
	from, to, m := newStore(t, nil), newStore(t, nil), newMachine(10)
	var large []byte
	for seed := range uint64(300) {
		large = append(large, page(seed)...)
	}
	m.layers = append(m.layers, fakeLayer{"layer-3", large})
	d := draft(t, from, order("a", ""))
	var held []*Held
	for n := 1; n <= 3; n++ { // as the machine gets new layers
		if err := d.Layers(t.Context(), m.Layers()[:n]); err != nil {
			t.Fatal(err)
		}
		h, bytes := ahead(t, d, to)
		c, err := h.Open(testKey)
		if err != nil {
			t.Fatal(err)
		}
		one := &fakeMachine{layers: m.layers[:n]}
		layers := c.Layers()
		for i, l := range one.layers {
			if len(layers) != n || layers[i].Name != l.name || layers[i].Size != int64(len(l.data)) {
				t.Fatalf("%d layers came ahead: %v", n, layers)
			}
			if err := gives(layers[i].Open, l.data); err != nil {
				t.Error(err)
			}
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
		_, err = h.Open(Key{9})
		wantRefused(t, err, Damaged)
		if held = append(held, h); n == 2 && bytes > 2000 { // an empty one
			t.Errorf("the second came with %d bytes", bytes)
		}
	}
	if n := len(to.List()); n != 0 || len(to.Packs("session")) != 3 || len(to.Packs("other")) != 0 {
		t.Errorf("%d snapshots, packs %q", n, to.Packs("session"))
	}
	m.layers = append(m.layers, fakeLayer{"top", page(1)})
	_, err := d.Write(t.Context(), m)
	if err := errors.Join(err, d.Close()); err != nil {
		t.Fatal(err)
	}
	info, _ := from.Info("a")
	if size := ship(t, from, to, "a"); size > info.Bytes/10 {
		t.Errorf("%d bytes of %d came after the stop", size, info.Bytes)
	}
	for _, h := range held {
		if err := errors.Join(h.Release(), loads(to, ref("a"), testKey, m)); err != nil {
			t.Fatal(err)
		}
	}
	if err := errors.Join(wantFiles(to), wantFiles(from), to.Forget(t.Context(), ref("a"))); err != nil {
		t.Fatal(err)
	}
	if left := filesIn(t, to.dir); len(left) > 0 {
		t.Errorf("left %q", left)
	}
}

// A host to which a session comes back gets the pages that have not changed since
// its last capture ahead too.
func TestOldPagesGoAhead(t *testing.T) {
	from, to, m := newStore(t, nil), newStore(t, nil), newMachine(2000)
	first := write(t, from, order("a", ""), m)
	d := draft(t, from, order("b", "a"))
	if err := d.Layers(t.Context(), m.Layers()); err != nil {
		t.Fatal(err)
	}
	h, bytes := ahead(t, d, to)
	m.pages[1000] = page(77)
	_, err := d.Write(t.Context(), m)
	if err := errors.Join(err, d.Close(), from.Delete(t.Context(), ref("a"))); err != nil {
		t.Fatal(err)
	}
	if size := ship(t, from, to, "b"); size > first.Bytes/20 || bytes < first.Bytes/2 {
		t.Errorf("%d bytes came ahead and %d after the stop, of %d", bytes, size, first.Bytes)
	}
	if err := errors.Join(h.Release(), loads(to, ref("b"), testKey, m), wantFiles(to), wantFiles(from)); err != nil {
		t.Error(err)
	}
}

// Layers that came for nothing go, and those that are not whole are refused.
func TestLayersThatWentAheadForNothing(t *testing.T) {
	from, to, m := newStore(t, nil), newStore(t, nil), newMachine(1)
	d := draft(t, from, order("a", ""))
	if err := d.Layers(t.Context(), m.Layers()); err != nil {
		t.Fatal(err)
	}
	h, _ := ahead(t, d, to)
	if err := errors.Join(to.Sweep(func(string) bool { return true }), h.Release()); err != nil {
		t.Fatal(err)
	}
	e, err := d.Export(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	good, err := io.ReadAll(e)
	if err := errors.Join(err, e.Close(), d.Close()); err != nil {
		t.Fatal(err)
	}
	bad := func(what, session string, b []byte, reasons ...Reason) {
		t.Helper()
		t.Log(what)
		_, err := to.Hold(t.Context(), session, bytes.NewReader(b))
		wantRefused(t, err, reasons...)
		if left := filesIn(t, to.dir); len(left) > 0 {
			t.Fatalf("%s left %q", what, left)
		}
	}
	for n := range 40 {
		flipped := bytes.Clone(good)
		flipped[len(good)*n/40] ^= 0x10
		bad("a flipped bit", "session", flipped)
		bad("a cut", "session", good[:len(good)*n/40], Truncated)
	}
	bad("more", "session", append(bytes.Clone(good), 1), Damaged)
	bad("another session's", "other", good, Foreign)
	if err := to.Import(t.Context(), ref("a"), bytes.NewReader(good)); err != nil { // it passes for a snapshot without the key
		t.Fatal(err)
	}
	_, err = to.Load(t.Context(), ref("a"), testKey)
	wantRefused(t, err, Damaged)
}
