package workspace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/apierr"
)

func open(t testing.TB) (*Tree, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "w")
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	tree, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tree.Close() })
	return tree, dir
}

func TestResolve(t *testing.T) {
	tree, dir := open(t)
	must := func(err error) {
		if err != nil {
			t.Fatal(err)
		}
	}
	must(os.MkdirAll(dir+"/d/e", 0o755))
	for link, target := range map[string]string{
		"abs": dir + "/d", "rel": "d/e", "d/up": "../f", "around": "../w/d", "chain": "rel/../x",
		"out": "/etc", "d/out": "../../other", "loop": "loop", "ping": "pong", "pong": "ping",
		"dangling": "d/none/deeper", "self": ".", "top": dir, "slashes": "d///e/",
	} {
		must(os.Symlink(target, filepath.Join(dir, link)))
	}
	for path, want := range map[string]string{
		".": ".", "a": "a", "a/b/../c": "a/c", dir: ".", dir + "/a/": "a", "./d//e": "d/e", dir + "/../w/a": "a",
		"abs": "d", "abs/e/x": "d/e/x", "rel/x": "d/e/x", "d/up": "f", "around/e": "d/e", "chain": "d/x",
		"dangling": "d/none/deeper", "self/self/d": "d", "top/top/d/e": "d/e", "slashes/y": "d/e/y", "\xff/a": "\xff/a",
	} {
		if got, err := tree.Resolve("path", path); err != nil || got != want {
			t.Errorf("Resolve(%q) = %q, %v; want %q", path, got, err, want)
		}
	}
	for _, path := range []string{"", "..", "../w2", "/", "/etc", dir + "x", "a/../../b", "a\x00", "out", "out/passwd", "d/out", "d/out/x",
		"loop", "loop/x", "ping", strings.Repeat("a/", 2100)} {
		if got, err := tree.Resolve("cwd", path); !apierr.Is(err, apierr.InvalidRequest) || !strings.HasPrefix(apierr.From(err).Message, "cwd: ") {
			t.Errorf("Resolve(%q) = %q, %v; want a 400 naming the field", path, got, err)
		}
	}
	for path, want := range map[string]string{"out": "out", "abs": "abs", "abs/x": "d/x", "loop": "loop", "top": "top"} {
		if got, err := tree.ResolveLink("path", path); err != nil || got != want {
			t.Errorf("ResolveLink(%q) = %q, %v; want %q", path, got, err, want)
		}
	}
	if _, err := tree.ResolveLink("path", "out/x"); !apierr.Is(err, apierr.InvalidRequest) {
		t.Errorf("ResolveLink through a link that leads out: %v", err)
	}
}

// TestFolderIsALink: the folder may itself be reached by a symbolic link.
func TestFolderIsALink(t *testing.T) {
	_, dir := open(t)
	link := dir + "-link"
	if err := errors.Join(os.Symlink(dir, link), os.Mkdir(dir+"/d", 0o755), os.Symlink(link+"/d", dir+"/to")); err != nil {
		t.Fatal(err)
	}
	tree, err := Open(link)
	if err != nil {
		t.Fatal(err)
	}
	defer tree.Close()
	for path, want := range map[string]string{link + "/d": "d", dir + "/d": "d", "to/x": "d/x"} {
		if got, err := tree.Resolve("path", path); err != nil || got != want {
			t.Errorf("Resolve(%q) = %q, %v", path, got, err)
		}
	}
	if got := tree.Abs("d"); got != link+"/d" {
		t.Errorf("Abs: %q", got)
	}
}

// TestResolveAgreesWithTheKernel makes random trees of folders and links: what
// Resolve gives is the very file that the kernel finds by the same path, or
// the kernel finds it outside, or nowhere.
func TestResolveAgreesWithTheKernel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		top, err := os.MkdirTemp("", "berth-workspace-")
		if err != nil {
			rt.Fatal(err)
		}
		defer os.RemoveAll(top)
		dir := top + "/w"
		_ = os.MkdirAll(dir+"/a/b", 0o755)
		_ = os.MkdirAll(dir+"/b/a", 0o755)
		_ = os.MkdirAll(top+"/a/b", 0o755)
		part := rapid.SampledFrom([]string{"a", "b", "l", "m", ".", "..", "w"})
		path := func(label string) string {
			return strings.Join(rapid.SliceOfN(part, 1, 5).Draw(rt, label), "/")
		}
		for i := range 4 {
			target := path("target")
			if rapid.Bool().Draw(rt, "absolute") {
				target = dir + "/" + target
			}
			at := filepath.Join(dir, rapid.SampledFrom([]string{"l", "m", "a/l", "a/b/m", "b/l"}).Draw(rt, "at"))
			_ = os.Symlink(target, at) // a second at one place fails, which is fine
			_ = i
		}
		tree, err := Open(dir)
		if err != nil {
			rt.Fatal(err)
		}
		defer tree.Close()
		asked := filepath.Clean(path("path"))
		real, kernelErr := filepath.EvalSymlinks(dir + "/" + asked)
		rel, err := tree.Resolve("path", asked)
		if err == nil {
			if info, err := os.Lstat(tree.Real(rel)); err == nil && info.Mode()&fs.ModeSymlink != 0 {
				rt.Fatalf("%q resolved to a link, %q", asked, rel)
			}
		}
		if kernelErr != nil {
			return // nothing there: nothing to compare
		}
		inside := real == dir || strings.HasPrefix(real, dir+"/")
		switch {
		case inside && (err != nil || tree.Real(rel) != real) && !strings.HasPrefix(asked, ".."):
			rt.Fatalf("%q: %q, %v; the kernel says %q", asked, rel, err, real)
		case !inside && err == nil:
			rt.Fatalf("%q: %q; the kernel says %q, which is outside", asked, rel, real)
		}
	})
}

func FuzzLexical(f *testing.F) {
	for _, s := range []string{"a", "../a", "/", "a/../../b", "/workspace/../etc", "\xff", "a\x00"} {
		f.Add(s)
	}
	tree, dir := open(f)
	f.Fuzz(func(t *testing.T, path string) {
		rel, err := tree.Lexical("path", path)
		if err != nil {
			return
		}
		if abs := tree.Abs(rel); !filepath.IsLocal(rel) || abs != dir && !strings.HasPrefix(abs, dir+"/") {
			t.Fatalf("%q became %q", path, rel)
		}
	})
}

func TestError(t *testing.T) {
	tree, dir := open(t)
	if err := errors.Join(os.Symlink("/etc", dir+"/out"), os.WriteFile(dir+"/f", nil, 0o644)); err != nil {
		t.Fatal(err)
	}
	_, escaped := tree.Root.Stat("out/passwd")
	_, notDir := tree.Root.Stat("f/x")
	for err, want := range map[error]apierr.Code{
		fs.ErrNotExist: apierr.NotFound, escaped: apierr.InvalidRequest, notDir: apierr.InvalidRequest,
		syscall.ENOSPC: apierr.TooLarge, syscall.EDQUOT: apierr.TooLarge, syscall.EIO: apierr.Internal,
	} {
		if got := apierr.From(tree.Error("path", "x", err)); got.Code != want || want != apierr.Internal && !strings.HasPrefix(got.Message, "path: ") {
			t.Errorf("%v: %v, want %s", err, got, want)
		}
	}
	if tree.Error("path", "x", nil) != nil {
		t.Error("no error became one")
	}
}
