package identity

import (
	"bytes"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// own is set for the copy of this program that has mounts of its own.
const own = "BERTH_IDENTITY_OWN"

func TestNew(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can mount")
	}
	if os.Getenv(own) == "" {
		cmd := exec.Command("/proc/self/exe", "-test.run=^TestNew$", "-test.v")
		cmd.Env = append(os.Environ(), own+"=1")
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	if err := unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, ""); err != nil {
		t.Fatal(err)
	}
	root, state := t.TempDir(), t.TempDir()
	boot := "proc/sys/kernel/random/boot_id"
	for _, name := range []string{"etc/machine-id", boot} {
		if err := errors.Join(os.MkdirAll(filepath.Dir(filepath.Join(root, name)), 0o755), os.WriteFile(filepath.Join(root, name), []byte("old\n"), 0o444)); err != nil {
			t.Fatal(err)
		}
	}
	seen := map[string]bool{"old\n": true}
	for range 3 {
		if err := New(t.Context(), root, state); err != nil {
			t.Fatal(err)
		}
		for name, form := range map[string]string{"etc/machine-id": `^[0-9a-f]{32}\n$`, boot: `^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\n$`} {
			b, err := os.ReadFile(filepath.Join(root, name))
			if err != nil || !regexp.MustCompile(form).Match(b) || seen[string(b)] {
				t.Errorf("%s = %q, %v", name, b, err)
			}
			seen[string(b)] = true
		}
	}
	if mounts, _ := os.ReadFile("/proc/self/mounts"); strings.Count(string(mounts), boot) > strings.Count(string(mounts), root) || strings.Count(string(mounts), root) != 1 {
		t.Errorf("mounts:\n%s", mounts)
	}
	if _, err := os.Stat(filepath.Join(root, "var")); err == nil {
		t.Error("files were made that were not there")
	}
	_ = unix.Unmount(filepath.Join(root, boot), 0)
}

func TestSetClock(t *testing.T) {
	var out bytes.Buffer
	log := slog.New(slog.NewTextHandler(&out, nil))
	now := time.Now()
	if err := SetClock(now.Add(2*time.Millisecond), now, log); err != nil || out.Len() > 0 {
		t.Errorf("a clock that is right: %v, %s", err, &out)
	}
	if err := SetClock(time.Time{}, now, log); err == nil {
		t.Error("no time was taken")
	}
}

// TestSetClockWithoutTheRight: a difference is logged, a small one is not.
func TestSetClockWithoutTheRight(t *testing.T) {
	if os.Getuid() == 0 {
		if os.Getenv(own) == "" {
			cmd := exec.Command("/proc/self/exe", "-test.run=^TestSetClockWithoutTheRight$", "-test.v")
			cmd.Env = append(os.Environ(), own+"=1")
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS") {
				t.Fatalf("%v\n%s", err, out)
			}
			return
		}
		t.Fatal("still root")
	}
	for by, logged := range map[time.Duration]bool{20 * time.Millisecond: false, time.Hour: true, -time.Hour: true} {
		var out bytes.Buffer
		now := time.Now()
		if err := SetClock(now.Add(by), now, slog.New(slog.NewTextHandler(&out, nil))); err != nil || (out.Len() > 0) != logged {
			t.Errorf("%v: %v, %q", by, err, &out)
		}
	}
}

func TestAddEntropy(t *testing.T) {
	if AddEntropy(make([]byte, MinEntropy-1)) == nil || AddEntropy(make([]byte, maxEntropy+1)) == nil {
		t.Error("too little or too much was taken")
	}
	if err := AddEntropy(bytes.Repeat([]byte{7}, MinEntropy)); err != nil { // more can only help the host
		t.Error(err)
	}
}
