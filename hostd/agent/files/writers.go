package files

import (
	"bufio"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/hostd/agent/procfs"
)

// writers says whether any process of the machine has the file open for
// writing. Files are compared by inode, since names change; a process that
// ends meanwhile has nothing open.
func writers(info fs.FileInfo) bool {
	file := info.Sys().(*syscall.Stat_t)
	for _, pid := range procfs.PIDs() {
		found := false
		procfs.AsOwner(pid, func() { found = writes(pid, file) })
		if found {
			return true
		}
	}
	return false
}

func writes(pid int, file *syscall.Stat_t) bool {
	dir, err := os.Open(procfs.Path(pid, "fd"))
	if err != nil {
		return false
	}
	defer dir.Close()
	fds, _ := dir.Readdirnames(-1)
	for _, fd := range fds {
		var st syscall.Stat_t
		if syscall.Stat(procfs.Path(pid, "fd/"+fd), &st) == nil && st.Ino == file.Ino && st.Dev == file.Dev &&
			writable(procfs.Path(pid, "fdinfo/"+fd)) {
			return true
		}
	}
	return false
}

// writable reads the octal flags of an fdinfo file (proc_pid_fdinfo(5)).
func writable(fdinfo string) bool {
	file, err := os.Open(fdinfo)
	if err != nil {
		return false
	}
	defer file.Close()
	for lines := bufio.NewScanner(file); lines.Scan(); {
		if value, ok := strings.CutPrefix(lines.Text(), "flags:"); ok {
			flags, err := strconv.ParseInt(strings.TrimSpace(value), 8, 64)
			return err == nil && flags&syscall.O_ACCMODE != syscall.O_RDONLY
		}
	}
	return false
}
