package microvm

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"pgregory.net/rapid"
)

// sparseFile writes blocks at their places into a new file of a size.
func sparseFile(t testing.TB, size int64, at map[int64][]byte) *os.File {
	t.Helper()
	f, err := os.CreateTemp(t.TempDir(), "sparse")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for offset, data := range at {
		if _, err := f.WriteAt(data, offset); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func bytesOf(t testing.TB, f *os.File) []byte {
	t.Helper()
	data, err := os.ReadFile(f.Name())
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func TestCopiesAreTheSameContent(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		size := int64(rapid.IntRange(0, 20*blockSize).Draw(rt, "size"))
		at := map[int64][]byte{}
		for range rapid.IntRange(0, 5).Draw(rt, "parts") {
			offset := int64(rapid.IntRange(0, int(size)).Draw(rt, "offset"))
			n := min(size-offset, int64(rapid.IntRange(0, 3*blockSize).Draw(rt, "length")))
			at[offset] = bytes.Repeat([]byte{rapid.Byte().Draw(rt, "value")}, int(n))
		}
		src := sparseFile(t, size, at)
		want, err := partOf(src)
		if err != nil || want.Size != size {
			rt.Fatalf("%+v, %v", want, err)
		}
		full := sparseFile(t, 0, map[int64][]byte{0: bytesOf(t, src)}) // no holes
		if got, err := partOf(full); err != nil || got != want {
			rt.Fatalf("without holes the content is %+v, not %+v (%v)", got, want, err)
		}
		dst := sparseFile(t, 0, nil)
		if got, err := copyBlocks(dst, src); err != nil || got != want || !bytes.Equal(bytesOf(t, dst), bytesOf(t, src)) {
			rt.Fatalf("copy %+v of %+v (%v)", got, want, err)
		}
		var wire bytes.Buffer
		if err := sendBlocks(&wire, src); err != nil {
			rt.Fatal(err)
		}
		sent := wire.Bytes()
		received := sparseFile(t, 0, nil)
		if err := receiveBlocks(received, bytes.NewReader(sent), want); err != nil || !bytes.Equal(bytesOf(t, received), bytesOf(t, src)) {
			rt.Fatalf("received: %v", err)
		}
		cut := rapid.IntRange(0, len(sent)-1).Draw(rt, "cut")
		if err := receiveBlocks(sparseFile(t, 0, nil), bytes.NewReader(sent[:cut]), want); err == nil {
			rt.Fatalf("took %d of %d bytes", cut, len(sent))
		}
		bad := bytes.Clone(sent)
		bad[cut] ^= 1
		if err := receiveBlocks(sparseFile(t, 0, nil), bytes.NewReader(bad), want); err == nil {
			rt.Fatalf("took a stream whose byte %d was altered", cut)
		}
	})
}

func TestSumsAreRememberedByInode(t *testing.T) {
	s := store{t.TempDir()}
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, []byte("one"), 0o600); err != nil {
		t.Fatal(err)
	}
	one, err := s.sum(path)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := s.sum(path); err != nil || again != one {
		t.Errorf("%+v is now %+v (%v)", one, again, err)
	}
	if err := os.WriteFile(path, []byte("two"), 0o600); err != nil {
		t.Fatal(err)
	}
	if two, err := s.sum(path); err != nil || two == one {
		t.Errorf("an altered file is still %+v (%v)", two, err)
	}
	linked := filepath.Join(t.TempDir(), "linked")
	if err := link(path, linked); err != nil {
		t.Fatal(err)
	}
	if err := link(path, linked); err == nil {
		t.Error("linked over a file that is there")
	}
}

func FuzzMeta(f *testing.F) {
	f.Add([]byte(`{"version":1}`))
	f.Fuzz(func(t *testing.T, data []byte) {
		if m, err := parseMeta(data, hashOf(data)); err == nil && (m.Version != metaVersion || m.RAM.Size < 0) {
			t.Errorf("took %+v", m)
		}
		if _, err := parseMeta(data, hashOf([]byte("other"))); err == nil {
			t.Error("took what has another hash")
		}
	})
}
