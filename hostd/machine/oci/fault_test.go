package oci_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/machinetest"
	"github.com/berth-dev/berth/hostd/machine/oci"
)

// withRunc makes drivers whose runc is a script; $REAL is the real one.
func withRunc(script string) machinetest.Subject {
	return machinetest.Subject{New: func(t testing.TB, home, base, layer string) (machine.Driver, func()) {
		t.Helper()
		real, err := exec.LookPath("runc")
		if err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(t.TempDir(), "runc")
		if err := os.WriteFile(path, []byte("#!/bin/bash\nREAL="+real+"\n"+script), 0o755); err != nil {
			t.Fatal(err)
		}
		d, err := oci.New(oci.Config{Home: home, ImageBase: base, AgentLayer: layer, Runc: path})
		if err != nil {
			t.Fatal(err)
		}
		return d, func() { _ = d.Close() }
	}}
}

// TestRuncFails: however runc fails, Start says why and leaves nothing.
func TestRuncFails(t *testing.T) {
	for name, c := range map[string]struct{ script, want string }{
		"refuses":        {"echo broken > \"${@: 4:1}\"; exit 3", "exit status 3: broken"},
		"is killed":      {"kill -9 $$", "killed"},
		"is killed late": {"$REAL \"$@\"; kill -9 $$", "killed"},
		"lies":           {"exit 0", "init.tmp"},
		"lies of a pid":  {"while [ \"$1\" != --pid-file ]; do shift; done; echo $$ > \"$2\"", "not the machine's"},
		"hangs":          {"exec sleep 1000", "deadline"},
		"hangs late":     {"$REAL \"$@\"; exec sleep 1000", "deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			r := machinetest.NewRig(t, withRunc(c.script))
			patience := time.Minute
			if c.want == "deadline" {
				patience = 2 * time.Second
			}
			ctx, cancel := context.WithTimeout(t.Context(), patience)
			defer cancel()
			m, err := r.Driver.Start(ctx, r.Spec(), machinetest.Ignore)
			if err == nil {
				r.Stop(m)
			}
			if !strings.Contains(fmt.Sprint(err), c.want) && !(c.want == "not the machine's" && err != nil) {
				t.Errorf("got %v, want %q", err, c.want)
			}
			r.WantNothing()
		})
	}
}

// TestStopFrozen: a frozen v1 group does not die unless thawed, a v2 one does.
func TestStopFrozen(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	m := r.Start(r.Spec())
	r.Ask(m, "echo", "up")
	frozen := false
	for pattern, text := range map[string]string{"/sys/fs/cgroup/freezer/berth/*/%s/freezer.state": "FROZEN",
		"/sys/fs/cgroup/berth/*/%s/cgroup.freeze": "1", "/sys/fs/cgroup/unified/berth/*/%s/cgroup.freeze": "1"} {
		paths, _ := filepath.Glob(fmt.Sprintf(pattern, m.ID())) // the pattern is good
		for _, path := range paths {
			if err := os.WriteFile(path, []byte(text), 0); err != nil {
				t.Fatal(err)
			}
			frozen = true
		}
	}
	if !frozen {
		t.Fatal("found no group to freeze")
	}
	r.Stop(m)
	r.WantDone(m)
	r.WantNothing()
}

// TestLongHome: a socket's address is shorter than a path may be.
func TestLongHome(t *testing.T) {
	long := machinetest.Subject{New: func(t testing.TB, home, base, layer string) (machine.Driver, func()) {
		return newDriver(t, filepath.Join(home, strings.Repeat("long,:", 20), strings.Repeat("er", 60)), base, layer)
	}}
	r := machinetest.NewRig(t, long)
	m := r.Start(r.Spec())
	if got := r.Ask(m, "echo", "far"); got.Text != "far" {
		t.Errorf("echo gave %q", got.Text)
	}
	r.Stop(m)
}

// TestTwoHomes: hostds side by side do not sweep each other's machines.
func TestTwoHomes(t *testing.T) {
	a, b := machinetest.NewRig(t, subject), machinetest.NewRig(t, subject)
	m := a.Start(a.Spec())
	if err := b.Driver.Sweep(t.Context(), func(string) bool { return false }); err != nil {
		t.Error(err)
	}
	if got := a.Ask(m, "echo", "alive"); got.Text != "alive" {
		t.Errorf("echo gave %q", got.Text)
	}
	a.Stop(m)
}

// TestForeignFilesStay: the sweep takes machines, nothing else.
func TestForeignFilesStay(t *testing.T) {
	r := machinetest.NewRig(t, subject)
	foreign := filepath.Join(r.Home, "README")
	outside := filepath.Join(t.TempDir(), "precious")
	for _, path := range []string{foreign, outside} {
		if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(r.Home, "abc123"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(filepath.Dir(outside), filepath.Join(r.Home, "abc123", "link")); err != nil {
		t.Fatal(err)
	}
	if err := r.Driver.Sweep(t.Context(), func(string) bool { return false }); err != nil {
		t.Error(err)
	}
	for _, path := range []string{foreign, outside} {
		if _, err := os.Stat(path); err != nil {
			t.Errorf("the sweep took %s", path)
		}
	}
	if _, err := os.Stat(filepath.Join(r.Home, "abc123")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a half-made machine outlived the sweep (%v)", err)
	}
}

func TestNewWantsFolders(t *testing.T) {
	if _, err := oci.New(oci.Config{Home: t.TempDir(), ImageBase: "/"}); err == nil || !strings.Contains(err.Error(), "AgentLayer") {
		t.Errorf("got %v", err)
	}
}
