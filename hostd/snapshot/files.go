package snapshot

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
)

// files are the changes a store makes to its folder. Each has a name (create,
// write, sync, rename, remove, syncdir) that is told to hook first, so that a
// test can fail exactly one.
type files struct {
	hook func(op, path string) error // nil outside tests
}

func (fs files) before(op, path string) error {
	if fs.hook == nil {
		return nil
	}
	return fs.hook(op, path)
}

// file is one that is being written.
type file struct {
	fs files
	f  *os.File
}

// create makes a file that must not be there yet; readable and writable, so
// that its writer can look at it again.
func (fs files) create(path string) (*file, error) {
	if err := fs.before("create", path); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	return &file{fs, f}, nil
}

func (f *file) Write(p []byte) (int, error) {
	if err := f.fs.before("write", f.f.Name()); err != nil {
		return 0, err
	}
	return f.f.Write(p)
}

func (f *file) sync() error {
	if err := f.fs.before("sync", f.f.Name()); err != nil {
		return err
	}
	return f.f.Sync()
}

func (fs files) rename(from, to string) error {
	if err := fs.before("rename", to); err != nil {
		return err
	}
	return os.Rename(from, to)
}

// remove takes a file away; one that is not there is no error.
func (fs files) remove(path string) error {
	if err := fs.before("remove", path); err != nil {
		return err
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}

func (fs files) syncDir(path string) error {
	if err := fs.before("syncdir", path); err != nil {
		return err
	}
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// put writes a small file, whole or not at all; it is on the disk on return.
func (fs files) put(path string, data []byte) (err error) {
	tmp := path + ".tmp"
	if err := fs.remove(tmp); err != nil { // left by a crash
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("write %s: %w", filepath.Base(path), err), fs.remove(tmp), fs.remove(path))
		}
	}()
	if err := fs.fill(tmp, data); err != nil {
		return err
	}
	if err := fs.rename(tmp, path); err != nil {
		return err
	}
	return fs.syncDir(filepath.Dir(path))
}

func (fs files) fill(path string, data []byte) error {
	f, err := fs.create(path)
	if err != nil {
		return err
	}
	if _, err = f.Write(data); err == nil {
		err = f.sync()
	}
	return errors.Join(err, f.f.Close())
}
