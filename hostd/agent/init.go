package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/sys/unix"
)

// runInit is process 1 of the machine. It runs the agent proper as its child
// and does nothing but reap: orphans become process 1's children, so the agent
// never meets a child that is not its own, and os/exec can wait in peace. It
// returns the exit status of the agent, with which the machine ends.
func runInit() (int, error) {
	holdSignals()
	self, err := os.Executable()
	if err != nil {
		return 0, fmt.Errorf("init: %w", err)
	}
	listener := os.NewFile(listenFD, "listener")
	child, err := os.StartProcess(self, os.Args, &os.ProcAttr{
		Env:   os.Environ(),
		Files: []*os.File{os.Stdin, os.Stdout, os.Stderr, listener},
	})
	if err != nil {
		return 0, fmt.Errorf("init: %w", err)
	}
	_ = listener.Close() // the agent's alone
	return reap(child.Pid)
}

// reap collects every child until main has ended.
func reap(main int) (int, error) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		switch {
		case err == syscall.EINTR:
		case err != nil:
			return 0, fmt.Errorf("reap: %w", err)
		case pid == main && status.Signaled():
			return 128 + int(status.Signal()), nil
		case pid == main:
			return status.ExitStatus(), nil
		}
	}
}

// holdSignals takes the signals whose default would end the process: a
// machine is ended from outside, never by a kill inside. They are caught, not
// ignored, because children inherit what is ignored.
func holdSignals() {
	signal.Notify(make(chan os.Signal, 1),
		syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM,
		syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGALRM, syscall.SIGPIPE)
}

// harden keeps others in the machine from tracing this process or reading its
// memory, and its environment from reaching what it starts.
func harden() error {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return fmt.Errorf("harden: %w", err)
	}
	os.Clearenv()
	return os.Setenv("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
}
