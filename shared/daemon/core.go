package daemon

import (
	"fmt"
	"os"
	"syscall"
)

// noCore keeps what is in this process's memory, secrets among it, out of core
// files, and out of those that are given to a program that obeys the limit, as
// systemd-coredump does. What the daemon starts inherits that, and may raise its
// own limit again.
func noCore(name string) {
	var limit syscall.Rlimit
	err := syscall.Getrlimit(syscall.RLIMIT_CORE, &limit)
	if err == nil {
		limit.Cur = 0
		err = syscall.Setrlimit(syscall.RLIMIT_CORE, &limit)
	}
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: a crash may leave a core file: %v\n", name, err)
	}
}
