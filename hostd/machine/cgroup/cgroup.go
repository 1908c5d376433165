// Package cgroup is what machine drivers need of cgroups, on hosts with one
// unified tree (v2), one tree a controller (v1) or both: groups made, limited,
// listed, ended and removed by plain files.
package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Layout is the host's cgroup layout: on v2 the one unified tree, on v1 and
// hybrid hosts one tree a controller. A group is a path such as /berth/x in
// every tree that it is in (kernel, Documentation/admin-guide/cgroup-v1 and
// cgroup-v2.rst).
type Layout struct {
	unified bool              // v2 only: controllers are in the unified tree
	mounts  []string          // where each tree is mounted
	by      map[string]string // v1: controller → mount
}

// Find reads the layout from /proc/self/mountinfo.
func Find() (Layout, error) {
	f, err := os.Open("/proc/self/mountinfo")
	if err != nil {
		return Layout{}, err
	}
	defer f.Close()
	h := Layout{by: map[string]string{}}
	var v2 []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		point, kind, options, ok := parseMount(lines.Text())
		switch {
		case !ok:
		case kind == "cgroup2":
			v2 = append(v2, point)
		case kind == "cgroup" && !slices.Contains(h.mounts, point):
			h.mounts = append(h.mounts, point)
			for _, o := range strings.Split(options, ",") {
				h.by[o] = point
			}
		}
	}
	// A hybrid host's v2 tree has no controllers; groups are there too.
	h.unified = len(h.mounts) == 0
	h.mounts = append(h.mounts, v2...)
	if len(h.mounts) == 0 {
		return h, errors.New("no cgroup file system is mounted; mount cgroup2 at /sys/fs/cgroup")
	}
	return h, nil
}

// parseMount splits a line of mountinfo (proc(5)): mount point, file system
// type and super options.
func parseMount(line string) (point, kind, options string, ok bool) {
	head, tail, ok := strings.Cut(line, " - ")
	before, after := strings.Fields(head), strings.Fields(tail)
	if !ok || len(before) < 5 || len(after) < 3 {
		return "", "", "", false
	}
	return before[4], after[0], after[2], true
}

// Dirs are the folders of a group that exist.
func (h Layout) Dirs(group string) []string {
	var found []string
	for _, m := range h.mounts {
		dir := filepath.Join(m, group)
		if _, err := os.Lstat(dir); err == nil {
			found = append(found, dir)
		}
	}
	return found
}

// Children names the groups directly below a parent, in any tree.
func (h Layout) Children(parent string) []string {
	var names []string
	for _, dir := range h.Dirs(parent) {
		entries, _ := os.ReadDir(dir) // may vanish meanwhile
		for _, e := range entries {
			if e.IsDir() {
				names = append(names, e.Name())
			}
		}
	}
	return names
}

// DropParent removes the machines' parent groups where no machine is left.
func (h Layout) DropParent(parent string) {
	for p := parent; p != "/" && p != "."; p = filepath.Dir(p) {
		for _, dir := range h.Dirs(p) {
			_ = unix.Rmdir(dir) // EBUSY: a machine or another driver's parent is in it
		}
	}
}

// Pids lists the processes of a group and of groups below it, ascending (so a
// machine's first process comes first).
func (h Layout) Pids(group string) ([]int, error) {
	var all []int
	for _, dir := range h.Dirs(group) {
		err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() || e.Name() != "cgroup.procs" {
				return ignoreGone(err)
			}
			data, err := os.ReadFile(path)
			for _, field := range strings.Fields(string(data)) {
				if pid, bad := strconv.Atoi(field); bad == nil {
					all = append(all, pid)
				}
			}
			return ignoreGone(err)
		})
		if err != nil {
			return nil, err
		}
	}
	slices.Sort(all)
	return slices.Compact(all), nil
}

// ignoreGone drops the errors of a file or group that went away while read.
func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// Holds says whether process pid is in the group or below it.
func (h Layout) Holds(group string, pid int) bool {
	data, err := os.ReadFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	return err == nil && inGroup(string(data), group)
}

// inGroup looks for a group in the text of /proc/<pid>/cgroup: lines
// "id:controllers:/path" (cgroups(7)).
func inGroup(text, group string) bool {
	for line := range strings.Lines(text) {
		parts := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(parts) == 3 && (parts[2] == group || strings.HasPrefix(parts[2], group+"/")) {
			return true
		}
	}
	return false
}

// Kill ends every process of a group and returns when none is left. Frozen,
// stopped and forking ones end too: SIGKILL of a pid namespace's first process
// takes all others with it, and it is the first in every round.
func (h Layout) Kill(ctx context.Context, group string) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		pids, err := h.Pids(group)
		if err != nil {
			return fmt.Errorf("list processes: %w", err)
		}
		if len(pids) == 0 {
			return nil
		}
		for _, dir := range h.Dirs(group) {
			_ = os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0) // v2 since 5.14
		}
		for _, pid := range pids {
			h.killOne(group, pid)
		}
		h.thaw(group)
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d processes did not end, first %d: %w", len(pids), pids[0], context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}

// killOne kills a process if it still is in the group: the pid is pinned by a
// pidfd before the look, so a reused number is never hit.
func (h Layout) killOne(group string, pid int) {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return // ended
	}
	defer unix.Close(fd)
	if h.Holds(group, pid) {
		_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0) // ended meanwhile: fine
	}
}

// thaw releases a frozen group: on v1 a frozen process does not even die.
func (h Layout) thaw(group string) {
	if dir, ok := h.by["freezer"]; ok {
		_ = os.WriteFile(filepath.Join(dir, group, "freezer.state"), []byte("THAWED"), 0)
	}
}

// Rmdir removes a group without processes from every tree. One that enters it
// meanwhile, as a process just started may, is ended.
func (h Layout) Rmdir(ctx context.Context, group string) error {
	for _, dir := range h.Dirs(group) {
		for wait := time.Millisecond; ; wait *= 2 {
			err := removeGroup(dir)
			if err == nil {
				break
			}
			// EBUSY also when the last process has been listed as gone a moment
			// before its exit is through.
			if !errors.Is(err, unix.EBUSY) || ctx.Err() != nil {
				return fmt.Errorf("remove cgroup: %w", err)
			}
			if err := h.Kill(ctx, group); err != nil {
				return err
			}
			time.Sleep(min(wait, 20*time.Millisecond))
		}
	}
	return nil
}

// removeGroup removes a group's folder and those below it, deepest first.
func removeGroup(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return ignoreGone(err)
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := removeGroup(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return ignoreGone(unix.Rmdir(dir))
}

// SetShares sets a group's CPU weight in v1 terms: 1024 is one full core's
// worth beside others.
func (h Layout) SetShares(group string, shares uint64) error {
	for _, w := range h.writes(group, Limits{Shares: shares}) {
		if err := os.WriteFile(w.path, []byte(w.text), 0); err != nil {
			return err
		}
	}
	return nil
}

// SwapLimited says whether the kernel can limit memory and swap together.
func (h Layout) SwapLimited() bool {
	if h.unified {
		return true
	}
	_, err := os.Stat(filepath.Join(h.by["memory"], "memory.memsw.limit_in_bytes"))
	return err == nil
}

// Has says whether machines can be limited by a controller.
func (h Layout) Has(controller string) bool {
	if !h.unified {
		return h.by[controller] != ""
	}
	data, err := os.ReadFile(filepath.Join(h.mounts[0], "cgroup.controllers"))
	return err == nil && slices.Contains(strings.Fields(string(data)), controller)
}
