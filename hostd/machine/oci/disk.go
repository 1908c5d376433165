package oci

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	templateDir = ".templates" // below Home; no machine id begins with a dot
	minDisk     = 32 << 20     // bytes; less leaves ext4 no room
)

// template gives the path of an empty ext4 file system of the given size,
// made once: mkfs costs 30 ms and more, a copy of its few blocks a tenth.
func (d *Driver) templateOf(size int64) (string, error) {
	path := filepath.Join(d.cfg.Home, templateDir, fmt.Sprintf("ext4-%d.img", size))
	d.template.Lock()
	defer d.template.Unlock()
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	half := path + ".tmp"
	f, err := os.OpenFile(half, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	err = errors.Join(f.Truncate(size), f.Close())
	if err == nil {
		// No journal: the disk never outlives a crash of the host.
		// assume_storage_prezeroed: a sparse file is zero, so nothing has to
		// zero inode tables later.
		out, mkfs := exec.Command("mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0",
			"-O", "^has_journal,^resize_inode,^metadata_csum",
			"-E", "assume_storage_prezeroed=1,nodiscard,root_owner=0:0", half).CombinedOutput()
		if mkfs != nil {
			err = fmt.Errorf("mkfs.ext4: %w: %s", mkfs, strings.TrimSpace(string(out)))
		}
	}
	if err == nil {
		err = os.Rename(half, path)
	}
	if err != nil {
		return "", errors.Join(err, os.Remove(half))
	}
	return path, nil
}

// dropTemplateLeftovers removes what a crash in the middle of templateOf left.
func (d *Driver) dropTemplateLeftovers() error {
	d.template.Lock()
	defer d.template.Unlock()
	half, err := filepath.Glob(filepath.Join(globQuote(d.cfg.Home), templateDir, "*.tmp"))
	errs := []error{err}
	for _, path := range half {
		errs = append(errs, os.Remove(path))
	}
	return errors.Join(errs...)
}

// globQuote takes the meaning from a path's pattern characters.
func globQuote(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// copySparse makes dst a copy of src that has holes where src has. The kernel
// copies (copy_file_range), or shares the blocks where the file system can.
func copySparse(dst, src string) (err error) {
	in, err := os.Open(src)
	if err != nil {
		return err
	}
	defer in.Close()
	out, err := os.OpenFile(dst, os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, out.Close()) }()
	info, err := in.Stat()
	if err != nil {
		return err
	}
	if err := out.Truncate(info.Size()); err != nil {
		return err
	}
	for at := int64(0); at < info.Size(); {
		data, err := unix.Seek(int(in.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // only a hole follows
		}
		if err != nil {
			return fmt.Errorf("seek data: %w", err)
		}
		hole, err := unix.Seek(int(in.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("seek hole: %w", err)
		}
		if err := copyRange(out, in, data, hole-data); err != nil {
			return err
		}
		at = hole
	}
	return nil
}

func copyRange(out, in *os.File, at, n int64) error {
	if _, err := in.Seek(at, io.SeekStart); err != nil {
		return err
	}
	if _, err := out.Seek(at, io.SeekStart); err != nil {
		return err
	}
	_, err := io.CopyN(out, in, n) // os.File uses copy_file_range
	return err
}

// attachLoop puts the file at path behind a free loop device that clears
// itself when its last user (the mount) is gone. The caller closes the device
// after mounting it.
func attachLoop(path string) (*os.File, error) {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	ctl, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("%w (load the kernel module loop)", err)
	}
	defer ctl.Close()
	for range 100 {
		n, err := unix.IoctlRetInt(int(ctl.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("LOOP_CTL_GET_FREE: %w", err)
		}
		dev, err := configureLoop(n, file)
		if errors.Is(err, unix.EBUSY) {
			continue // another start took it between the two calls
		}
		return dev, err
	}
	return nil, errors.New("no loop device stayed free long enough")
}

func configureLoop(n int, file *os.File) (*os.File, error) {
	dev, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	config := unix.LoopConfig{Fd: uint32(file.Fd()), Size: 4096}
	// Direct I/O: without it every page of the disk is cached twice.
	config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
	err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
	if errors.Is(err, unix.EINVAL) { // the file system below cannot
		config.Info.Flags &^= unix.LO_FLAGS_DIRECT_IO
		err = unix.IoctlLoopConfigure(int(dev.Fd()), &config)
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("LOOP_CONFIGURE %s: %w", dev.Name(), err), dev.Close())
	}
	return dev, nil
}

// loopsBelow lists the loop devices whose file is, or before it was unlinked
// was, below dir.
func loopsBelow(dir string) []string {
	backings, _ := filepath.Glob("/sys/block/loop*/loop/backing_file") // the pattern is good
	var found []string
	for _, b := range backings {
		data, err := os.ReadFile(b)
		if err == nil && strings.HasPrefix(string(data), dir+"/") {
			found = append(found, filepath.Base(filepath.Dir(filepath.Dir(b))))
		}
	}
	return found
}
