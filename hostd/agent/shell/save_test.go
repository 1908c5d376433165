package shell

import (
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
)

// in runs text in a named shell.
func in(t *testing.T, s *Shells, shell, text string) ran {
	t.Helper()
	return run(t, s, Command{Text: text, Shell: shell})
}

func TestSaveAndRestore(t *testing.T) {
	a := newShells(t)
	work := a.cfg.Workspace.Dir
	sh(t, a, `mkdir sub && cd sub && export A='x
y' && export -f 2>/dev/null; g() { echo in g; }; export -f g; plain=1; export GONE=1; unset GONE; set -e; trap 'echo trapped >&2' DEBUG`)
	in(t, a, "two", `cd /; export B=2; false`)
	in(t, a, "plain", `true`)
	saved := a.Save(t.Context(), false)
	names := []string{}
	for _, v := range saved {
		names = append(names, v.Name+" "+strings.TrimPrefix(v.Cwd, work))
	}
	if got := strings.Join(names, ","); got != "default /sub,plain ,two /" {
		t.Errorf("saved %s", got)
	}
	if got := in(t, a, "two", `echo $?`); got.out != "1\n" {
		t.Errorf("$? after the save = %q", got.out)
	}
	if err := Check(saved); err != nil {
		t.Fatal(err)
	}
	for _, v := range saved {
		for _, e := range v.Env {
			if strings.HasPrefix(e, "BERTH") || strings.HasPrefix(e, "GONE") || strings.Contains(e, "__berth") {
				t.Errorf("%s has %q", v.Name, e)
			}
		}
	}
	b := newShells(t)
	sh(t, b, "sleep 100 & kept=no")
	saved[1].Cwd = "/gone" // it then begins in the workspace
	if err := b.Restore(saved); err != nil {
		t.Fatal(err)
	}
	if again := b.Save(t.Context(), false); len(again) != 3 || !slices.Equal(again[0].Env, saved[0].Env) {
		t.Errorf("saved again before any ran: %+v", again)
	}
	if got := sh(t, b, `echo "$PWD|$A|$(g)|$plain|$kept"`); got.out != filepath.Join(work, "sub")+"|x\ny|in g||\n" {
		t.Errorf("default: %+v", got)
	}
	if got := in(t, b, "two", `echo "$PWD $B"`); got.out != "/ 2\n" {
		t.Errorf("two: %+v", got)
	}
	if got := in(t, b, "plain", `echo "$PWD"`); got.out != b.cfg.Workspace.Dir+"\n" {
		t.Errorf("plain: %+v", got)
	}
	if err := b.Restart(t.Context(), Default); err != nil {
		t.Fatal(err)
	}
	if got := sh(t, b, `echo "$PWD|$A"`); got.out != b.cfg.Workspace.Dir+"|\n" {
		t.Errorf("after a restart: %+v", got)
	}
}

// A bash that was on its way when its shell was restored is not what the shell
// goes on with: a machine makes one for later, and takes a session in meanwhile.
func TestRestoreMeetsABashOnItsWay(t *testing.T) {
	gate := freeze.Open(freeze.Config{}, slog.New(slog.DiscardHandler))
	s := newShells(t, func(c *Config) { c.Freezer = gate })
	if err := gate.Shut(t.Context(), freeze.Customer); err != nil {
		t.Fatal(err)
	}
	warm := make(chan error, 1)
	go func() { warm <- s.Warm(t.Context()) }()
	until(t, "a bash is on its way", func() bool {
		made, err := os.ReadDir(s.cfg.StateDir)
		return err == nil && len(made) > 0
	})
	err := s.Restore([]Saved{{Name: Default, Cwd: "/", Env: []string{"A=kept"}}})
	if e := gate.Thaw(freeze.Customer); err != nil || e != nil {
		t.Fatal(err, e)
	}
	if err := <-warm; err != nil {
		t.Fatal(err)
	}
	if got := sh(t, s, `echo "$PWD $A"`); got.out != "/ kept\n" {
		t.Errorf("default: %+v", got)
	}
}

func TestABusyShellIsSaved(t *testing.T) {
	s := newShells(t)
	done := make(chan ran, 1)
	go func() { done <- sh(t, s, `export LATE=yes; cd /; echo x >`+s.cfg.Workspace.Dir+`/at; sleep 1000`) }()
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		saved := s.Save(t.Context(), false)
		if _, err := os.Stat(filepath.Join(s.cfg.Workspace.Dir, "at")); err == nil && len(saved) == 1 && saved[0].Cwd == "/" && slices.Contains(saved[0].Env, "LATE=yes") {
			break
		}
		if time.Now().After(end) {
			t.Fatalf("saved %+v", saved)
		}
	}
	if err := s.Restart(t.Context(), Default); err != nil {
		t.Fatal(err)
	}
	<-done
}

func TestForeignShellsAreChecked(t *testing.T) {
	for name, v := range map[string][]Saved{
		"name":     {{Name: "a/b", Cwd: "/"}},
		"twice":    {{Name: "a", Cwd: "/"}, {Name: "a", Cwd: "/"}},
		"cwd":      {{Name: "a", Cwd: "b"}},
		"nul":      {{Name: "a", Cwd: "/", Env: []string{"A=\x00"}}},
		"no value": {{Name: "a", Cwd: "/", Env: []string{"A"}}},
		"mark":     {{Name: "a", Cwd: "/", Env: []string{"BERTH_EXEC=x"}}},
		"size":     {{Name: "a", Cwd: "/", Env: []string{"A=" + strings.Repeat("x", maxEnv)}}},
		"many":     make([]Saved, MaxShells+1),
	} {
		if Check(v) == nil {
			t.Errorf("%s: taken", name)
		}
	}
}
