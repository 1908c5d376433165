package microvm

import (
	"context"
	"errors"
	"os"
	"testing"
	"time"
)

// filesEnv names the folder that scripts/image/vm.sh prints.
const filesEnv = "BERTH_VM_FILES"

// testDriver makes a driver in folders of the test's.
func testDriver(t *testing.T, ready func(context.Context, Dial) error) *Driver {
	t.Helper()
	boot := os.Getenv(filesEnv)
	if boot == "" || os.Geteuid() != 0 {
		missing := "needs root and " + filesEnv + " (made by scripts/image/vm.sh)"
		if os.Getenv("CI") == "true" {
			t.Fatal(missing)
		}
		t.Skip(missing)
	}
	dir := t.TempDir()
	d, err := New(Config{Home: dir + "/home", Cache: dir + "/cache", Boot: boot, AgentLayer: dir, Accel: TCG, Ready: ready})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := d.Sweep(context.Background(), func(string) bool { return false }); err != nil {
			t.Error(err)
		}
		if err := d.Close(); err != nil {
			t.Error(err)
		}
	})
	return d
}

// TestTrial runs under emulation what decides about KVM.
func TestTrial(t *testing.T) {
	d := testDriver(t, func(context.Context, Dial) error { return nil })
	begin := time.Now()
	if err := d.trial(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Logf("first %v", time.Since(begin))
	begin = time.Now()
	if err := d.trial(t.Context()); err != nil || time.Since(begin) > time.Second {
		t.Errorf("tried again: %v after %v", err, time.Since(begin))
	}
	left, err := d.known()
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

// TestTrialOfADeadGuest: a guest that does not come to life is given up.
func TestTrialOfADeadGuest(t *testing.T) {
	d := testDriver(t, func(context.Context, Dial) error { return nil })
	ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if err := d.runTrial(ctx); err == nil {
		t.Error("took a guest that did not end for a good one")
	}
}

// TestTrialWithKVM: whether this computer's KVM works or only pretends to, the
// trial tells, and QEMU gets as far as having it.
func TestTrialWithKVM(t *testing.T) {
	if _, err := os.Stat("/dev/kvm"); err != nil {
		t.Log("no /dev/kvm here")
		return
	}
	d := testDriver(t, func(context.Context, Dial) error { return nil })
	d.accel.name = KVM
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	err := d.runTrial(ctx)
	t.Logf("trial: %v", err)
	if err != nil && !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("not for want of time: %v", err)
	}
}
