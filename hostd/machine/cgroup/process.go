package cgroup

import (
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// Process is a process in a group, pinned so that its number cannot become
// another's. It need not be this process's child.
type Process struct {
	pid int
	fd  *os.File // a pidfd
}

// Open pins the process pid if it runs and is in the group. Membership is its
// identity: nothing but a machine's processes ever gets into the machine's
// group, so a number reused by another process is seen.
func (h Layout) Open(group string, pid int) (*Process, error) {
	fd, err := unix.PidfdOpen(pid, unix.PIDFD_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("process %d: %w", pid, err)
	}
	p := &Process{pid: pid, fd: os.NewFile(uintptr(fd), "pidfd")}
	if !h.Holds(group, pid) || p.Ended() {
		return nil, errors.Join(fmt.Errorf("process %d is not the machine's", pid), p.fd.Close())
	}
	return p, nil
}

// Wait returns true when the process has exited, false when the pidfd was
// closed. It parks on the runtime's poller: no thread waits.
func (p *Process) Wait() bool {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return false
	}
	return raw.Read(func(fd uintptr) bool { return readable(fd) }) == nil
}

// Reap collects the ended process where it is, or has become, this process's
// child. Elsewhere the host's own first process does.
func (p *Process) Reap() {
	if raw, err := p.fd.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.Waitid(unix.P_PIDFD, int(fd), nil, unix.WEXITED|unix.WNOHANG, nil) // ECHILD: not ours
		})
	}
}

// Ended says whether the process has exited.
func (p *Process) Ended() bool {
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

// Pid is the process's number, its own while it has not been reaped.
func (p *Process) Pid() int { return p.pid }

// Close lets go of the process; a Wait returns false.
func (p *Process) Close() error { return p.fd.Close() }

// Pinned is a child of this process, with the pidfd of its start.
func Pinned(pid, pidfd int) *Process {
	_ = unix.SetNonblock(pidfd, true) // for the runtime's poller
	return &Process{pid: pid, fd: os.NewFile(uintptr(pidfd), "pidfd")}
}

// Kill ends the process; it may have ended already.
func (p *Process) Kill() error {
	raw, err := p.fd.SyscallConn()
	if err != nil {
		return err
	}
	return raw.Control(func(fd uintptr) {
		_ = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) // ESRCH: ended
	})
}
