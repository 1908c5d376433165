package book

import (
	"errors"
	"time"

	hostsession "github.com/berth-dev/berth/hostd/session"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/store"
)

// verdict is what was decided about an operation, and when it came here.
type verdict struct {
	hostlink.Verdict
	At time.Time `json:"at"`
}

// PutTarget writes a session that is restored here and not yet placed here.
func (b *Book) PutTarget(r hostsession.Record) error {
	return b.put(targets, r.Acquire.SessionID, r)
}

// Targets gives all sessions that are restored here and not yet placed here.
func (b *Book) Targets() ([]hostsession.Record, error) {
	return all[hostsession.Record](b.db, targets)
}

// GoOn writes that a machine goes on after an operation: a target becomes the
// session.
func (b *Book) GoOn(r hostsession.Record, v hostlink.Verdict) error {
	id := r.Acquire.SessionID
	return b.db.Batch(func(tx *store.Tx) error {
		err := errors.Join(tx.Put(sessions, id, r), remember(tx, &v))
		if r.Op.Role == hostlink.Target {
			err = errors.Join(err, tx.Delete(targets, id), tx.Delete(left, id))
		}
		return err
	})
}

// Discard removes the machine that an operation leaves behind, and its record.
func (b *Book) Discard(r hostsession.Record, v *hostlink.Verdict, l *hostsession.Left) error {
	id, bucket := r.Acquire.SessionID, sessions
	if r.Op.Role == hostlink.Target {
		bucket = targets
	}
	return b.db.Batch(func(tx *store.Tx) error {
		err := errors.Join(tx.Delete(bucket, id), tx.Delete(machines, r.MachineID), remember(tx, v))
		if l != nil {
			err = errors.Join(err, tx.Put(left, id, *l))
		}
		return err
	})
}

func remember(tx *store.Tx, v *hostlink.Verdict) error {
	if v == nil {
		return nil
	}
	return tx.Put(verdicts, v.OpID, verdict{*v, time.Now().UTC()})
}

// Left finds where a session went that was here last.
func (b *Book) Left(id string) (l hostsession.Left, found bool, err error) {
	err = b.db.View(func(tx *store.Tx) error {
		found, err = tx.Get(left, id, &l)
		return err
	})
	return l, found, err
}

// Verdict finds what was decided here about an operation.
func (b *Book) Verdict(opID string) (hostlink.Verdict, bool, error) {
	var v verdict
	found := false
	err := b.db.View(func(tx *store.Tx) (err error) {
		found, err = tx.Get(verdicts, opID, &v)
		return err
	})
	return v.Verdict, found, err
}
