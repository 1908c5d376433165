package cdp

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestCleanNameIsOnePathElement(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.OneOf(rapid.String(), rapid.SampledFrom([]string{"..", ".", "", "a/../b", "\x00", strings.Repeat("é", 200) + ".tar.gz", "x." + strings.Repeat("y", 300)})).Draw(t, "name")
		got := cleanName(name)
		if got == "" || got == "." || got == ".." || len(got) > maxName || strings.ContainsAny(got, "/\x00") {
			t.Fatalf("cleanName(%q) = %q", name, got)
		}
		if filepath.Join("/d", got) != "/d/"+got {
			t.Fatalf("cleanName(%q) = %q leaves its folder", name, got)
		}
	})
}

func TestGiveNameNeverOverwrites(t *testing.T) {
	dir := t.TempDir()
	for i, want := range []string{"r.csv", "r (1).csv", "r (2).csv"} {
		file := filepath.Join(dir, "guid")
		if err := os.WriteFile(file, []byte{byte(i)}, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := giveName(file, dir, "r.csv")
		if err != nil || got != filepath.Join(dir, want) {
			t.Fatalf("giveName = %s, %v, want %s", got, err, want)
		}
		if b, _ := os.ReadFile(got); len(b) != 1 || b[0] != byte(i) {
			t.Errorf("%s holds %v", want, b)
		}
		if _, err := os.Lstat(file); err == nil {
			t.Error("the GUID's file is still there")
		}
	}
	long := strings.Repeat("x", maxName)
	for range 2 {
		_ = os.WriteFile(filepath.Join(dir, "guid"), nil, 0o600)
		if got, err := giveName(filepath.Join(dir, "guid"), dir, long); err != nil || len(filepath.Base(got)) > maxName {
			t.Errorf("a long name became %d bytes, %v", len(filepath.Base(got)), err)
		}
	}
}

func TestEventsOfOtherDownloadsAreLeftAlone(t *testing.T) {
	dir := t.TempDir()
	n := newNames(dir)
	for _, msg := range []string{
		`{"id":1,"result":{"x":".download"}}`,
		`not json .download`,
		`{"method":"Browser.downloadProgress","params":{"guid":"unknown","state":"completed"}}`,
		`{"method":"Browser.downloadWillBegin","params":{"guid":"../../etc/passwd","suggestedFilename":"x"}}`,
		`{"method":"Browser.downloadProgress","params":{"guid":"../../etc/passwd","state":"completed"}}`,
		`{"method":"Browser.downloadWillBegin","params":{"guid":"g","suggestedFilename":"x"}}`,
		`{"method":"Browser.downloadProgress","params":{"guid":"g","state":"canceled"}}`,
	} {
		if out, pass := n.event([]byte(msg)); !pass || string(out) != msg {
			t.Errorf("%s became %s, %v", msg, out, pass)
		}
	}
	if len(n.suggested) != 0 {
		t.Errorf("kept %v", n.suggested)
	}
}

func FuzzDownloadEvent(f *testing.F) {
	f.Add([]byte(`{"method":"Browser.downloadWillBegin","params":{"guid":"g","suggestedFilename":"a"}}`))
	f.Add([]byte(`{"method":"Browser.downloadProgress","params":null}`))
	f.Fuzz(func(t *testing.T, msg []byte) {
		n := newNames(t.TempDir())
		if out, pass := n.event(msg); !pass || string(out) != string(msg) {
			t.Fatalf("%q became %q", msg, out) // no file lies there to be named
		}
	})
}
