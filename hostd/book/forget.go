package book

import (
	"encoding/json"
	"errors"
	"fmt"
	"time"

	hostsession "github.com/berth-dev/berth/hostd/session"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/store"
)

// Forget removes tombstones that were acknowledged before a moment, verdicts of
// before it, and sessions that left so long before it that no pause lasts until
// then.
func (b *Book) Forget(before time.Time) error {
	return b.db.Update(func(tx *store.Tx) error {
		return errors.Join(
			sweep(tx, tombstones, func(t buried) bool { return !t.Acked.IsZero() && t.Acked.Before(before) }),
			sweep(tx, verdicts, func(v verdict) bool { return v.At.Before(before) }),
			sweep(tx, left, func(l hostsession.Left) bool { return l.At.Before(before.Add(-session.PausedMax)) }))
	})
}

// sweep deletes the values of a bucket that are old.
func sweep[T any](tx *store.Tx, bucket string, old func(T) bool) error {
	var keys []string
	err := tx.Scan(bucket, "", func(key string, raw json.RawMessage) error {
		var v T
		if err := json.Unmarshal(raw, &v); err != nil {
			return fmt.Errorf("%s %s: %w", bucket, key, err)
		}
		if old(v) {
			keys = append(keys, key)
		}
		return nil
	})
	for _, key := range keys {
		err = errors.Join(err, tx.Delete(bucket, key))
	}
	return err
}
