package oci

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// process0 is the first process of a machine. It need not be hostd's child.
type process0 struct {
	pid int
	fd  *os.File // a pidfd
}

// openProcess pins the process pid if it runs and is in the group. Membership
// is its identity: nothing but the machine's processes ever gets into a
// machine's cgroup, so a number reused by another process is seen.
func (h hierarchies) openProcess(group string, pid int) (*process0, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	p := &process0{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd")}
	if !h.holds(group, pid) || p.ended() {
		return nil, errors.Join(fmt.Errorf("process %d is not the machine's", pid), p.fd.Close())
	}
	return p, nil
}

// wait returns true when the process has exited, false when the pidfd was
// closed. It parks on the runtime's poller: no thread waits.
func (p *process0) wait() bool {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return false
	}
	return raw.Read(func(fd uintptr) bool { return readable(fd) }) == nil
}

// reap collects the ended process where it has become hostd's child: where
// hostd is a container's first process, or a subreaper. Elsewhere the host's
// own first process does.
func (p *process0) reap() {
	if raw, err := p.fd.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.Waitid(unix.P_PIDFD, int(fd), nil, unix.WEXITED|unix.WNOHANG, nil) // ECHILD: not ours
		})
	}
}

func (p *process0) ended() bool {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return true
	}
	ended := false
	return raw.Control(func(fd uintptr) { ended = readable(fd) }) != nil || ended
}

// readable: a pidfd is when its process has ended, reaped or not (pidfd_open(2)).
func readable(fd uintptr) bool {
	polls := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
	n, err := unix.Poll(polls, 0)
	return err == nil && n == 1
}
