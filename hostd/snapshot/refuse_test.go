package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"io"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// read reads all of a snapshot.
func read(s *Store, r Ref, key Key) error {
	l, err := s.Load(context.Background(), r, key)
	if err != nil {
		return err
	}
	defer l.Close()
	for _, err := range l.Memory.Pages() {
		if err != nil {
			return err
		}
	}
	opens := []func() (io.ReadCloser, error){l.Memory.Device}
	for _, layer := range l.Memory.Layers() {
		opens = append(opens, layer.Open)
	}
	for _, open := range opens {
		r, err := open()
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, r)
		if err := errors.Join(err, r.Close()); err != nil {
			return err
		}
	}
	return nil
}

func wantRefused(t *testing.T, err error, reasons ...Reason) {
	t.Helper()
	var r *Refused
	if !errors.As(err, &r) || len(reasons) > 0 && !slices.Contains(reasons, r.Reason) {
		t.Errorf("%v, want refused because of %v", err, reasons)
	}
}

// altered changes a file for the time of check.
func altered(t *testing.T, path string, alter func([]byte) []byte, check func()) {
	t.Helper()
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, alter(bytes.Clone(good)), 0o600); err != nil {
		t.Fatal(err)
	}
	check()
	if err := os.WriteFile(path, good, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestEveryDamageIsRefused(t *testing.T) {
	s := newStore(t, nil)
	m := newMachine(600)
	write(t, s, order("a", ""), m)
	write(t, s, order("b", ""), m)
	m.pages[1000] = page(99)
	write(t, s, order("a2", "a"), m)
	refused := func() { t.Helper(); wantRefused(t, read(s, ref("a"), testKey)) }
	for _, name := range filesIn(t, s.dir) {
		if strings.HasPrefix(name, manifests) && name != "manifests/a" || strings.HasPrefix(name, packs) && !slices.Contains(s.entries["a"].names(), filepath.Base(name)) {
			continue
		}
		path := filepath.Join(s.dir, name)
		st, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		for n := range 40 {
			at := int(st.Size()) * n / 40
			altered(t, path, func(b []byte) []byte { b[at] ^= 1 << (n % 8); return b }, refused)
			altered(t, path, func(b []byte) []byte { return b[:at] }, refused)
		}
		altered(t, path, func(b []byte) []byte { return append(b, 0) }, refused)
		altered(t, path, func([]byte) []byte { return nil }, refused)
	}
	if err := read(s, ref("a"), testKey); err != nil {
		t.Fatalf("put right again: %v", err)
	}
}

func TestReasons(t *testing.T) {
	s, m := newStore(t, nil), newMachine(600)
	write(t, s, order("a", ""), m)
	write(t, s, order("b", ""), m)
	manifest := s.path(manifests, "a")
	wantRefused(t, read(s, ref("a"), Key{7}), Damaged)
	wantRefused(t, read(s, Ref{"a", "other"}, testKey), Foreign)
	altered(t, manifest, func(b []byte) []byte { b[9] = 0; return b }, func() { wantRefused(t, read(s, ref("a"), testKey), Version) })
	other, err := os.ReadFile(s.path(manifests, "b"))
	if err != nil {
		t.Fatal(err)
	}
	altered(t, manifest, func([]byte) []byte { return other }, func() { wantRefused(t, read(s, ref("a"), testKey), Foreign) })
	p := s.entries["a"].Packs[0]
	path := s.packPath(p.Name)
	altered(t, path, func(b []byte) []byte { b[7] = 9; return b }, func() { wantRefused(t, read(s, ref("a"), testKey), Version) })
	altered(t, path, func(b []byte) []byte { return b[:len(b)-1] }, func() { wantRefused(t, read(s, ref("a"), testKey), Truncated) })
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	wantRefused(t, read(s, ref("a"), testKey), Missing)
	if err := read(s, ref("none"), testKey); !errors.Is(err, ErrNotFound) {
		t.Errorf("none: %v", err)
	}
}

// TestChunksCannotBeRearranged swaps, repeats and leaves out whole chunks, whose
// bytes are all good.
func TestChunksCannotBeRearranged(t *testing.T) {
	var pk [nameSize]byte
	head, frames := framesOf(t, pk, kindStream, 4)
	join := func(order ...int) []byte {
		b := bytes.Clone(head)
		for _, i := range order {
			b = append(b, frames[i]...)
		}
		return b
	}
	_, foreign := framesOf(t, [nameSize]byte{1}, kindStream, 4)
	good := join(0, 1, 2, 3, 4)
	if err := readPack(good, pk, kindStream); err != nil {
		t.Fatal(err)
	}
	for name, b := range map[string][]byte{
		"swapped": join(1, 0, 2, 3, 4), "repeated": join(0, 0, 1, 2, 3, 4), "left out": join(0, 2, 3, 4),
		"cut at a chunk": join(0, 1, 2, 3), "cut in the middle": join(0, 1), "only the last": join(4),
		"last twice": join(0, 1, 2, 3, 4, 4), "another pack's": append(append(join(0, 1, 2), foreign[3]...), frames[4]...),
	} {
		if err := readPack(b, pk, kindStream); err == nil {
			t.Errorf("%s: read", name)
		} else {
			wantRefused(t, err)
		}
	}
	wantRefused(t, readPack(good, pk, kindPages), Foreign)
}

// framesOf makes a pack of count chunks and a last one.
func framesOf(t testing.TB, name [nameSize]byte, k kind, count int) (head []byte, frames [][]byte) {
	t.Helper()
	s, err := newSeal(testKey, "session", k, name)
	if err != nil {
		t.Fatal(err)
	}
	for i := range count {
		f, _ := s.frame(nil, nil, bytes.Repeat([]byte{byte(i)}, 100), uint64(i), false)
		frames = append(frames, f)
	}
	last, _ := s.frame(nil, nil, nil, uint64(count), true)
	return s.head, append(frames, last)
}

// readPack reads a pack to its end.
func readPack(b []byte, name [nameSize]byte, k kind) error {
	p, err := openPack(bytes.NewReader(b), int64(len(b)), testKey, "session", k, hex.EncodeToString(name[:]), 2)
	if err != nil {
		return err
	}
	defer p.close()
	for {
		c, err := p.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		p.release(c)
	}
}

// FuzzManifest reads manifests of any bytes, with the checksum put right, so
// that what lies behind it is reached.
func FuzzManifest(f *testing.F) {
	h := header{ID: "a", SessionID: "session", Memory: true, Packs: []pack{{strings.Repeat("ab", 16), 99, make([]byte, 32)}}}
	good, err := encodeManifest(testKey, h, contents{Table: h.Packs[0].Name})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good[:len(good)-32], true)
	f.Add(good, false)
	f.Fuzz(func(t *testing.T, raw []byte, mend bool) {
		if mend {
			sum := sha256.Sum256(raw)
			raw = append(bytes.Clone(raw), sum[:]...)
		}
		p, err := parseManifest(raw)
		if err != nil {
			wantRefused(t, err)
			return
		}
		if _, err := p.open(testKey); err != nil {
			wantRefused(t, err)
		}
	})
}

