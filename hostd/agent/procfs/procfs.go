// Package procfs looks into other processes of the machine by /proc.
//
// The agent is root in a machine that has no CAP_SYS_PTRACE, and then root may
// not read another user's environment or descriptors: ptrace(2), "Ptrace access
// mode checking", wants the file system ids of the reader to be the process's
// own. So the reading thread takes them for that moment.
package procfs

import (
	"os"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"
)

// Path is a file of a process, such as its "fd" folder.
func Path(pid int, name string) string { return "/proc/" + strconv.Itoa(pid) + "/" + name }

// PIDs lists the machine's processes but this one.
func PIDs() []int {
	dir, err := os.Open("/proc")
	if err != nil {
		return nil
	}
	defer dir.Close()
	names, _ := dir.Readdirnames(-1)
	pids := make([]int, 0, len(names))
	for _, name := range names {
		if pid, err := strconv.Atoi(name); err == nil && pid != os.Getpid() {
			pids = append(pids, pid)
		}
	}
	return pids
}

// AsOwner calls f with the file system ids of the process. f must not start
// goroutines that read on its behalf. Where the ids cannot be taken f runs
// without them, and what it may not read is refused to it.
func AsOwner(pid int, f func()) {
	uid, gid, ok := owner(pid)
	if !ok || os.Geteuid() != 0 || uid == 0 && gid == 0 {
		f()
		return
	}
	runtime.LockOSThread()
	// In this order, both ways: CAP_SETGID goes with neither.
	_ = unix.Setfsgid(gid)
	_ = unix.Setfsuid(uid)
	defer func() {
		_ = unix.Setfsuid(0)
		_ = unix.Setfsgid(0)
		if now, _ := unix.SetfsuidRetUid(-1); now == 0 {
			runtime.UnlockOSThread()
		} // else the thread is never given to other work
	}()
	f()
}

// owner is who a process's files in /proc belong to: its effective ids, or
// root's when it may not be looked into at all.
func owner(pid int) (uid, gid int, ok bool) {
	var st syscall.Stat_t
	if syscall.Stat("/proc/"+strconv.Itoa(pid), &st) != nil {
		return 0, 0, false
	}
	return int(st.Uid), int(st.Gid), true
}
