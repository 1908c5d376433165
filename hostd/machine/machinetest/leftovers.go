package machinetest

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
)

// WantNothing fails the test if anything of the rig's machines exists on the
// host: a file, process, mount, loop device or cgroup. Zombies wait for the
// host's own first process and are given the time.
func (r *Rig) WantNothing() {
	r.Helper()
	var left []string
	for deadline := time.Now().Add(waitFor); ; time.Sleep(10 * time.Millisecond) {
		if left = r.leftovers(); len(left) == 0 {
			return
		}
		// Stop has returned: only a zombie may need time that is not ours.
		if !onlyZombies(left) || time.Now().After(deadline) {
			break
		}
	}
	r.Errorf("left behind:\n%s", strings.Join(left, "\n"))
}

func onlyZombies(left []string) bool {
	for _, l := range left {
		if !strings.HasPrefix(l, "zombie ") {
			return false
		}
	}
	return true
}

func (r *Rig) leftovers() []string {
	left := r.files()
	left = append(left, r.processes()...)
	left = append(left, r.mounts()...)
	left = append(left, r.loops()...)
	return append(left, r.cgroups()...)
}

func (r *Rig) files() []string {
	var left []string
	for _, id := range r.ids {
		if _, err := os.Lstat(filepath.Join(r.Home, id)); err == nil {
			left = append(left, "folder "+filepath.Join(r.Home, id))
		}
	}
	if came, _ := os.ReadDir(filepath.Join(r.Home, ".ahead")); len(came) > 0 { // layers
		left = append(left, fmt.Sprintf("%d layers that came ahead", len(came)))
	}
	return left
}

// processes finds those that run as an id of one of the rig's slots.
func (r *Rig) processes() []string {
	var left []string
	for _, slot := range r.slots {
		left = append(left, r.processesOf(slot)...)
	}
	return left
}

func (r *Rig) processesOf(slot machine.Slot) []string {
	all, _ := r.pids(slot)
	var left []string
	for _, pid := range all {
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		switch {
		case err != nil: // ended
		case strings.Contains(string(status), "State:\tZ"):
			// Ours where no driver watched it any more: of a crashed host.
			if got, _ := unix.Wait4(pid, nil, unix.WNOHANG, nil); got == pid {
				continue
			}
			left = append(left, fmt.Sprintf("zombie %d of %s", pid, slot.Name))
		default:
			left = append(left, fmt.Sprintf("process %d of %s", pid, slot.Name))
		}
	}
	return left
}

// uidWithin looks for the real user id in the text of /proc/<pid>/status.
func uidWithin(status string, base uint32) bool {
	_, rest, ok := strings.Cut(status, "\nUid:\t")
	var uid uint32
	if !ok {
		return false
	}
	if _, err := fmt.Sscan(rest, &uid); err != nil {
		return false
	}
	return uid >= base && uid-base < 65536
}

func (r *Rig) mounts() []string {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	var left []string
	for line := range strings.Lines(string(table)) {
		if strings.Contains(line, r.Home) {
			left = append(left, "mount "+line)
		}
	}
	return left
}

func (r *Rig) loops() []string {
	backings, _ := filepath.Glob("/sys/block/loop*/loop/backing_file") // the pattern is good
	var left []string
	for _, b := range backings {
		if data, err := os.ReadFile(b); err == nil && strings.Contains(string(data), r.Home) {
			left = append(left, "loop device "+b+" on "+string(data))
		}
	}
	return left
}

func (r *Rig) cgroups() []string {
	mine := map[string]bool{}
	for _, id := range r.ids {
		mine[id] = true
	}
	var left []string
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, e fs.DirEntry, err error) error {
		if err == nil && e.IsDir() && mine[e.Name()] {
			left = append(left, "cgroup "+path)
		}
		return nil // groups of others come and go
	})
	return left
}
