package store

import (
	"encoding/json"
	"fmt"
	"strings"

	"go.etcd.io/bbolt"
)

// Tx is one transaction, good until the function it was given to returns.
//
// Buckets are named by a path with slashes, "events/<session>": each part is a
// bucket inside the one before. Writing makes what is missing; reading from a
// bucket that is not there finds nothing and is no error.
type Tx struct{ tx *bbolt.Tx }

// Put stores v as JSON.
func (t *Tx) Put(bucket, key string, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return fmt.Errorf("store: encode %s/%s: %w", bucket, key, err)
	}
	b, err := t.create(bucket)
	if err != nil {
		return err
	}
	return wrap(b.Put([]byte(key), raw), "put", bucket)
}

// Get reads a value into v, a pointer; false when there is none.
func (t *Tx) Get(bucket, key string, v any) (bool, error) {
	b := t.open(bucket)
	if b == nil {
		return false, nil
	}
	raw := b.Get([]byte(key))
	if raw == nil {
		return false, nil
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return true, fmt.Errorf("store: decode %s/%s: %w", bucket, key, err)
	}
	return true, nil
}

// Delete removes a value; that it is not there is no error.
func (t *Tx) Delete(bucket, key string) error {
	b := t.open(bucket)
	if b == nil {
		return nil
	}
	return wrap(b.Delete([]byte(key)), "delete from", bucket)
}

// Scan calls fn for the values whose key starts with prefix, in order of keys,
// until fn fails. raw is good only during the call. fn must not write to the
// bucket.
func (t *Tx) Scan(bucket, prefix string, fn func(key string, raw json.RawMessage) error) error {
	b := t.open(bucket)
	if b == nil {
		return nil
	}
	c := b.Cursor()
	for k, v := c.Seek([]byte(prefix)); k != nil && strings.HasPrefix(string(k), prefix); k, v = c.Next() {
		if v == nil {
			continue // a bucket inside
		}
		if err := fn(string(k), v); err != nil {
			return err
		}
	}
	return nil
}

// Buckets names the buckets inside bucket, "" for those of the file.
func (t *Tx) Buckets(bucket string) ([]string, error) {
	var names []string
	if bucket == "" {
		err := t.tx.ForEach(func(name []byte, _ *bbolt.Bucket) error {
			names = append(names, string(name))
			return nil
		})
		return names, wrap(err, "list", bucket)
	}
	b := t.open(bucket)
	if b == nil {
		return nil, nil
	}
	err := b.ForEachBucket(func(name []byte) error {
		names = append(names, string(name))
		return nil
	})
	return names, wrap(err, "list", bucket)
}

// Drop removes a bucket with all that is in it; that it is not there is no error.
func (t *Tx) Drop(bucket string) error {
	if t.open(bucket) == nil {
		return nil
	}
	parent, name, nested := cutLast(bucket)
	if !nested {
		return wrap(t.tx.DeleteBucket([]byte(name)), "drop", bucket)
	}
	return wrap(t.open(parent).DeleteBucket([]byte(name)), "drop", bucket)
}

// open finds a bucket, or nil.
func (t *Tx) open(path string) *bbolt.Bucket {
	head, rest, more := strings.Cut(path, "/")
	b := t.tx.Bucket([]byte(head))
	for b != nil && more {
		head, rest, more = strings.Cut(rest, "/")
		b = b.Bucket([]byte(head))
	}
	return b
}

// create finds a bucket and makes what is missing of its path.
func (t *Tx) create(path string) (*bbolt.Bucket, error) {
	head, rest, more := strings.Cut(path, "/")
	b, err := t.tx.CreateBucketIfNotExists([]byte(head))
	for err == nil && more {
		head, rest, more = strings.Cut(rest, "/")
		b, err = b.CreateBucketIfNotExists([]byte(head))
	}
	return b, wrap(err, "make bucket", path)
}

func cutLast(path string) (parent, name string, nested bool) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "", path, false
	}
	return path[:i], path[i+1:], true
}

func wrap(err error, op, bucket string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("store: %s %s: %w", op, bucket, err)
}
