// Package procfstest runs tests again as the agent runs in a machine: as root
// without CAP_SYS_PTRACE, which whoever is root on a host has.
package procfstest

import (
	"os"
	"os/exec"
	"testing"

	"golang.org/x/sys/unix"
)

const inside = "BERTH_TEST_WITHOUT_PTRACE"

// WithoutPtrace runs those tests of the calling test's binary that pattern
// names in a process without the capability. It skips where this one has none
// to lose.
func WithoutPtrace(t *testing.T, pattern string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root has the capability to lose")
	}
	cmd := exec.Command("setpriv", "--bounding-set=-sys_ptrace", "--inh-caps=-sys_ptrace", os.Args[0], "-test.run="+pattern, "-test.v")
	cmd.Env = append(os.Environ(), inside+"=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}

// Check fails the test binary if it should lack the capability and has it.
// TestMain calls it.
func Check() {
	if os.Getenv(inside) == "" {
		return
	}
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil || data[0].Effective&(1<<unix.CAP_SYS_PTRACE) != 0 {
		println("the process still has CAP_SYS_PTRACE")
		os.Exit(1)
	}
}
