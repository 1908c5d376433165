// Package book keeps, in one bbolt file, what must survive hostd: machines,
// the sessions they were given to, the operations they stand still for, and
// what became of sessions that went on or ended.
package book

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	hostsession "github.com/berth-dev/berth/hostd/session"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/store"
)

const (
	machines   = "machines"
	sessions   = "sessions"
	tombstones = "tombstones" // all that are remembered
	unacked    = "unacked"    // those of them that the record has not taken in
	targets    = "targets"    // sessions restored here that are not placed here yet
	left       = "left"       // sessions that went on from here
	verdicts   = "verdicts"   // by operation
)

// Book implements hostd/session.Book. All methods may be called at once.
type Book struct{ db *store.DB }

var _ hostsession.Book = (*Book)(nil)

// New uses an open file, whose other buckets it leaves alone.
func New(db *store.DB) *Book { return &Book{db} }

// PutMachine writes a machine's handle.
func (b *Book) PutMachine(h machine.Handle) error { return b.put(machines, h.Spec.ID, h) }

// DeleteMachine removes a machine's handle.
func (b *Book) DeleteMachine(id string) error { return b.delete(machines, id) }

// Machines gives all handles.
func (b *Book) Machines() ([]machine.Handle, error) { return all[machine.Handle](b.db, machines) }

// PutSession writes a running session.
func (b *Book) PutSession(r hostsession.Record) error {
	return b.put(sessions, r.Acquire.SessionID, r)
}

// Drop removes a session that never began, and its machine, in one step.
func (b *Book) Drop(r hostsession.Record) error {
	return b.db.Batch(func(tx *store.Tx) error {
		return errors.Join(tx.Delete(sessions, r.Acquire.SessionID), tx.Delete(machines, r.MachineID))
	})
}

// Sessions gives all running sessions.
func (b *Book) Sessions() ([]hostsession.Record, error) {
	return all[hostsession.Record](b.db, sessions)
}

// buried is a tombstone and when the record took it in.
type buried struct {
	hostlink.Tombstone
	Acked time.Time `json:"acked"`
}

// End writes the tombstone and removes the session and its machine in one
// step; machineID is empty for a session that had none here.
func (b *Book) End(t hostlink.Tombstone, machineID string) error {
	return b.db.Batch(func(tx *store.Tx) error {
		return errors.Join(
			tx.Put(tombstones, t.SessionID, buried{Tombstone: t}),
			tx.Put(unacked, t.SessionID, t),
			tx.Delete(sessions, t.SessionID),
			tx.Delete(left, t.SessionID),
			tx.Delete(machines, machineID))
	})
}

// Tombstone finds how a session ended here.
func (b *Book) Tombstone(id string) (hostlink.Tombstone, bool, error) {
	var t buried
	found := false
	err := b.db.View(func(tx *store.Tx) (err error) {
		found, err = tx.Get(tombstones, id, &t)
		return err
	})
	return t.Tombstone, found, err
}

// Tombstones gives those that the record has not taken in.
func (b *Book) Tombstones() ([]hostlink.Tombstone, error) {
	return all[hostlink.Tombstone](b.db, unacked)
}

// Ack marks tombstones as taken in at now; unknown ones are passed over.
func (b *Book) Ack(ids []string, now time.Time) error {
	return b.db.Batch(func(tx *store.Tx) error {
		for _, id := range ids {
			if err := ack(tx, id, now); err != nil {
				return err
			}
		}
		return nil
	})
}

func ack(tx *store.Tx, id string, now time.Time) error {
	var t buried
	if found, err := tx.Get(tombstones, id, &t); err != nil || !found {
		return err
	}
	t.Acked = now.UTC()
	return errors.Join(tx.Put(tombstones, id, t), tx.Delete(unacked, id))
}

func (b *Book) put(bucket, key string, v any) error {
	return b.db.Batch(func(tx *store.Tx) error { return tx.Put(bucket, key, v) })
}

func (b *Book) delete(bucket, key string) error {
	return b.db.Batch(func(tx *store.Tx) error { return tx.Delete(bucket, key) })
}

// all decodes every value of a bucket.
func all[T any](db *store.DB, bucket string) ([]T, error) {
	out := []T{}
	err := db.View(func(tx *store.Tx) error {
		return tx.Scan(bucket, "", func(key string, raw json.RawMessage) error {
			var v T
			if err := json.Unmarshal(raw, &v); err != nil {
				return fmt.Errorf("%s %s: %w", bucket, key, err)
			}
			out = append(out, v)
			return nil
		})
	})
	return out, err
}