// FuzzPack reads packs of any bytes, and chunks and tables of any bytes that are
// sealed well: what a host with the key but a fault could have written.
func FuzzPack(f *testing.F) {
	for _, k := range []kind{kindPages, kindTable, kindStream} {
		head, frames := framesOf(f, [nameSize]byte{}, k, 2)
		f.Add(slices.Concat(head, slices.Concat(frames...)), byte(k), false)
		f.Add([]byte{0, 1, 0, 0, 0, 0, 0, 0, 0, 9}, byte(k), true)
	}
	f.Fuzz(func(t *testing.T, b []byte, k byte, sealed bool) {
		if sealed {
			s, err := newSeal(testKey, "session", kind(k), [nameSize]byte{})
			if err != nil {
				t.Fatal(err)
			}
			one, _ := s.frame(nil, nil, b[:min(len(b), maxPlain)], 0, false)
			last, _ := s.frame(nil, nil, nil, 1, true)
			readTable(t, b)
			b = slices.Concat(s.head, one, last)
		}
		if err := readPack(b, [nameSize]byte{}, kind(k)); err != nil {
			wantRefused(t, err)
		}
	})
}

func readTable(t *testing.T, b []byte) {
	table := newTableReader(io.NopCloser(bytes.NewReader(b)))
	last := int64(-1)
	for {
		r, err := table.next()
		if err == io.EOF {
			return
		}
		if err != nil {
			wantRefused(t, err)
			return
		}
		if int64(r.index) <= last {
			t.Fatalf("page %d after %d", r.index, last)
		}
		last = int64(r.index)
	}
}

// FuzzImport takes in streams of any bytes.
func FuzzImport(f *testing.F) {
	s := newStore(f, nil)
	write(f, s, order("a", ""), newMachine(20))
	e, err := s.Export(f.Context(), ref("a"))
	if err != nil {
		f.Fatal(err)
	}
	good, err := io.ReadAll(e)
	if err := errors.Join(err, e.Close()); err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add(binary.BigEndian.AppendUint32([]byte(exportMagic), 1<<31))
	dir, err := os.MkdirTemp(memoryFolder(), "import")
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(func() { os.RemoveAll(dir) })
	into := reopen(f, dir, nil)
	f.Fuzz(func(t *testing.T, b []byte) {
		held, err := into.Hold(t.Context(), "session", bytes.NewReader(b))
		if err != nil {
			wantRefused(t, err)
		} else if err := held.Release(); err != nil {
			t.Fatal(err)
		}
		if err := into.Import(t.Context(), ref("a"), bytes.NewReader(b)); err != nil {
			wantRefused(t, err)
			if left := filesIn(t, into.dir); len(left) > 0 {
				t.Fatalf("left: %q", left)
			}
			return
		}
		if err := into.Forget(t.Context(), ref("a")); err != nil {
			t.Fatal(err)
		}
	})
}

func TestKeyIsNeverOnDisk(t *testing.T) {
	b := newBucket()
	s, key := newStore(t, b), Key(bytes.Repeat([]byte("secret!?"), 4))
	m := newMachine(300)
	m.device = []byte("device state that nobody may read")
	o := order("a", "")
	o.Key = key
	write(t, s, o, m)
	if err := errors.Join(s.Upload(t.Context(), o.Ref), s.WaitDurable(t.Context(), "a")); err != nil {
		t.Fatal(err)
	}
	all := maps.Clone(b.objects)
	for _, name := range filesIn(t, s.dir) {
		data, err := os.ReadFile(filepath.Join(s.dir, name))
		if err != nil {
			t.Fatal(err)
		}
		all[name] = data
	}
	for name, data := range all {
		for _, secret := range [][]byte{key[:8], []byte("nobody"), []byte("layer-1"), m.pages[1001][:32]} {
			if bytes.Contains(data, secret) {
				t.Errorf("%s holds %q", name, secret)
			}
		}
	}
}
