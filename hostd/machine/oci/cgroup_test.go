package oci

import (
	"os"
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
	v2 := hierarchies{unified: true, mounts: []string{root}}
	if err := v2.setShares("/berth/x/1", 1024); err != nil || file("cpu.weight") != "39" {
		t.Errorf("v2: %q, %v", file("cpu.weight"), err) // 39: what runc makes of 1024
	}
	v1 := hierarchies{mounts: []string{root}, by: map[string]string{"cpu": root}}
	if err := v1.setShares("/berth/x/1", 1024); err != nil || file("cpu.shares") != "1024" {
		t.Errorf("v1: %q, %v", file("cpu.shares"), err)
	}
	if err := v2.setShares("/berth/x/2", 1024); err == nil {
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
	h := hierarchies{mounts: []string{a, b}}
	if got, err := h.pids("/berth/x/1"); err != nil || !slices.Equal(got, []int{10, 20, 30}) {
		t.Errorf("got %v, %v", got, err)
	}
	if got, err := h.pids("/berth/x/none"); err != nil || len(got) != 0 {
		t.Errorf("got %v, %v of a group that is not there", got, err)
	}
	if got := h.children("/berth/x"); !slices.Contains(got, "1") {
		t.Errorf("children %v", got)
	}
}

func TestControllers(t *testing.T) {
	root := plain(t, ".")
	if err := os.WriteFile(filepath.Join(root, "cgroup.controllers"), []byte("cpu memory pids\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	v2 := hierarchies{unified: true, mounts: []string{root}}
	if !v2.has("pids") || v2.has("io") || v2.has("mem") {
		t.Error("v2 controllers are misread")
	}
	v1 := hierarchies{by: map[string]string{"cpu": root}}
	if !v1.has("cpu") || v1.has("pids") {
		t.Error("v1 controllers are misread")
	}
}

// TestKillOneSparesStrangers: a pid that is not in the group lives.
func TestKillOneSparesStrangers(t *testing.T) {
	h, err := findHierarchies()
	if err != nil {
		missing(t, err)
	}
	h.killOne("/berth/nobody/0", os.Getpid())
	if _, err := h.openProcess("/berth/nobody/0", os.Getpid()); err == nil {
		t.Error("took this test for a machine")
	}
}
