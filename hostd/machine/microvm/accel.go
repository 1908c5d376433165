package microvm

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// Accelerators that Config.Accel names.
const (
	Auto = "auto" // KVM, which must work
	KVM  = "kvm"
	TCG  = "tcg" // emulation: ten times slower and more, and no hardware between machines
)

// accelerator is what runs the guest's instructions. Immutable.
type accelerator struct {
	name string // KVM or TCG
	khz  int64  // of the time stamp counter
}

// codeCache bounds what emulation keeps of translated code, MiB.
const codeCache = 256

func (a accelerator) args() string {
	if a.name == KVM {
		return "kvm"
	}
	return fmt.Sprintf("tcg,thread=multi,tb-size=%d", codeCache)
}

func (a accelerator) cpu() string {
	if a.name == KVM {
		return "host,migratable=on"
	}
	return "max"
}

// params are kernel parameters. Emulation has no timer against which a kernel
// could measure the counter: it is told.
func (a accelerator) params() string {
	if a.name == KVM {
		return ""
	}
	return fmt.Sprintf(" tsc_early_khz=%d tsc=reliable lpj=4000000 no_timer_check", a.khz)
}

// overhead is what QEMU needs beside the guest's memory, bytes.
func (a accelerator) overhead() int64 {
	if a.name == KVM {
		return 256 << 20
	}
	return (256 + codeCache) << 20
}

// processor is what the guest sees of the processor: under emulation QEMU's
// own, whatever the host has.
func (a accelerator) processor() (string, error) {
	if a.name == TCG {
		return "max", nil
	}
	info, err := os.ReadFile("/proc/cpuinfo")
	if err != nil {
		return "", err
	}
	h := sha256.New()
	first, _, _ := bytes.Cut(info, []byte("\n\n"))
	for line := range strings.Lines(string(first)) {
		name, _, _ := strings.Cut(line, "\t")
		if slices.Contains([]string{"vendor_id", "cpu family", "model", "model name", "stepping", "flags"}, name) {
			h.Write([]byte(line))
		}
	}
	return fmt.Sprintf("host-%x", h.Sum(nil)[:8]), nil
}

// rate is measured once: every Driver of the process has the same.
var rate = sync.OnceValue(tscKHz)

// pickAccelerator decides by name and by what the processor says of itself;
// whether KVM runs a guest is for Check to try.
func pickAccelerator(name string) (accelerator, error) {
	if runtime.GOARCH != "amd64" {
		return accelerator{}, fmt.Errorf("the driver knows x86-64 only, this is %s", runtime.GOARCH)
	}
	switch name {
	case Auto, KVM, "":
		if err := virtualisation("/proc/cpuinfo"); err != nil {
			return accelerator{}, err
		}
		return accelerator{KVM, rate()}, nil
	case TCG:
		return accelerator{TCG, rate()}, nil
	}
	return accelerator{}, fmt.Errorf("accelerator %q: want auto, kvm or tcg", name)
}

// virtualisation says whether the processor can run guests. /dev/kvm alone does
// not: there are hosts whose KVM opens, makes a machine and never gets it past
// its first instructions.
func virtualisation(cpuinfo string) error {
	info, err := os.ReadFile(cpuinfo)
	if err != nil {
		return err
	}
	for line := range strings.Lines(string(info)) {
		name, flags, _ := strings.Cut(line, ":")
		if strings.TrimSpace(name) != "flags" {
			continue
		}
		if f := strings.Fields(flags); slices.Contains(f, "vmx") || slices.Contains(f, "svm") {
			return nil
		}
		return errors.New("the processor offers no hardware virtualisation here (neither vmx nor svm): turn it on in the firmware " +
			"or choose a computer that has it; accelerator tcg emulates, for tests")
	}
	return fmt.Errorf("no flags in %s", cpuinfo)
}

var qemuVersion = regexp.MustCompile(`^QEMU emulator version (\d+)\.(\d+)[^\n]*`)

// versionOf is QEMU's first line about itself, which names its build.
func versionOf(ctx context.Context, qemu string) (string, error) {
	out, err := exec.CommandContext(ctx, qemu, "--version").Output()
	if err != nil {
		return "", fmt.Errorf("%s does not run (%w): apt-get install qemu-system-x86", qemu, err)
	}
	line := qemuVersion.FindString(string(out))
	if line == "" {
		return "", fmt.Errorf("%s says %q of itself, not its version", qemu, strings.TrimSpace(string(out)))
	}
	return strings.TrimPrefix(line, "QEMU emulator version "), nil
}
