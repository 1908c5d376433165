package blob

import (
	"errors"
	"os"
	"path/filepath"
)

// folder adds to a store in a folder what its driver leaves out.
type folder struct{ root string }

// sync brings a file and the folders above it to the disk: the driver renames
// it into place and leaves the rest to the kernel.
func (f *folder) sync(key string) error {
	if f == nil {
		return nil
	}
	path := filepath.Join(f.root, filepath.FromSlash(key))
	for {
		if err := syncPath(path); err != nil {
			return err
		}
		if path == f.root {
			return nil
		}
		path = filepath.Dir(path)
	}
}

func syncPath(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(file.Sync(), file.Close())
}

// prune removes the folders above a deleted key that hold nothing more.
func (f *folder) prune(key string) {
	if f == nil {
		return
	}
	for path := filepath.Dir(filepath.Join(f.root, filepath.FromSlash(key))); path != f.root; path = filepath.Dir(path) {
		if os.Remove(path) != nil { // holds something, which is the common case
			return
		}
	}
}
