package main

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/agentlink"
)

// hostname is every machine's name.
const hostname = "berth"

// maxFiles is how many files a process may have open, and how many it is
// allowed at first, as in a container.
const (
	maxFiles  = 1 << 20
	softFiles = 65536
)

// sysctls of the machine: what a container gets from its slot.
var sysctls = [][2]string{
	{"net/ipv4/ping_group_range", "0 2147483647"},
	// Port 77 is the agent's, so unprivileged ones begin after it.
	{"net/ipv4/ip_unprivileged_port_start", "80"},
}

// settle gives the machine its name, resolver, settings and limits.
func settle() error {
	if err := unix.Sethostname([]byte(hostname)); err != nil {
		return fmt.Errorf("hostname: %w", err)
	}
	for path, text := range files() {
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			return err
		}
	}
	for _, s := range sysctls {
		if err := sysctl(s[0], s[1]); err != nil {
			return err
		}
	}
	return limit()
}

// files are the machine's own. A machine that starts from a template gets
// another identity from its agent.
func files() map[string]string {
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails
	return map[string]string{
		"/etc/machine-id":  hex.EncodeToString(id[:]) + "\n",
		"/etc/resolv.conf": "nameserver " + agentlink.SlotAddr + "\n",
	}
}

func sysctl(name, value string) error {
	return os.WriteFile(filepath.Join("/proc/sys", name), []byte(value), 0o644)
}

// limit sets what the agent and all it starts inherit.
func limit() error {
	text, err := os.ReadFile("/proc/sys/kernel/threads-max")
	if err != nil {
		return err
	}
	threads, err := strconv.ParseUint(strings.TrimSpace(string(text)), 10, 32)
	if err != nil {
		return fmt.Errorf("threads-max: %w", err)
	}
	var now unix.Sysinfo_t
	if err := unix.Sysinfo(&now); err != nil {
		return err
	}
	for resource, l := range limits(threads, uint64(now.Procs)) {
		if err := syscall.Setrlimit(resource, &l); err != nil {
			return fmt.Errorf("limit %d: %w", resource, err)
		}
	}
	return nil
}

// limits of a machine that may have so many threads (the driver says that on
// the kernel's command line) and has some now, the kernel's own. Each user may
// have fewer than the rest: a Go program that cannot make a thread dies, so a
// fork bomb would end the agent and with it the machine. Root inside can still
// use them up.
func limits(threads, now uint64) map[int]syscall.Rlimit {
	each := threads - min(now, threads)
	each -= min(64, each/4)
	return map[int]syscall.Rlimit{
		syscall.RLIMIT_NOFILE: {Cur: softFiles, Max: maxFiles},
		syscall.RLIMIT_CORE:   {},
		unix.RLIMIT_NPROC:     {Cur: each, Max: each},
	}
}
