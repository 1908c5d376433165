package oci

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/agentlink"
)

// Names inside a machine's folder. disk and the lowers are mount
// points used in the machine's own mount namespace only; from the host's they
// look empty.
const (
	diskImage  = "disk.img" // unlinked as soon as it is mounted
	diskDir    = "disk"
	lowerBase  = "lower-base"
	lowerAgent = "lower-agent"
	consoleLog = "console.log" // on the disk, outside the guest's view: its size is the guest's
)

// rootPoint picks a folder that roots are mounted over. It has to be one that
// anybody may enter, since runc looks the root up as the machine's own root,
// who is nobody here: below Home that would take every folder on the way to be
// open. No one sees the mount, but the folder must hide nothing that runc needs.
func rootPoint(needed ...string) (string, error) {
	candidates := []string{"/mnt", "/media", "/srv", "/opt"}
	for _, point := range candidates {
		info, err := os.Lstat(point)
		hides := slices.ContainsFunc(needed, func(path string) bool { return strings.HasPrefix(path+"/", point+"/") })
		if err == nil && info.IsDir() && info.Mode()&1 != 0 && !hides {
			return point, nil
		}
	}
	return "", fmt.Errorf("none of %v is an open folder that does not hold the driver's own folders", candidates)
}

// mountRoot builds the machine's root at d.root. It runs in a mount namespace
// of its own with the machine's folder as working directory: paths stay short
// and free of characters that overlay's options give a meaning to.
func (d *Driver) mountRoot(spec machine.Spec, ns *os.File) error {
	for _, dir := range []string{diskDir, lowerBase, lowerAgent} {
		if err := os.Mkdir(dir, 0o700); err != nil {
			return err
		}
	}
	if err := d.mountDisk(spec.DiskBytes); err != nil {
		return fmt.Errorf("disk: %w", err)
	}
	if err := layUpper(filepath.Join(diskDir, "upper"), int(spec.Slot.UIDBase)); err != nil {
		return fmt.Errorf("upper layer: %w", err)
	}
	if err := mountIDMapped(d.cfg.ImageBase, lowerBase, ns); err != nil {
		return fmt.Errorf("image: %w", err)
	}
	if err := mountIDMapped(d.cfg.AgentLayer, lowerAgent, ns); err != nil {
		return fmt.Errorf("agent layer: %w", err)
	}
	// volatile: the disk dies with the machine, so a guest's fsync need not
	// reach the host's.
	options := fmt.Sprintf("lowerdir=%s:%s,upperdir=%s/upper,workdir=%s/work,volatile", lowerAgent, lowerBase, diskDir, diskDir)
	if err := unix.Mount("overlay", d.root, "overlay", unix.MS_NODEV, options); err != nil {
		return fmt.Errorf("overlay: %w", err)
	}
	// overlay keeps clones of its lowers.
	for _, dir := range []string{lowerAgent, lowerBase} {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			return fmt.Errorf("unmount %s: %w", dir, err)
		}
	}
	return nil
}

// mountDisk mounts a fresh ext4 of the given size at disk. Its file has no
// name afterwards, so it goes with the mount.
func (d *Driver) mountDisk(size int64) error {
	template, err := d.templateOf(size)
	if err != nil {
		return err
	}
	if err := copySparse(diskImage, template); err != nil {
		return err
	}
	dev, err := attachLoop(diskImage)
	if err != nil {
		return err
	}
	defer dev.Close()
	if err := os.Remove(diskImage); err != nil {
		return err
	}
	// The host runs nothing from it; the guest's view of it is overlay's, with flags of its own.
	flags := uintptr(unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC | unix.MS_NOATIME)
	if err := unix.Mount(dev.Name(), diskDir, "ext4", flags, "noinit_itable"); err != nil {
		return fmt.Errorf("mount %s: %w", dev.Name(), err)
	}
	return nil
}

// layUpper makes overlay's upper and work folders and in the upper what is the
// machine's own: identity, names, resolver, workspace. base is the host's id
// of the guest's root. The folder is fresh: no guest has been in it.
func layUpper(upper string, base int) error {
	work := filepath.Join(filepath.Dir(upper), "work")
	var id [16]byte
	_, _ = rand.Read(id[:]) // never fails (crypto/rand)
	user := base + agentlink.UserUID
	errs := []error{
		makeOwned(upper, base, 0o755),
		makeOwned(work, base, 0o700),
		makeOwned(filepath.Join(upper, "etc"), base, 0o755),
		makeOwned(filepath.Join(upper, agentlink.Workspace), user, 0o755),
	}
	files := map[string]string{
		"etc/machine-id":  hex.EncodeToString(id[:]) + "\n",
		"etc/hostname":    hostname + "\n",
		"etc/hosts":       "127.0.0.1\tlocalhost " + hostname + "\n::1\tlocalhost ip6-localhost ip6-loopback\n",
		"etc/resolv.conf": "nameserver " + agentlink.SlotAddr + "\n",
	}
	for name, text := range files {
		path := filepath.Join(upper, name)
		errs = append(errs, os.WriteFile(path, []byte(text), 0o644), os.Chown(path, base, base))
	}
	return errors.Join(errs...)
}

func makeOwned(dir string, id int, mode os.FileMode) error {
	if err := os.Mkdir(dir, mode); err != nil {
		return err
	}
	return errors.Join(os.Chmod(dir, mode), os.Chown(dir, id, id))
}
