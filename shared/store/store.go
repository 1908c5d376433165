// Package store keeps a daemon's local state in one bbolt file: JSON values by
// bucket and key, and logs numbered by sequence. Only this package imports
// bbolt; no type of it shows.
package store

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"go.etcd.io/bbolt"
	berrors "go.etcd.io/bbolt/errors"
)

// Options choose between speed and what a power failure may take.
type Options struct {
	// NoSync leaves writing to the disk to the kernel: commits cost
	// microseconds, and survive the daemon's death (kill -9), but not the
	// host's. Without it a commit is on the disk when Update returns.
	NoSync bool
	// LockTimeout is how long Open waits for another process to let go of the
	// file; 0 means 2 seconds.
	LockTimeout time.Duration
}

const (
	defaultLockTimeout = 2 * time.Second
	// batchDelay is what a lone Batch waits for company. bbolt's own 10 ms is
	// tuned for disks that turn.
	batchDelay = time.Millisecond
)

// DB is an open file. All methods may be called at once.
type DB struct{ bolt *bbolt.DB }

// Open opens the file at path, and makes it and its folder (modes 0600, 0700)
// if absent. A file that another process holds is an error that says so.
func Open(path string, o Options) (*DB, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("store: %w", err)
	}
	wait := o.LockTimeout
	if wait == 0 {
		wait = defaultLockTimeout
	}
	options := BoltOptions(wait)
	options.NoSync = o.NoSync
	b, err := bbolt.Open(path, 0o600, options)
	if err != nil {
		return nil, fmt.Errorf("store: open %s: %w", path, Explain(err))
	}
	b.MaxBatchDelay = batchDelay
	return &DB{b}, nil
}

// BoltOptions are the settings of every bbolt file of Berth, for the Raft log,
// which opens its own.
func BoltOptions(lockTimeout time.Duration) *bbolt.Options {
	o := *bbolt.DefaultOptions
	o.Timeout = lockTimeout
	o.FreelistType = bbolt.FreelistMapType
	o.NoFreelistSync = true // one page less a commit; the list is rebuilt at open
	return &o
}

// ErrLocked is in the chain when another process holds the file.
var ErrLocked = errors.New("another process holds this file: is a second daemon running with the same home?")

// Explain says what an error of opening a file means.
func Explain(err error) error {
	if errors.Is(err, berrors.ErrTimeout) {
		return ErrLocked
	}
	return err
}

// Close waits for transactions under way and closes the file.
func (d *DB) Close() error {
	if d.bolt.NoSync { // a clean stop may as well be durable
		if err := d.bolt.Sync(); err != nil {
			return errors.Join(fmt.Errorf("store: sync: %w", err), d.bolt.Close())
		}
	}
	return d.bolt.Close()
}

// View runs fn on a state that does not change while it runs.
func (d *DB) View(fn func(*Tx) error) error {
	return d.bolt.View(func(t *bbolt.Tx) error { return fn(&Tx{t}) })
}

// Update runs fn and commits what it wrote, or nothing when it fails. One
// Update runs at a time.
func (d *DB) Update(fn func(*Tx) error) error {
	return d.bolt.Update(func(t *bbolt.Tx) error { return fn(&Tx{t}) })
}

// Batch is Update with the commit shared among callers who come within a
// millisecond. fn may run more than once and must have no other effect.
func (d *DB) Batch(fn func(*Tx) error) error {
	return d.bolt.Batch(func(t *bbolt.Tx) error { return fn(&Tx{t}) })
}
