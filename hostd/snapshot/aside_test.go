package snapshot

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
)

// damage changes a file of a store for good.
func damage(t *testing.T, path string, alter func([]byte) []byte) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err == nil {
		err = os.WriteFile(path, alter(b), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func flipLast(b []byte) []byte { b[len(b)-1] ^= 1; return b }

// A manifest that nobody will ever read keeps no pack of others from being
// removed, and whoever wants its snapshot hears why, at this start and the next.
func TestDamagedManifestIsMovedAside(t *testing.T) {
	s, m := newStore(t, nil), newMachine(500)
	write(t, s, order("a", ""), m)
	write(t, s, order("b", ""), m)
	own := s.entries["a"].names()
	stray := s.packPath(strings.Repeat("0", 32))
	if err := os.WriteFile(stray, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	damage(t, s.path(manifests, "a"), flipLast)
	for range 2 {
		s = reopen(t, s.dir, nil)
		wantRefused(t, read(s, ref("a"), testKey), Damaged)
		if err := loads(s, ref("b"), testKey, m); err != nil {
			t.Error(err)
		}
		for _, path := range append([]string{stray}, s.packPath(own[0])) {
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is still there: %v", path, err)
			}
		}
	}
	if of, whole := s.Templates(); !whole || !slices.Equal(of, []string{m.template}) {
		t.Errorf("templates %q, whole %v", of, whole)
	}
	if _, err := os.Stat(s.path(aside, "a")); err != nil {
		t.Error(err)
	}
	if err := s.Delete(t.Context(), ref("a")); err != nil {
		t.Fatal(err)
	}
	if left := filesIn(t, s.dir); slices.ContainsFunc(left, func(name string) bool { return strings.HasSuffix(name, "/a") }) {
		t.Errorf("left: %q", left)
	}
}

// One of a later format is another hostd's to read: it stays, and so do its packs.
func TestLaterManifestKeepsItsPacks(t *testing.T) {
	s, m := newStore(t, nil), newMachine(500)
	write(t, s, order("a", ""), m)
	later := func(b []byte) []byte { b[len(manifestMagic)+1] ^= 0x40; return b }
	damage(t, s.path(manifests, "a"), later)
	s = reopen(t, s.dir, nil)
	wantRefused(t, read(s, ref("a"), testKey), Version)
	if _, whole := s.Templates(); whole {
		t.Error("nobody knows which template it needs")
	}
	damage(t, s.path(manifests, "a"), later)
	if err := loads(reopen(t, s.dir, nil), ref("a"), testKey, m); err != nil {
		t.Error(err)
	}
}

// Where the blob store has it whole, a snapshot with a damaged manifest is
// fetched from there.
func TestDamagedManifestIsFetchedAgain(t *testing.T) {
	b, m := newBucket(), newMachine(500)
	s := newStore(t, b)
	write(t, s, order("a", ""), m)
	if err := errors.Join(s.Upload(t.Context(), ref("a")), s.WaitDurable(t.Context(), "a"), s.Close()); err != nil {
		t.Fatal(err)
	}
	damage(t, s.path(manifests, "a"), flipLast)
	s = reopen(t, s.dir, b)
	if err := loads(s, ref("a"), testKey, m); err != nil {
		t.Fatal(err)
	}
	s = reopen(t, s.dir, b)
	if err := errors.Join(loads(s, ref("a"), testKey, m), wantFiles(s)); err != nil {
		t.Error(err)
	}
}
