package testenv

import (
	"context"
	"crypto/sha256"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// leftovers lists what of the stack is still on the host. Processes get a
// moment: the kernel ends those of a killed cgroup when it gets to it.
func (e *Env) leftovers() []string {
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if left := e.remains(); len(left) == 0 || time.Now().After(deadline) {
			return left
		}
	}
}

// remains is leftovers at this moment.
func (e *Env) remains() []string {
	left := append(e.processes(), e.mounts()...)
	left = append(left, e.network()...)
	left = append(left, e.loops()...)
	return append(left, e.cgroups()...)
}

// processes finds the daemons' and the machines' processes.
func (e *Env) processes() []string {
	var left []string
	for _, pid := range pids() {
		line, err := os.ReadFile(procPath(pid, "cmdline"))
		if err != nil || len(line) == 0 && !e.ours(pid) { // a kernel thread, or a zombie of others
			continue
		}
		named := strings.Contains(string(line), e.Home+"/") && pid != os.Getpid()
		if named || e.ours(pid) {
			status, _ := os.ReadFile(procPath(pid, "status"))
			if strings.Contains(string(status), "State:\tZ") {
				continue // waits for init, holds nothing
			}
			left = append(left, fmt.Sprintf("process %d: %s", pid, strings.ReplaceAll(string(line), "\x00", " ")))
		}
	}
	return left
}

func (e *Env) mounts() []string {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return []string{err.Error()}
	}
	var left []string
	for line := range strings.Lines(string(table)) {
		slot := false
		for i := range e.hosts() {
			slot = slot || strings.Contains(line, "/netns/"+e.num.prefix(i)+"-")
		}
		if slot || strings.Contains(line, e.Home+"/") {
			left = append(left, "mount "+strings.TrimSpace(line))
		}
	}
	return left
}

func (e *Env) network() []string {
	tables, err := output(context.Background(), "nft", "list", "tables")
	var left []string
	if err != nil {
		left = append(left, err.Error())
	}
	for i := range e.hosts() {
		prefix := e.num.prefix(i)
		for _, glob := range []string{"/run/netns/" + prefix + "-*", "/sys/class/net/" + prefix + "-*"} {
			found, _ := filepath.Glob(glob)
			left = append(left, found...)
		}
		for line := range strings.Lines(tables) {
			if strings.TrimSpace(line) == "table inet "+prefix {
				left = append(left, "nft "+strings.TrimSpace(line))
			}
		}
	}
	return left
}

func (e *Env) loops() []string {
	var left []string
	backings, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, b := range backings {
		if data, err := os.ReadFile(b); err == nil && strings.Contains(string(data), e.Home+"/") {
			left = append(left, "loop device "+b+" on "+strings.TrimSpace(string(data)))
		}
	}
	return left
}

// cgroups finds groups named after the homes of the hostds' machines.
func (e *Env) cgroups() []string {
	var names, left []string
	for _, host := range e.hosts() {
		for _, machines := range []string{"machines", "microvms"} { // as the drivers name their groups
			sum := sha256.Sum256([]byte(filepath.Join(e.Home, host, machines)))
			names = append(names, fmt.Sprintf("/berth/%x", sum[:4]))
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		for _, name := range names {
			if err == nil && d.IsDir() && strings.Contains(path, name) {
				left = append(left, "cgroup "+path)
			}
		}
		return nil // groups of others come and go
	})
	return left
}
