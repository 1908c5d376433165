package machinetest

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
)

var layer struct {
	once sync.Once
	dir  string
	err  error
}

// guestLayer builds the suite's agent once a test binary and gives the folder
// to lay over the image. It stays for the binary's life; Main removes it.
func guestLayer(t testing.TB) string {
	t.Helper()
	layer.once.Do(func() {
		if layer.dir, layer.err = os.MkdirTemp("", "machinetest-layer-"); layer.err != nil {
			return
		}
		if layer.err = os.Chmod(layer.dir, 0o755); layer.err != nil { // it becomes the guest's /
			return
		}
		build := exec.Command("go", "build", "-o", filepath.Join(layer.dir, "usr/lib/berth/agent"),
			"github.com/berth-dev/berth/hostd/machine/machinetest/guest")
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		build.Stderr = os.Stderr
		layer.err = build.Run()
	})
	if layer.err != nil {
		t.Fatalf("build the guest: %v", layer.err)
	}
	return layer.dir
}

// Main runs a test binary's tests and removes what they shared. It must be the
// binary's TestMain: the suite also starts the binary as a host that crashes.
// The tests fail when one of the checks that run after them does.
func Main(m *testing.M, s Subject, after ...func() error) {
	if text := os.Getenv(crashEnv); text != "" {
		var c crash
		if err := json.Unmarshal([]byte(text), &c); err != nil {
			panic(err)
		}
		crashNow(s, c)
	}
	// Machines' first processes become this process's when runc has left, and
	// need not wait for a first process of the host that is in no hurry.
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		panic(err)
	}
	code := m.Run()
	for _, check := range after {
		if err := check(); err != nil && code == 0 {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}
	if layer.dir != "" {
		_ = os.RemoveAll(layer.dir)
	}
	os.Exit(code)
}
