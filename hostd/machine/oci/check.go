package oci

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Check looks for all that the driver needs and reports everything missing at
// once, each with what to do about it. It changes nothing.
func (d *Driver) Check(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("the oci driver needs root: run hostd as root")
	}
	return errors.Join(d.checkPrograms(ctx), d.checkImage(), d.checkKernel())
}

func (d *Driver) checkPrograms(ctx context.Context) error {
	var errs []error
	for _, name := range []string{"mkfs.ext4", "cat"} {
		if _, err := exec.LookPath(name); err != nil {
			errs = append(errs, fmt.Errorf("%s is missing: apt-get install e2fsprogs coreutils", name))
		}
	}
	out, err := exec.CommandContext(ctx, d.cfg.Runc, "--version").Output()
	switch {
	case err != nil:
		errs = append(errs, fmt.Errorf("runc is missing or does not run (%w): apt-get install runc", err))
	case !newEnough(string(out)):
		errs = append(errs, fmt.Errorf("runc is too old, want 1.1 or newer: %s", strings.TrimSpace(string(out))))
	}
	return errors.Join(errs...)
}

var runcVersion = regexp.MustCompile(`(?m)^runc version (\d+)\.(\d+)`)

// newEnough reads the output of runc --version.
func newEnough(out string) bool {
	m := runcVersion.FindStringSubmatch(out)
	if m == nil {
		return false
	}
	major, err1 := strconv.Atoi(m[1])
	minor, err2 := strconv.Atoi(m[2])
	return err1 == nil && err2 == nil && (major > 1 || major == 1 && minor >= 1)
}

func (d *Driver) checkImage() error {
	var errs []error
	if info, err := os.Stat(filepath.Join(d.cfg.ImageBase, "etc")); err != nil || !info.IsDir() {
		errs = append(errs, fmt.Errorf("no guest image in %s: build it with scripts/image", d.cfg.ImageBase))
	}
	agent := filepath.Join(d.cfg.AgentLayer, agentPath)
	if info, err := os.Stat(agent); err != nil || info.Mode()&0o111 == 0 {
		errs = append(errs, fmt.Errorf("no agent at %s: build it there", agent))
	}
	return errors.Join(errs...)
}

func (d *Driver) checkKernel() error {
	var errs []error
	if known, err := os.ReadFile("/proc/filesystems"); err != nil || !bytes.Contains(known, []byte("\toverlay\n")) {
		errs = append(errs, errors.New("the kernel has no overlay file system: modprobe overlay"))
	}
	if err := unix.Access("/dev/loop-control", unix.R_OK|unix.W_OK); err != nil {
		errs = append(errs, errors.New("no /dev/loop-control: modprobe loop"))
	}
	for knob, bad := range map[string]string{
		"/proc/sys/user/max_user_namespaces":                         "0",
		"/proc/sys/kernel/unprivileged_userns_clone":                 "0", // Debian: Chrome inside makes its own
		"/proc/sys/kernel/apparmor_restrict_unprivileged_userns":     "1", // Ubuntu
		"/proc/sys/kernel/apparmor_restrict_unprivileged_unconfined": "1",
	} {
		if value, err := os.ReadFile(knob); err == nil && strings.TrimSpace(string(value)) == bad {
			errs = append(errs, fmt.Errorf("%s is %s, which forbids user namespaces that machines need: change it with sysctl", knob, bad))
		}
	}
	for _, controller := range []string{"memory", "pids", "cpu"} {
		if !d.groups.Has(controller) {
			errs = append(errs, fmt.Errorf("cgroup controller %s is not available: enable it on the kernel command line", controller))
		}
	}
	return errors.Join(append(errs, d.checkIDMap())...)
}

// checkIDMap tries an idmapped mount of the image without attaching it.
func (d *Driver) checkIDMap() error {
	ns, err := newUserNamespace(idRange)
	if err != nil {
		return fmt.Errorf("cannot make a user namespace: %w", err)
	}
	defer ns.Close()
	for _, dir := range []string{d.cfg.ImageBase, d.cfg.AgentLayer} {
		if _, err := os.Stat(dir); err != nil {
			continue // checkImage says so
		}
		fd, err := idMapped(dir, ns)
		if err != nil {
			return fmt.Errorf("the file system below %s cannot be id-mapped (%w): use Linux 5.19 or newer and ext4, xfs or btrfs", dir, err)
		}
		_ = unix.Close(fd)
	}
	return nil
}
