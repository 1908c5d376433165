package store

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
)

// A bucket used as a log holds values numbered from 1, without holes but at
// the old end. Do not mix Put and Append in one bucket.

// Append adds the value that of makes for its sequence number. A number is
// never used twice in a bucket, even when what had it was dropped.
func (t *Tx) Append(bucket string, of func(seq uint64) any) (seq uint64, err error) {
	b, err := t.create(bucket)
	if err != nil {
		return 0, err
	}
	if seq, err = b.NextSequence(); err != nil {
		return 0, wrap(err, "append to", bucket)
	}
	raw, err := json.Marshal(of(seq))
	if err != nil {
		return 0, fmt.Errorf("store: encode %s %d: %w", bucket, seq, err)
	}
	b.FillPercent = 0.95 // keys only grow: full pages are not split
	return seq, wrap(b.Put(seqKey(seq), raw), "append to", bucket)
}

// Skip counts the numbers up to n as used: the next value is numbered above it.
func (t *Tx) Skip(bucket string, n uint64) error {
	b, err := t.create(bucket)
	if err != nil || b.Sequence() >= n {
		return err
	}
	return wrap(b.SetSequence(n), "skip in", bucket)
}

// After calls fn for the values numbered above after, oldest first, until fn
// returns false or an error. raw is good only during the call.
func (t *Tx) After(bucket string, after uint64, fn func(seq uint64, raw json.RawMessage) (more bool, err error)) error {
	b := t.open(bucket)
	if b == nil || after == ^uint64(0) {
		return nil
	}
	c := b.Cursor()
	for k, v := c.Seek(seqKey(after + 1)); k != nil; k, v = c.Next() {
		more, err := fn(binary.BigEndian.Uint64(k), v)
		if err != nil || !more {
			return err
		}
	}
	return nil
}

// Last is the highest number ever appended, 0 for none.
func (t *Tx) Last(bucket string) uint64 {
	b := t.open(bucket)
	if b == nil {
		return 0
	}
	return b.Sequence()
}

// DropOldest removes all but the newest keep values and says how many went.
func (t *Tx) DropOldest(bucket string, keep uint64) (dropped int, err error) {
	b := t.open(bucket)
	if b == nil || b.Sequence() <= keep {
		return 0, nil
	}
	limit := b.Sequence() - keep
	c := b.Cursor()
	for k, _ := c.First(); k != nil && binary.BigEndian.Uint64(k) <= limit; k, _ = c.First() {
		if err := c.Delete(); err != nil {
			return dropped, wrap(err, "drop from", bucket)
		}
		dropped++
	}
	return dropped, nil
}

// seqKey is big-endian, so that the order of keys is that of numbers.
func seqKey(seq uint64) []byte { return binary.BigEndian.AppendUint64(nil, seq) }
