package main

import (
	"errors"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// asInit, in the environment, makes the test binary a process 1 under test.
const asInit = "BERTH_TEST_AS_INIT"

func init() {
	if os.Getenv(asInit) == "" || os.Getpid() != 1 {
		return
	}
	if err := errors.Join(
		syscall.Mount("", "/", "", syscall.MS_REC|syscall.MS_PRIVATE, ""),
		syscall.Mount("proc", "/proc", "proc", 0, ""),
	); err != nil {
		os.Exit(97)
	}
	// The child orphans a process that outlives its parent, then ends with 7.
	child, err := os.StartProcess("/bin/sh", []string{"sh", "-c", `(sleep 0.1 &); sleep 0.4; ps -e -o pid=,ppid=,stat=; exit 7`},
		&os.ProcAttr{Files: []*os.File{nil, os.Stdout, os.Stderr}, Env: []string{"PATH=/usr/bin:/bin"}})
	if err != nil {
		os.Exit(99)
	}
	status, err := reap(child.Pid)
	if err != nil {
		os.Exit(98)
	}
	os.Exit(status)
}

func TestInitReapsOrphansAndEndsWithTheAgent(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can make a process namespace")
	}
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = []string{asInit + "=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID | syscall.CLONE_NEWNS}
	out, _ := cmd.CombinedOutput()
	if code := cmd.ProcessState.ExitCode(); code != 7 {
		t.Fatalf("init ended with %d, want the agent's 7: %s", code, out)
	}
	if !strings.Contains(string(out), " 1 ") {
		t.Fatalf("ps says nothing of process 1's children: %q", out)
	}
	for line := range strings.Lines(string(out)) {
		if f := strings.Fields(line); len(f) == 3 && strings.HasPrefix(f[2], "Z") && f[1] == "1" {
			t.Errorf("a zombie is left: %s", line)
		}
	}
}

func TestParse(t *testing.T) {
	c, err := parse([]string{"--kind", "shell", "--workspace", "/w"})
	if err != nil || c.kind != "shell" || c.workspace != "/w" {
		t.Errorf("parse = %+v, %v", c, err)
	}
	if _, err := parse([]string{"--kind", "car"}); err == nil || !strings.Contains(err.Error(), "--kind") {
		t.Errorf("a wrong kind: %v", err)
	}
}
