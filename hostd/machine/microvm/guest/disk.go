package main

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// disk is the machine's only disk.
const disk = "/dev/vda"

// diskWait bounds how long the disk may take to appear after its module.
const diskWait = 20 * time.Second

// mount is one mount(2).
type mount struct {
	kind, target string
	flags        uintptr
	options      string
}

// kernelMounts are needed before there is a disk; they move to its root.
var kernelMounts = []mount{
	{"devtmpfs", "/dev", unix.MS_NOSUID, "mode=0755"},
	{"proc", "/proc", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"sysfs", "/sys", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
}

// restMounts are the others, in the disk's root.
var restMounts = []mount{
	{"devpts", "/dev/pts", unix.MS_NOSUID | unix.MS_NOEXEC, "mode=0620,gid=5,ptmxmode=0666"},
	{"tmpfs", "/dev/shm", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, "mode=1777"},
	{"mqueue", "/dev/mqueue", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
	{"tmpfs", "/run", unix.MS_NOSUID | unix.MS_NODEV, "mode=0755"},
	{"cgroup2", "/sys/fs/cgroup", unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC, ""},
}

func (m mount) at(root string) error {
	target := filepath.Join(root, m.target)
	if err := os.MkdirAll(target, 0o755); err != nil {
		return err
	}
	if err := unix.Mount(m.kind, target, m.kind, m.flags, m.options); err != nil {
		return fmt.Errorf("mount %s at %s: %w", m.kind, target, err)
	}
	return nil
}

func mountKernel() error {
	for _, m := range kernelMounts {
		if err := m.at("/"); err != nil {
			return err
		}
	}
	return nil
}

// loadModules loads what /modules/order names, in that order. IPv6 is turned
// off before there is a network device, which would at once announce itself.
func loadModules() error {
	if err := sysctl("net/ipv6/conf/default/disable_ipv6", "1"); err != nil {
		return err
	}
	order, err := os.ReadFile(filepath.Join(moduleDir, "order"))
	if err != nil {
		return err
	}
	for _, name := range strings.Fields(string(order)) {
		if err := loadModule(filepath.Join(moduleDir, name)); err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return nil
}

func loadModule(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return unix.FinitModule(int(f.Fd()), "", 0)
}

// mountDisk mounts the disk and grows its file system to the size that the
// driver gave the disk. Freed blocks are passed on, so that a disk layer does
// not keep what the session deleted.
func mountDisk() error {
	if err := await(disk, diskWait); err != nil {
		return err
	}
	if err := unix.Mount(disk, newRoot, "ext4", unix.MS_NOATIME, "discard,noinit_itable"); err != nil {
		return fmt.Errorf("mount %s: %w", disk, err)
	}
	return grow(disk, newRoot)
}

// await waits until a device is there.
func await(path string, wait time.Duration) error {
	for deadline := time.Now().Add(wait); ; time.Sleep(2 * time.Millisecond) {
		_, err := os.Stat(path)
		if err == nil || !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("no %s after %s", path, wait)
		}
	}
}

// resizeFS is EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64): the file system's new
// size in blocks.
const resizeFS = 0x40086610

// grow makes the ext4 at root as large as its device.
func grow(device, root string) error {
	dev, err := os.Open(device)
	if err != nil {
		return err
	}
	defer dev.Close()
	var bytes uint64
	if err := ioctl(dev, unix.BLKGETSIZE64, unsafe.Pointer(&bytes)); err != nil {
		return fmt.Errorf("size of %s: %w", device, err)
	}
	dir, err := os.Open(root)
	if err != nil {
		return err
	}
	defer dir.Close()
	var stat unix.Statfs_t
	if err := unix.Fstatfs(int(dir.Fd()), &stat); err != nil {
		return err
	}
	blocks := bytes / uint64(stat.Bsize)
	if err := ioctl(dir, resizeFS, unsafe.Pointer(&blocks)); err != nil {
		return fmt.Errorf("grow to %d blocks: %w", blocks, err)
	}
	return nil
}

func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), request, uintptr(arg)); errno != 0 {
		return errno
	}
	return nil
}

func mountRest() error {
	for _, m := range kernelMounts {
		target := filepath.Join(newRoot, m.target)
		if err := unix.Mount(m.target, target, "", unix.MS_MOVE, ""); err != nil {
			return fmt.Errorf("move %s: %w", m.target, err)
		}
	}
	for _, m := range restMounts {
		if err := m.at(newRoot); err != nil {
			return err
		}
	}
	for name, target := range map[string]string{"fd": "/proc/self/fd", "stdin": "fd/0", "stdout": "fd/1", "stderr": "fd/2"} {
		if err := os.Symlink(target, filepath.Join(newRoot, "dev", name)); err != nil {
			return err
		}
	}
	return nil
}

// layAgent binds the agent into the disk's root, where it takes no room of the
// session's, and reads its arguments.
func layAgent() (args []string, err error) {
	text, err := os.ReadFile(argsFile)
	if err != nil {
		return nil, err
	}
	target := filepath.Join(newRoot, agentPath)
	if err := os.MkdirAll(filepath.Dir(target), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(target, nil, 0o755); err != nil {
		return nil, err
	}
	if err := os.Chmod(agentFile, 0o755); err != nil {
		return nil, err
	}
	if err := unix.Mount(agentFile, target, "", unix.MS_BIND, ""); err != nil {
		return nil, fmt.Errorf("bind %s: %w", target, err)
	}
	return parseArgs(text), nil
}

// parseArgs splits arguments at zero bytes; the last may or may not end in one.
func parseArgs(text []byte) []string {
	text = bytes.TrimSuffix(text, []byte{0})
	if len(text) == 0 {
		return nil
	}
	return strings.Split(string(text), "\x00")
}

// switchRoot makes the disk's root the root, and frees the memory of what is
// not needed again in the initramfs. The agent stays: it is bound.
func switchRoot() error {
	for _, path := range []string{moduleDir, argsFile, "/init"} {
		if err := os.RemoveAll(path); err != nil {
			return err
		}
	}
	if err := os.Chdir(newRoot); err != nil {
		return err
	}
	if err := unix.Mount(".", "/", "", unix.MS_MOVE, ""); err != nil {
		return fmt.Errorf("move the root: %w", err)
	}
	if err := unix.Chroot("."); err != nil {
		return fmt.Errorf("chroot: %w", err)
	}
	return os.Chdir("/")
}
