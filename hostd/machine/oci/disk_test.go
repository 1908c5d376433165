package oci

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// TestCopySparse: whatever the pattern of data and holes, the copy reads the
// same and takes no more room.
func TestCopySparse(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "")
		if err != nil {
			rt.Fatal(err)
		}
		src, dst := filepath.Join(dir, "src"), filepath.Join(dir, "dst")
		f, err := os.Create(src)
		if err != nil {
			rt.Fatal(err)
		}
		const size = 4 << 20
		if err := f.Truncate(size); err != nil {
			rt.Fatal(err)
		}
		for range rapid.IntRange(0, 6).Draw(rt, "pieces") {
			data := rapid.SliceOfN(rapid.Byte(), 1, 9000).Draw(rt, "data")
			if _, err := f.WriteAt(data, rapid.Int64Range(0, size-9000).Draw(rt, "at")); err != nil {
				rt.Fatal(err)
			}
		}
		if err := f.Close(); err != nil {
			rt.Fatal(err)
		}
		if err := copySparse(dst, src); err != nil {
			rt.Fatal(err)
		}
		want, _ := os.ReadFile(src)
		if got, err := os.ReadFile(dst); err != nil || !bytes.Equal(got, want) {
			rt.Fatalf("the copy of %d bytes differs (%d bytes, %v)", len(want), len(got), err)
		}
		if a, b := blocks(rt, src), blocks(rt, dst); b > a {
			rt.Fatalf("the copy takes %d blocks, the original %d", b, a)
		}
		if err := copySparse(dst, src); err == nil {
			rt.Fatal("wrote over a file that exists")
		}
	})
}

func blocks(t *rapid.T, path string) int64 {
	var info unix.Stat_t
	if err := unix.Stat(path, &info); err != nil {
		t.Fatal(err)
	}
	return info.Blocks
}

func TestTemplateIsMadeOnceAndSwept(t *testing.T) {
	home := t.TempDir()
	d, err := New(Config{Home: home, ImageBase: "/", AgentLayer: "/"})
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	first, err := d.templateOf(minDisk)
	if err != nil {
		missing(t, err)
	}
	before, _ := os.Stat(first)
	again, err := d.templateOf(minDisk)
	after, _ := os.Stat(again)
	if err != nil || !os.SameFile(before, after) || before.Size() != minDisk {
		t.Errorf("made again or of wrong size: %v, %v, %v", before, after, err)
	}
	half := first + ".tmp"
	if err := os.WriteFile(half, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Sweep(t.Context(), func(string) bool { return false }); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(half); err == nil {
		t.Error("a half-made template outlived the sweep")
	}
	if _, err := os.Stat(first); err != nil {
		t.Error("the sweep took the template")
	}
}

// missing skips a test on a laptop that lacks something, and fails it in CI.
func missing(t *testing.T, err error) {
	t.Helper()
	if os.Getenv("CI") != "" {
		t.Fatal(err)
	}
	t.Skip(err)
}
