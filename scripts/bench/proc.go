package main

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// clockTick is USER_HZ, 100 on every Linux that Go runs on.
const clockTick = 100

// unified is where the cgroup version 2 tree is mounted.
var unified = sync.OnceValue(func() string {
	table, _ := os.ReadFile("/proc/self/mountinfo") // without it there is no tree to find
	for line := range strings.Lines(string(table)) {
		fields := strings.Fields(line)
		if len(fields) > 8 && strings.Contains(line, " - cgroup2 ") {
			return fields[4]
		}
	}
	return "/sys/fs/cgroup"
})

// procs lists the processes of a cgroup and of those below it.
func procs(group string) []int {
	var pids []int
	_ = filepath.WalkDir(group, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.Name() != "cgroup.procs" {
			return nil // groups come and go
		}
		b, _ := os.ReadFile(path)
		for _, field := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(field); err == nil && pid != 0 {
				pids = append(pids, pid)
			}
		}
		return nil
	})
	return pids
}

// groupCPU is the seconds of processor time used in a cgroup, by processes that
// ended too (cpu.stat of cgroup version 2).
func groupCPU(group string) (float64, error) {
	b, err := os.ReadFile(filepath.Join(group, "cpu.stat"))
	if err != nil {
		return 0, err
	}
	var usec float64
	_, err = fmt.Sscanf(string(b), "usage_usec %f", &usec)
	return usec / 1e6, err
}

// processCPU is the seconds used by a process and the children it waited for
// (proc_pid_stat(5), fields 14 to 17).
func processCPU(pid int) (float64, error) {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	fields := strings.Fields(string(b)[strings.LastIndexByte(string(b), ')')+1:]) // from field 3 on
	total := 0.0
	for _, f := range fields[11:15] {
		ticks, err := strconv.ParseFloat(f, 64)
		if err != nil {
			return 0, err
		}
		total += ticks / clockTick
	}
	return total, nil
}

// pss is the proportional memory of processes in MiB: pages that several share
// count in parts.
func pss(pids []int) float64 { return memoryOf(pids, "Pss:") }

// memoryOf adds up lines of processes' smaps_rollup (proc(5)), in MiB.
func memoryOf(pids []int, names ...string) float64 {
	var kib float64
	for _, pid := range pids {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid)) // it may have ended
		for line := range strings.Lines(string(b)) {
			name, rest, _ := strings.Cut(line, " ")
			if slices.Contains(names, name) {
				n, _ := strconv.ParseFloat(strings.Fields(rest)[0], 64)
				kib += n
			}
		}
	}
	return kib / 1024
}

// meminfo gives a line of /proc/meminfo in KiB.
func meminfo(name string) (int64, error) {
	b, err := os.ReadFile("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			return strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
		}
	}
	return 0, fmt.Errorf("no %s in /proc/meminfo", name)
}

// chromeOf finds the browser process (not its children) of a machine.
func chromeOf(group string) (int, []string, error) {
	for _, pid := range procs(group) {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		args := strings.Split(strings.TrimRight(string(b), "\x00"), "\x00")
		if len(args) < 2 || !strings.HasSuffix(args[0], "chromium") {
			// Chrome rewrites its title into one argument with spaces.
			args = strings.Fields(strings.ReplaceAll(string(b), "\x00", " "))
		}
		if len(args) > 1 && strings.HasSuffix(args[0], "/chromium") && !strings.Contains(string(b), "--type=") &&
			strings.Contains(string(b), "--remote-debugging-port") {
			return pid, args, nil
		}
	}
	return 0, nil, fmt.Errorf("no Chrome in %s", group)
}
