package microvm

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// templates makes empty templates of those first digits, each by a recipe of its own.
func templates(t *testing.T, s store, digits string) (hashes []string) {
	t.Helper()
	for _, d := range digits {
		hash := strings.Repeat(string(d), 64)
		if err := os.MkdirAll(filepath.Join(s.dir, hash), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := s.put("index", hash, hash); err != nil {
			t.Fatal(err)
		}
		hashes = append(hashes, hash)
	}
	return hashes
}

// left names the templates of a store by their first digits, and the recipes.
func left(t *testing.T, s store) (all string) {
	t.Helper()
	for _, pattern := range []string{"*", "index/*", ".new-*"} {
		names, err := filepath.Glob(filepath.Join(s.dir, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			if base := filepath.Base(name); validHash.MatchString(base) {
				all += base[:1]
			} else if strings.HasPrefix(base, ".new-") {
				all += "half"
			}
		}
		all += " "
	}
	return all
}

func TestTemplatesOfNoUseArePruned(t *testing.T) {
	d := &Driver{cfg: Config{Home: t.TempDir(), Cgroup: "/berth/none"}, store: store{t.TempDir()}, building: make(chan struct{}, 1), templates: map[string]*template{}}
	d.building <- struct{}{}
	all := templates(t, d.store, "abcd")
	if err := os.Mkdir(d.dir("1"), 0o700); err != nil { // a machine
		t.Fatal(err)
	}
	if err := (state{Pid: 1, Template: all[0], Layers: []string{newLayerName()}}).write(d.dir("1")); err != nil {
		t.Fatal(err)
	}
	if err := os.Mkdir(d.dir("2"), 0o700); err != nil { // one that never ran
		t.Fatal(err)
	}
	d.templates[all[1]] = &template{}
	removed, err := d.PruneTemplates(t.Context(), func(hash string) bool { return hash == all[2] }, 0)
	if err != nil || !slices.Equal(removed, all[3:]) {
		t.Errorf("removed %.4q, %v", removed, err)
	}
	if got := left(t, d.store); got != "abc abc  " {
		t.Errorf("left: %q", got)
	}
}

// A machine whose state is beyond reading may be of any template.
func TestNothingIsPrunedBesideAnUnknownMachine(t *testing.T) {
	d := &Driver{cfg: Config{Home: t.TempDir(), Cgroup: "/berth/none"}, store: store{t.TempDir()}, building: make(chan struct{}, 1)}
	d.building <- struct{}{}
	templates(t, d.store, "a")
	if err := os.MkdirAll(filepath.Join(d.dir("1"), stateName), 0o700); err != nil { // no file
		t.Fatal(err)
	}
	if removed, err := d.PruneTemplates(t.Context(), func(string) bool { return false }, 0); err == nil || len(removed) > 0 {
		t.Errorf("removed %q, %v", removed, err)
	}
}

// Where other hosts' sessions may still come for them, templates stay a while:
// from when they were first of no use, and anew after they were of use again.
func TestTemplatesRestBeforeTheyArePruned(t *testing.T) {
	s := store{t.TempDir()}
	templates(t, s, "ab")
	b := strings.Repeat("b", 64)
	const day = 24 * time.Hour
	start := time.Now()
	for _, step := range []struct {
		after time.Duration
		keep  string
		want  string
	}{
		{0, "", "ab ab  "},
		{29 * day, b, "ab ab  "},
		{30 * day, "", "b b  "},
		{59 * day, "", "b b  "},
		{60 * day, "", "   "},
	} {
		if _, err := s.prune(func(hash string) bool { return hash == step.keep }, start.Add(step.after+time.Second), 30*day); err != nil {
			t.Fatal(err)
		}
		if got := left(t, s); got != step.want {
			t.Errorf("after %s: %q, want %q", step.after, got, step.want)
		}
	}
	if marks, _ := filepath.Glob(filepath.Join(s.dir, unusedFolder, "*")); len(marks) > 0 {
		t.Errorf("marks stay: %q", marks)
	}
}

// A mark that says nothing, as a power failure leaves it, does not keep its
// template for ever.
func TestEmptyMarkIsMadeAgain(t *testing.T) {
	s := store{t.TempDir()}
	hash := templates(t, s, "a")[0]
	if err := s.put(unusedFolder, hash, ""); err != nil {
		t.Fatal(err)
	}
	const rest = time.Hour
	start := time.Now()
	for after, want := range []string{"a a  ", "   "} {
		if _, err := s.prune(func(string) bool { return false }, start.Add(time.Duration(after)*2*rest), rest); err != nil {
			t.Fatal(err)
		}
		if got := left(t, s); got != want {
			t.Errorf("look %d: %q, want %q", after, got, want)
		}
	}
}

// A template's name is safe before anything refers to it.
func TestTemplateIsSafeWhenItIsThere(t *testing.T) {
	s := store{t.TempDir()}
	dir, err := s.begin()
	if err != nil {
		t.Fatal(err)
	}
	there := false
	old := syncFolder
	defer func() { syncFolder = old }()
	syncFolder = func(dir string) error {
		names, err := filepath.Glob(filepath.Join(dir, "*", "meta.json"))
		there = dir == s.dir && len(names) == 1 && s.index(strings.Repeat("e", 64)) == ""
		return err
	}
	if _, err := s.commit(dir, meta{Recipe: strings.Repeat("e", 64)}); err != nil {
		t.Fatal(err)
	}
	if !there {
		t.Error("its folder was not synced between the rename and the index")
	}
}
