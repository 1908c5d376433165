package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// Limits are what a group may use; a zero is no limit.
type Limits struct {
	Memory int64  // bytes, without swap where the kernel can limit it
	Pids   int    // processes and threads
	Shares uint64 // CPU weight, 1024 is one core's worth beside others
	Cores  int    // CPU time a second, seconds
}

// V2 is the layout of a host with the unified tree at mount.
func V2(mount string) Layout { return Layout{unified: true, mounts: []string{mount}} }

// V1 is the layout of a host with a tree a controller at the given mounts.
func V1(by map[string]string) Layout {
	h := Layout{by: by}
	for _, mount := range by {
		if !slices.Contains(h.mounts, mount) {
			h.mounts = append(h.mounts, mount)
		}
	}
	return h
}

// controllers limit what Limits names.
var controllers = []string{"cpu", "memory", "pids"}

// trees are the mounts in which Make makes a group: those that limit, and a
// hybrid host's v2 tree, which can end a group at one stroke. Others, such as
// v1's cpuset, would only refuse processes.
func (h Layout) trees() []string {
	if h.unified {
		return h.mounts
	}
	var found []string
	limits := map[string]bool{}
	for _, c := range controllers {
		if mount := h.by[c]; mount != "" && !limits[mount] {
			limits[mount] = true
			found = append(found, mount)
		}
	}
	v1 := map[string]bool{}
	for _, mount := range h.by {
		v1[mount] = true
	}
	for _, mount := range h.mounts {
		if !v1[mount] {
			found = append(found, mount)
		}
	}
	return found
}

// Make makes a group that is not there yet, with its limits. On error the
// caller removes what there is (Rmdir).
func (h Layout) Make(group string, l Limits) error {
	for _, tree := range h.trees() {
		if err := h.mkdir(tree, group); err != nil {
			return fmt.Errorf("make cgroup: %w", err)
		}
	}
	for _, w := range h.writes(group, l) {
		if err := os.WriteFile(w.path, []byte(w.text), 0); err != nil {
			return fmt.Errorf("limit cgroup: %w", err)
		}
	}
	return nil
}

func (h Layout) mkdir(tree, group string) error {
	dir := tree
	steps := strings.Split(strings.Trim(group, "/"), "/")
	for i, step := range steps {
		if h.unified {
			// A group's controllers are what its parent hands down.
			err := os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+"+strings.Join(controllers, " +")), 0)
			if err != nil {
				return err
			}
		}
		dir = filepath.Join(dir, step)
		err := os.Mkdir(dir, 0o755)
		if err != nil && (i == len(steps)-1 || !errors.Is(err, fs.ErrExist)) {
			return err
		}
	}
	return nil
}

// write is one line for one control file.
type write struct{ path, text string }

const period = 100_000 // of CPU time limits, microseconds

func (h Layout) writes(group string, l Limits) []write {
	var list []write
	add := func(controller, file, text string) {
		root := h.by[controller]
		if h.unified {
			root = h.mounts[0]
		}
		list = append(list, write{filepath.Join(root, group, file), text})
	}
	v2 := h.unified
	if l.Memory > 0 {
		bytes := strconv.FormatInt(l.Memory, 10)
		add("memory", pick(v2, "memory.max", "memory.limit_in_bytes"), bytes)
		switch {
		case v2:
			add("memory", "memory.swap.max", "0")
		case h.SwapLimited():
			add("memory", "memory.memsw.limit_in_bytes", bytes)
		}
	}
	if l.Pids > 0 {
		add("pids", "pids.max", strconv.Itoa(l.Pids))
	}
	if l.Shares > 0 {
		add("cpu", pick(v2, "cpu.weight", "cpu.shares"), h.weight(l.Shares))
	}
	if l.Cores > 0 {
		quota := strconv.Itoa(l.Cores * period)
		if v2 {
			add("cpu", "cpu.max", quota+" "+strconv.Itoa(period))
		} else {
			add("cpu", "cpu.cfs_period_us", strconv.Itoa(period))
			add("cpu", "cpu.cfs_quota_us", quota)
		}
	}
	return list
}

func pick(v2 bool, unified, v1 string) string {
	if v2 {
		return unified
	}
	return v1
}

// weight is shares as the layout wants them. v2 weights follow runc's
// conversion: 2..262144 onto 1..10000.
func (h Layout) weight(shares uint64) string {
	if h.unified {
		shares = 1 + ((shares-2)*9999)/262142
	}
	return strconv.FormatUint(shares, 10)
}

// Procs are the files of a group into which a process writes its pid, or 0, to
// enter.
func (h Layout) Procs(group string) []string {
	var paths []string
	for _, dir := range h.Dirs(group) {
		paths = append(paths, filepath.Join(dir, "cgroup.procs"))
	}
	return paths
}
