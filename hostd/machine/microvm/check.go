package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// Check looks for all that the driver needs and reports everything missing at
// once, each with what to do about it. Under KVM it runs a trial guest.
func (d *Driver) Check(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return errors.New("the microvm driver needs root: run hostd as root")
	}
	if err := errors.Join(d.checkFiles(), d.checkKernel()); err != nil {
		return err
	}
	if d.accel.name == KVM {
		return d.trial(ctx)
	}
	return nil
}

func (d *Driver) checkFiles() error {
	var errs []error
	for _, name := range []string{"vmlinuz", "initrd", "disk.ext4"} {
		if _, err := os.Stat(d.bootFile(name)); err != nil {
			errs = append(errs, fmt.Errorf("no %s in %s: build it with scripts/image/vm.sh", name, d.cfg.Boot))
		}
	}
	if info, err := os.Stat(d.agentFile()); err != nil || info.Mode()&0o111 == 0 {
		errs = append(errs, fmt.Errorf("no agent at %s: build it there", d.agentFile()))
	}
	if _, err := os.Stat(d.qemuImg()); err != nil {
		errs = append(errs, fmt.Errorf("no %s: apt-get install qemu-utils", d.qemuImg()))
	}
	return errors.Join(errs...)
}

func (d *Driver) checkKernel() error {
	var errs []error
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		errs = append(errs, errors.New("no /dev/net/tun: modprobe tun"))
	}
	for _, controller := range []string{"memory", "pids", "cpu"} {
		if !d.groups.Has(controller) {
			errs = append(errs, fmt.Errorf("cgroup controller %s is not available: enable it on the kernel command line", controller))
		}
	}
	return errors.Join(errs...)
}
