package portable

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func openRoot(t testing.TB, dir string) *os.Root {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { root.Close() })
	return root
}

// carry writes the tree below from and reads it below to, as one stream.
func carry(t *testing.T, from, to string) {
	t.Helper()
	r, w := io.Pipe()
	wrote := make(chan error, 1)
	go func() {
		out, err := NewWriter(w, map[string]string{"a": "b"})
		if err == nil {
			err = errors.Join(out.Folder("workspace", openRoot(t, from), nil), out.Close())
		}
		w.CloseWithError(err)
		wrote <- err
	}()
	err := Read(r, func(raw json.RawMessage) (map[string]*Folder, error) {
		if string(raw) != `{"a":"b"}` {
			t.Errorf("state = %s", raw)
		}
		return map[string]*Folder{"workspace": {Root: openRoot(t, to)}}, nil
	})
	if err := errors.Join(err, <-wrote); err != nil {
		t.Fatal(err)
	}
}

// picture describes a tree: names, types, modes, owners, times, contents.
func picture(t *testing.T, dir string) string {
	t.Helper()
	var b strings.Builder
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		st := info.Sys().(*syscall.Stat_t)
		rel, _ := filepath.Rel(dir, p)
		fmt.Fprintf(&b, "%q %v %d:%d %s", rel, info.Mode(), st.Uid, st.Gid, info.ModTime().UTC())
		switch {
		case info.Mode().IsRegular():
			f, err := os.Open(p)
			if err != nil {
				return err
			}
			defer f.Close()
			sum := sha256.New()
			n, err := io.Copy(sum, f)
			fmt.Fprintf(&b, " %d %x %d", n, sum.Sum(nil)[:8], st.Nlink)
			if err != nil {
				return err
			}
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			if err != nil {
				return err
			}
			fmt.Fprintf(&b, " -> %q", to)
		}
		b.WriteString("\n")
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return b.String()
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func blocks(t *testing.T, file string) int64 {
	info, err := os.Stat(file)
	must(t, err)
	return info.Sys().(*syscall.Stat_t).Blocks * 512
}

func TestTreeIsCarried(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	at := func(name string) string { return filepath.Join(from, name) }
	must(t,
		os.MkdirAll(at("a/b/c"), 0o755), os.Mkdir(at("empty"), 0o700), os.Chmod(at("a/b"), 0o1777),
		os.WriteFile(at("a/run.sh"), []byte("#!/bin/sh\n"), 0o755),
		os.WriteFile(at("a/secret"), []byte("x"), 0o600),
		os.WriteFile(at("a/\xff\xfe not utf-8 \n"), []byte("y"), 0o644),
		os.WriteFile(at(strings.Repeat("long", 60)), nil, 0o644),
		os.Symlink("../run.sh", at("a/b/link")), os.Symlink("/etc/passwd", at("away")), os.Symlink("nowhere", at("dangling")),
		os.Link(at("a/run.sh"), at("z-hard")),
		syscall.Mkfifo(at("pipe"), 0o600),
		os.Chmod(at("a/run.sh"), 0o755|fs.ModeSetuid),
	)
	if os.Getuid() == 0 {
		must(t, os.Chown(at("a/secret"), 1000, 1000), os.Lchown(at("away"), 1000, 1000), os.Mkdir(at("closed"), 0o755),
			os.WriteFile(at("closed/in"), []byte("z"), 0o400), os.Chmod(at("closed"), 0o555))
	}
	hole, err := os.Create(at("sparse"))
	must(t, err)
	_, err1 := hole.WriteAt([]byte("in the middle"), 5<<30)
	must(t, err1, hole.Truncate(20<<30), hole.Close())
	must(t, os.WriteFile(at("only-hole"), nil, 0o644), os.Truncate(at("only-hole"), 1<<40))
	old := time.Date(2001, 2, 3, 4, 5, 6, 789_000_000, time.UTC)
	for _, name := range []string{"a/run.sh", "a/b/c", "a/b", "a", "empty"} {
		must(t, os.Chtimes(at(name), old, old))
	}
	must(t, os.Mkdir(filepath.Join(to, "a"), 0o700), os.Mkdir(filepath.Join(to, "away"), 0o700)) // what a fresh machine has

	sparse := []string{at("sparse"), filepath.Join(to, "sparse")}
	carry(t, from, to)
	for _, f := range sparse {
		info, err := os.Stat(f)
		must(t, err)
		if info.Size() != 20<<30 || blocks(t, f) > 1<<20 {
			t.Errorf("%s has %d bytes, %d on the disk", f, info.Size(), blocks(t, f))
		}
		b := make([]byte, 13)
		r, err := os.Open(f)
		must(t, err)
		_, err = r.ReadAt(b, 5<<30)
		must(t, err, r.Close(), os.Remove(f))
		if string(b) != "in the middle" {
			t.Errorf("%s holds %q", f, b)
		}
	}
	for _, dir := range []string{from, to} {
		info, err := os.Stat(filepath.Join(dir, "only-hole"))
		must(t, err, os.Remove(filepath.Join(dir, "only-hole")))
		if info.Size() != 1<<40 {
			t.Errorf("the hole has %d bytes", info.Size())
		}
	}
	must(t, os.Remove(at("pipe")))
	if a, b := picture(t, from), picture(t, to); a != b {
		t.Errorf("was\n%s\nis\n%s", a, b)
	}
}

func TestLargeFileTakesNoMemory(t *testing.T) {
	from, to := t.TempDir(), t.TempDir()
	f, err := os.Create(filepath.Join(from, "large"))
	must(t, err)
	noise := rand.NewChaCha8([32]byte{1})
	_, err = io.CopyN(f, noise, 64<<20)
	must(t, err, f.Close())
	runtime.GC()
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	carry(t, from, to)
	runtime.ReadMemStats(&after)
	if grew := after.TotalAlloc - before.TotalAlloc; grew > 4<<20 {
		t.Errorf("64 MiB took %d bytes of memory", grew)
	}
	if a, b := picture(t, from), picture(t, to); a != b {
		t.Errorf("was\n%s\nis\n%s", a, b)
	}
}

// stream is a hand-made stream.
func stream(t testing.TB, state string, entries ...tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	put := func(h tar.Header, body string) {
		h.Format = tar.FormatPAX
		if h.Typeflag == 0 {
			h.Typeflag = tar.TypeReg
		}
		if h.Typeflag == tar.TypeReg {
			h.Size = int64(len(body))
		}
		must(t, w.WriteHeader(&h))
		_, err := io.WriteString(w, body)
		must(t, err)
	}
	put(tar.Header{Name: "state"}, state)
	for _, h := range entries {
		body := ""
		if h.Typeflag == 0 {
			body = "0123456789"
		}
		put(h, body)
	}
	put(tar.Header{Name: "end"}, fmt.Sprintf(`{"entries":%d}`, len(entries)))
	must(t, w.Close())
	return b.Bytes()
}

const good = `{"version":1,"state":{}}`

func readInto(dir string, t testing.TB, b []byte) error {
	root, err := os.OpenRoot(dir)
	must(t, err)
	defer root.Close()
	return Read(bytes.NewReader(b), func(json.RawMessage) (map[string]*Folder, error) {
		return map[string]*Folder{"workspace": {Root: root}, "storage": {Root: root, Only: []string{"IndexedDB"}}}, nil
	})
}

func TestHostileStreamsAreRefused(t *testing.T) {
	pax := func(v string) map[string]string { return map[string]string{sparseRecord: v} }
	cases := map[string][]byte{
		"version":         stream(t, `{"version":2,"state":{}}`),
		"no json":         stream(t, `{`),
		"dots":            stream(t, good, tar.Header{Name: "workspace/../../etc/x"}),
		"absolute":        stream(t, good, tar.Header{Name: "/etc/x"}),
		"other folder":    stream(t, good, tar.Header{Name: "etc/x"}),
		"folder itself":   stream(t, good, tar.Header{Name: "workspace"}),
		"not in only":     stream(t, good, tar.Header{Name: "storage/Preferences"}),
		"through a link":  stream(t, good, tar.Header{Name: "workspace/l", Typeflag: tar.TypeSymlink, Linkname: "/tmp"}, tar.Header{Name: "workspace/l/x"}),
		"up a link":       stream(t, good, tar.Header{Name: "workspace/l", Typeflag: tar.TypeSymlink, Linkname: ".."}, tar.Header{Name: "workspace/l/x"}),
		"dir on a link":   stream(t, good, tar.Header{Name: "workspace/l", Typeflag: tar.TypeSymlink, Linkname: ".."}, tar.Header{Name: "workspace/l/x", Typeflag: tar.TypeDir}),
		"hard link away":  stream(t, good, tar.Header{Name: "workspace/h", Typeflag: tar.TypeLink, Linkname: "workspace/../../../etc/passwd"}),
		"hard link to it": stream(t, good, tar.Header{Name: "workspace/l", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd"}, tar.Header{Name: "workspace/h", Typeflag: tar.TypeLink, Linkname: "workspace/l"}),
		"device":          stream(t, good, tar.Header{Name: "workspace/d", Typeflag: tar.TypeChar, Devmajor: 1, Devminor: 3}),
		"pipe":            stream(t, good, tar.Header{Name: "workspace/d", Typeflag: tar.TypeFifo}),
		"holes overlap":   stream(t, good, tar.Header{Name: "workspace/f", PAXRecords: pax("100 0 5 3 5")}),
		"holes outside":   stream(t, good, tar.Header{Name: "workspace/f", PAXRecords: pax("5 0 10")}),
		"holes overflow":  stream(t, good, tar.Header{Name: "workspace/f", PAXRecords: pax("9223372036854775807 9223372036854775806 10")}),
		"holes odd":       stream(t, good, tar.Header{Name: "workspace/f", PAXRecords: pax("100 0 10 20")}),
		"holes no number": stream(t, good, tar.Header{Name: "workspace/f", PAXRecords: pax("a")}),
		"empty":           nil,
		"noise":           bytes.Repeat([]byte("noise"), 1000),
	}
	if os.Getuid() == 0 {
		cases["owner"] = stream(t, good, tar.Header{Name: "workspace/f", Uid: 1 << 20})
	}
	for name, b := range cases {
		top := t.TempDir()
		dir := filepath.Join(top, "in")
		must(t, os.Mkdir(dir, 0o755))
		if err := readInto(dir, t, b); err == nil {
			t.Errorf("%s: taken", name)
		} else {
			t.Logf("%s: %v", name, err)
		}
		if left, _ := os.ReadDir(top); len(left) != 1 {
			t.Errorf("%s: left %v outside", name, left)
		}
	}
}

func TestACutStreamIsRefused(t *testing.T) {
	whole := stream(t, good, tar.Header{Name: "workspace/a"}, tar.Header{Name: "workspace/b"})
	must(t, readInto(t.TempDir(), t, whole))
	ends := len(whole) - 1024 - 512 // the archive's own trailer of two blocks, and the padding of the last entry
	for cut := 0; cut < ends; cut += 256 {
		if err := readInto(t.TempDir(), t, whole[:cut]); !errors.Is(err, ErrFormat) {
			t.Errorf("cut at %d of %d: %v", cut, len(whole), err)
		}
	}
}

func TestDiskBoundsFiles(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can mount a small disk")
	}
	dir := t.TempDir()
	must(t, unix.Mount("tmpfs", dir, "tmpfs", 0, "size=20m"))
	defer unix.Unmount(dir, 0)
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	must(t, w.WriteHeader(&tar.Header{Name: "state", Typeflag: tar.TypeReg, Size: int64(len(good))}))
	_, err := io.WriteString(w, good)
	must(t, err, w.WriteHeader(&tar.Header{Name: "workspace/f", Typeflag: tar.TypeReg, Size: 1 << 40}))
	if err := readInto(dir, t, b.Bytes()); !errors.Is(err, syscall.ENOSPC) {
		t.Errorf("a terabyte on 20 MiB: %v", err)
	}
}

// FuzzRead: no stream puts anything beside its folder or panics.
func FuzzRead(f *testing.F) {
	f.Add(stream(f, good, tar.Header{Name: "workspace/a/", Typeflag: tar.TypeDir, Mode: 0o755}, tar.Header{Name: "workspace/a/f", Mode: 0o644}))
	f.Add(stream(f, good, tar.Header{Name: "workspace/l", Typeflag: tar.TypeSymlink, Linkname: ".."}, tar.Header{Name: "workspace/l/x"}))
	f.Add(stream(f, good, tar.Header{Name: "workspace/s", PAXRecords: map[string]string{sparseRecord: "100 0 5 50 5"}}, tar.Header{Name: "workspace/h", Typeflag: tar.TypeLink, Linkname: "workspace/s"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		top := t.TempDir()
		dir := filepath.Join(top, "in")
		must(t, os.Mkdir(dir, 0o755))
		_ = readInto(dir, t, b)
		if left, _ := os.ReadDir(top); len(left) != 1 {
			t.Errorf("left %v outside", left)
		}
	})
}
