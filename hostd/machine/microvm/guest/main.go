// Command guest is the first program of a machine with a kernel of its own:
// /init of the initramfs, called stage0 in its messages. It loads what the
// kernel needs, mounts the machine's disk, sets up its network and then
// becomes the agent, which never knows where it was started from.
//
//	kernel ─▶ /init (this, from the initramfs) ─▶ exec /usr/lib/berth/agent (on the disk's root)
//
// The initramfs holds beside it: /modules (kernel modules and their load
// order), /agent (the agent's binary) and /agent.args (its arguments, each
// ended by a zero byte). There is no udev and no shell. An error is a
// sentence on the console and the end of process 1, which is a kernel panic:
// the driver lets QEMU end at one.
package main

import (
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/agentlink"
)

// Where things are in the initramfs, and where they go on the disk's root.
const (
	moduleDir = "/modules"
	agentFile = "/agent"
	argsFile  = "/agent.args"
	newRoot   = "/root" // the kernel makes it in every initramfs
	agentPath = "/usr/lib/berth/agent"
)

// step is one part of the way up.
type step struct {
	name string
	do   func() error
}

func main() {
	if os.Getpid() != 1 {
		fmt.Fprintln(os.Stderr, "stage0: this is for process 1 of a machine")
		os.Exit(2)
	}
	if err := boot(); err != nil {
		fmt.Println("stage0:", err)
		os.Exit(1)
	}
}

// boot does all steps and execs the agent; it returns only with an error.
func boot() error {
	var args []string
	var listener int
	report, err := walk([]step{
		{"kernel file systems", mountKernel},
		{"modules", loadModules},
		{"disk", mountDisk},
		{"mounts", mountRest},
		{"agent", func() (err error) { args, err = layAgent(); return err }},
		{"root", switchRoot},
		{"settings", settle},
		{"network", bringUp},
		{"listener", func() (err error) { listener, err = listen(); return err }},
	}, uptime)
	fmt.Println("stage0:", report)
	if err != nil {
		return err
	}
	if err := pass(listener, agentlink.ListenFD); err != nil {
		return fmt.Errorf("pass the listener: %w", err)
	}
	err = syscall.Exec(agentPath, append([]string{agentPath}, args...), []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"})
	return fmt.Errorf("exec %s: %w", agentPath, err)
}

// pass makes a descriptor outlive exec under another number. It is the last
// thing before exec: the number may be one that Go's own poller has.
func pass(fd, as int) error {
	if fd == as { // dup3 refuses that
		_, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0)
		return err
	}
	return unix.Dup3(fd, as, 0)
}

// walk does steps until one fails and reports how long each took.
func walk(steps []step, now func() time.Duration) (report string, err error) {
	last := now()
	parts := []string{fmt.Sprintf("kernel %d ms", last.Milliseconds())}
	for _, s := range steps {
		if err := s.do(); err != nil {
			return strings.Join(parts, ", "), fmt.Errorf("%s: %w", s.name, err)
		}
		at := now()
		parts = append(parts, fmt.Sprintf("%s %d", s.name, (at-last).Milliseconds()))
		last = at
	}
	return strings.Join(parts, ", "), nil
}

// uptime is the time since the kernel began.
func uptime() time.Duration {
	var ts unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &ts); err != nil {
		return 0
	}
	return time.Duration(ts.Nano())
}
