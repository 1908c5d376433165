package snapshot

import (
	"bytes"
	"context"
	"errors"
	"io"
	"testing"
)

func TestExportAndImport(t *testing.T) {
	from, to, m := newStore(t, nil), newStore(t, nil), newMachine(3000)
	write(t, from, order("a", ""), m)
	whole := ship(t, from, to, "a")
	m.pages[1000] = page(5)
	write(t, from, order("b", "a"), m)
	if part := ship(t, from, to, "b"); part*20 > whole {
		t.Errorf("the second came with %d bytes after %d", part, whole)
	}
	if err := errors.Join(loads(to, ref("b"), testKey, m), wantFiles(to)); err != nil {
		t.Fatal(err)
	}
	m.pages[1001] = page(6) // it goes on there, and refers to what came from here
	write(t, to, order("c", "b"), m)
	if err := errors.Join(to.Delete(t.Context(), ref("a")), to.Delete(t.Context(), ref("b")), loads(to, ref("c"), testKey, m)); err != nil {
		t.Fatal(err)
	}
	third := newStore(t, nil)
	ship(t, to, third, "c")
	if err := errors.Join(loads(third, ref("c"), testKey, m), wantFiles(third), wantFiles(to)); err != nil {
		t.Fatal(err)
	}
}

// ship passes a snapshot on without what the receiver has.
func ship(t *testing.T, from, to *Store, id string) int64 {
	t.Helper()
	e, err := from.Export(t.Context(), ref(id), to.Packs("session")...)
	if err != nil {
		t.Fatal(err)
	}
	var n counted
	n.Reader = e
	if err := errors.Join(to.Import(t.Context(), ref(id), &n), e.Close()); err != nil {
		t.Fatal(err)
	}
	if n.n != e.Size {
		t.Fatalf("%d bytes came, %d were promised", n.n, e.Size)
	}
	return e.Size
}

func TestImportRefusesWhatIsNotWhole(t *testing.T) {
	from, to := newStore(t, nil), newStore(t, nil)
	write(t, from, order("a", ""), newMachine(700))
	e, err := from.Export(t.Context(), ref("a"))
	if err != nil {
		t.Fatal(err)
	}
	good, err := io.ReadAll(e)
	if err := errors.Join(err, e.Close()); err != nil {
		t.Fatal(err)
	}
	bad := func(what string, b []byte, r Ref, reasons ...Reason) {
		t.Helper()
		t.Log(what)
		wantRefused(t, to.Import(t.Context(), r, bytes.NewReader(b)), reasons...)
		if left := filesIn(t, to.dir); len(left) > 0 {
			t.Fatalf("%s left %q", what, left)
		}
	}
	for n := range 60 {
		at := len(good) * n / 60
		flipped := bytes.Clone(good)
		flipped[at] ^= 0x10
		bad("a flipped bit", flipped, ref("a"))
		bad("a cut", good[:at], ref("a"), Truncated)
	}
	bad("more", append(bytes.Clone(good), 1), ref("a"), Damaged)
	bad("another version", append([]byte("BERTHSX\x02"), good[8:]...), ref("a"), Version)
	bad("another session's", good, Ref{"a", "other"}, Foreign)
	bad("another's", good, ref("b"), Foreign)
	without, err := from.Export(t.Context(), ref("a"), from.Packs("session")...)
	if err != nil {
		t.Fatal(err)
	}
	all, err := io.ReadAll(without)
	if err := errors.Join(err, without.Close()); err != nil {
		t.Fatal(err)
	}
	bad("left out", all, ref("a"), Missing)
	ended, cancel := context.WithCancelCause(t.Context())
	cancel(io.ErrClosedPipe)
	if err := to.Import(ended, ref("a"), bytes.NewReader(good)); !errors.Is(err, io.ErrClosedPipe) {
		t.Errorf("an ended call: %v", err)
	}
	for range 2 { // the same again does nothing
		if err := to.Import(t.Context(), ref("a"), bytes.NewReader(good)); err != nil {
			t.Fatal(err)
		}
	}
}
