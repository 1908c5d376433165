package cgroup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
)

// plain is a tree of ordinary files in the place of a cgroup file system.
func plain(t *testing.T, dirs ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, dir := range dirs {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestSharesOfBothLayouts(t *testing.T) {
	root := plain(t, "berth/x/1")
	file := func(name string) string {
		data, err := os.ReadFile(filepath.Join(root, "berth/x/1", name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	for _, name := range []string{"cpu.weight", "cpu.shares"} {
		if err := os.WriteFile(filepath.Join(root, "berth/x/1", name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	v2 := V2(root)
	if err := v2.SetShares("/berth/x/1", 1024); err != nil || file("cpu.weight") != "39" {
		t.Errorf("v2: %q, %v", file("cpu.weight"), err) // 39: what runc makes of 1024
	}
	v1 := Layout{mounts: []string{root}, by: map[string]string{"cpu": root}}
	if err := v1.SetShares("/berth/x/1", 1024); err != nil || file("cpu.shares") != "1024" {
		t.Errorf("v1: %q, %v", file("cpu.shares"), err)
	}
	if err := v2.SetShares("/berth/x/2", 1024); err == nil {
		t.Error("set the shares of a group that is not there")
	}
}

func TestPidsOfAllTreesAndBelow(t *testing.T) {
	a, b := plain(t, "berth/x/1/sub"), plain(t, "berth/x/1")
	for path, text := range map[string]string{
		filepath.Join(a, "berth/x/1/cgroup.procs"):     "20\n10\n",
		filepath.Join(a, "berth/x/1/sub/cgroup.procs"): "30\n",
		filepath.Join(b, "berth/x/1/cgroup.procs"):     "10\n",
	} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h := Layout{mounts: []string{a, b}}
	if got, err := h.Pids("/berth/x/1"); err != nil || !slices.Equal(got, []int{10, 20, 30}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := h.Pids("/berth/x/none"); err != nil || len(got) != 0 {
		t.Errorf("got %v, %v of a group that is not there", got, err)
	}
	if got := h.Children("/berth/x"); !slices.Contains(got, "1") {
		t.Errorf("children %v", got)
	}
}

func TestControllers(t *testing.T) {
	root := plain(t, ".")
	if err := os.WriteFile(filepath.Join(root, "cgroup.controllers"), []byte("cpu memory pids\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	v2 := V2(root)
	if !v2.Has("pids") || v2.Has("io") || v2.Has("mem") {
		t.Error("v2 controllers are misread")
	}
	v1 := Layout{by: map[string]string{"cpu": root}}
	if !v1.Has("cpu") || v1.Has("pids") {
		t.Error("v1 controllers are misread")
	}
}

// TestKillOneSparesStrangers: a pid that is not in the group lives.
func TestKillOneSparesStrangers(t *testing.T) {
	h, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	h.killOne("/berth/nobody/0", os.Getpid())
	if _, err := h.Open("/berth/nobody/0", os.Getpid()); err == nil {
		t.Error("took this test for a machine")
	}
}

func TestMake(t *testing.T) {
	h, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		missing := "making groups needs root"
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	group := fmt.Sprintf("/berth-test-%d/x", os.Getpid())
	t.Cleanup(func() {
		if err := errors.Join(h.Kill(context.Background(), group), h.Rmdir(context.Background(), group)); err != nil {
			t.Error(err)
		}
		h.DropParent(filepath.Dir(group))
		if left := h.Dirs(filepath.Dir(group)); len(left) != 0 {
			t.Errorf("left behind: %v", left)
		}
	})
	if err := h.Make(group, Limits{Memory: 64 << 20, Pids: 5, Shares: 64, Cores: 1}); err != nil {
		t.Fatal(err)
	}
	if err := h.Make(group, Limits{}); err == nil {
		t.Error("made a group twice")
	}
	cmd := exec.Command("sh", "-c", "for f in \"$@\"; do echo 0 > $f; done; head -c 512M /dev/zero | tail", "sh")
	cmd.Args = append(cmd.Args, h.Procs(group)...)
	if out, err := cmd.CombinedOutput(); err == nil {
		t.Errorf("512 MiB fitted into 64: %s", out)
	}
}

// TestRmdirEndsWhoEntersLate: a process that was not there when the group was
// emptied.
func TestRmdirEndsWhoEntersLate(t *testing.T) {
	h, err := Find()
	if err != nil {
		t.Fatal(err)
	}
	if os.Geteuid() != 0 {
		missing := "making groups needs root"
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	group := fmt.Sprintf("/berth-test-%d/late", os.Getpid())
	if err := h.Make(group, Limits{}); err != nil {
		t.Fatal(err)
	}
	defer h.DropParent(filepath.Dir(group))
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	for _, path := range h.Procs(group) {
		if err := os.WriteFile(path, []byte(fmt.Sprint(cmd.Process.Pid)), 0); err != nil {
			t.Fatal(err)
		}
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = cmd.Wait() }() // killed
	if err := h.Rmdir(t.Context(), group); err != nil {
		t.Error(err)
		_ = cmd.Process.Kill()
	}
	<-ended
	if left := h.Dirs(group); len(left) != 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestWritesOfBothLayouts(t *testing.T) {
	l := Limits{Memory: 1 << 30, Pids: 9, Cores: 2}
	var got []string
	for _, h := range []Layout{V2("/u"), V1(map[string]string{"memory": "/m", "pids": "/p", "cpu": "/c"})} {
		for _, w := range h.writes("/g", l) {
			got = append(got, w.path+"="+w.text)
		}
	}
	want := []string{"/u/g/memory.max=1073741824", "/u/g/memory.swap.max=0", "/u/g/pids.max=9", "/u/g/cpu.max=200000 100000",
		"/m/g/memory.limit_in_bytes=1073741824", "/p/g/pids.max=9", "/c/g/cpu.cfs_period_us=100000", "/c/g/cpu.cfs_quota_us=200000"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q", got)
	}
}
