package daemon

import (
	"errors"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// crashEnv makes this test binary crash, in the way it says.
const crashEnv = "BERTH_DAEMON_CRASH"

func TestMain(m *testing.M) {
	switch os.Getenv(crashEnv) {
	case "":
		os.Exit(m.Run())
	case "daemon":
		noCore("test")
	}
	panic("as asked") // GOTRACEBACK=crash ends this with SIGABRT
}

// crash says whether a crash of this binary dumped core.
func crash(t *testing.T, how string) bool {
	t.Helper()
	cmd := exec.Command("sh", "-c", `ulimit -S -c 2048 2>/dev/null; exec "$0"`, os.Args[0])
	cmd.Dir = t.TempDir()
	cmd.Env = append(os.Environ(), crashEnv+"="+how, "GOTRACEBACK=crash")
	err := cmd.Run()
	var exit *exec.ExitError
	if !errors.As(err, &exit) {
		t.Fatalf("it did not crash: %v", err)
	}
	status := exit.Sys().(syscall.WaitStatus)
	if !status.Signaled() || status.Signal() != syscall.SIGABRT {
		t.Fatalf("it ended with %v", err)
	}
	return status.CoreDump()
}

func TestACrashLeavesNoCore(t *testing.T) {
	if crash(t, "daemon") {
		t.Error("a daemon dumped core")
	}
	if !crash(t, "plain") { // its limit, or its pattern, forbids it
		t.Log("nothing dumps core on this computer")
	}
}
