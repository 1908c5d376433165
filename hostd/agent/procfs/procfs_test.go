package procfs_test

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/agent/procfs"
	"github.com/berth-dev/berth/hostd/agent/procfs/procfstest"
)

func TestMain(m *testing.M) {
	procfstest.Check()
	os.Exit(m.Run())
}

// TestAsOwner reads another user's environment, and is itself again after.
func TestAsOwner(t *testing.T) {
	cmd := exec.Command("cat")
	in, _ := cmd.StdinPipe()
	cmd.Env = []string{"SEEN=1"}
	if os.Getuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 1000, Gid: 900}}
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cmd.Wait() }()
	defer in.Close()
	if !slices.Contains(procfs.PIDs(), cmd.Process.Pid) || slices.Contains(procfs.PIDs(), os.Getpid()) {
		t.Error("PIDs lacks a child, or lists this process")
	}
	var env []byte
	var err error
	procfs.AsOwner(cmd.Process.Pid, func() { env, err = os.ReadFile(procfs.Path(cmd.Process.Pid, "environ")) })
	if err != nil || !strings.Contains(string(env), "SEEN=1") {
		t.Errorf("environ: %q, %v", env, err)
	}
	if uid, _ := unix.SetfsuidRetUid(-1); uid != os.Getuid() {
		t.Errorf("file system uid afterwards: %d", uid)
	}
	ran := false
	procfs.AsOwner(1<<30, func() { ran = true })
	if !ran {
		t.Error("f was not called for a process that is gone")
	}
}

func TestAsInAMachine(t *testing.T) { procfstest.WithoutPtrace(t, "^TestAsOwner$") }
