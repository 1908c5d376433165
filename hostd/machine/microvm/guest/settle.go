package main

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
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

// pidsVariable is how the driver says how many processes each user of the
// machine may have: on the kernel's command line, which passes what it does not
// know to process 1 as its environment.
const pidsVariable = "BERTH_PIDS"

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
	return limit(os.Getenv(pidsVariable))
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

// limit sets what the agent and all it starts inherit. pids may be empty.
func limit(pids string) error {
	limits := map[int]syscall.Rlimit{
		syscall.RLIMIT_NOFILE: {Cur: softFiles, Max: maxFiles},
		syscall.RLIMIT_CORE:   {},
	}
	if pids != "" {
		n, err := strconv.ParseUint(pids, 10, 32)
		if err != nil || n == 0 {
			return fmt.Errorf("%s=%s on the kernel's command line: want a number", pidsVariable, pids)
		}
		limits[unix.RLIMIT_NPROC] = syscall.Rlimit{Cur: n, Max: n}
	}
	for resource, l := range limits {
		if err := syscall.Setrlimit(resource, &l); err != nil {
			return fmt.Errorf("limit %d: %w", resource, err)
		}
	}
	return nil
}
