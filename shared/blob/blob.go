// Package blob keeps large things by name where several hosts find them: a
// folder by default, any S3-compatible store by URL. Only this package imports
// gocloud.dev; no type of it shows.
package blob

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"net/url"
	"path/filepath"
	"strings"

	"gocloud.dev/blob"
	"gocloud.dev/blob/fileblob"
	_ "gocloud.dev/blob/s3blob" // s3:// URLs
	"gocloud.dev/gcerrors"
)

// Bucket is an open store. All methods may be called at once. Keys are names
// with slashes between them; each name is made of letters, digits, '.', '_'
// and '-' and does not begin with '.'.
type Bucket struct {
	bucket *blob.Bucket
	folder *folder // nil unless the store is a folder
	where  string
}

// Open opens the store that where names: a folder (absolute path or file:// URL,
// made if absent), or "s3://BUCKET?region=R". For a store of another maker add
// endpoint=URL and, mostly, use_path_style=true; prefix=NAME/ keeps to a part of
// the bucket. Credentials come from AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY
// or what else the AWS SDK knows. Opening does not try whether the store answers.
func Open(ctx context.Context, where string) (*Bucket, error) {
	if path, ok := strings.CutPrefix(where, "file://"); ok {
		where = path
	}
	if filepath.IsAbs(where) {
		return openFolder(where)
	}
	u, err := url.Parse(where)
	if err != nil || u.Scheme != "s3" || u.Host == "" { // not a word of it: it may hold credentials
		return nil, errors.New("blob: the address is neither an absolute folder nor s3://BUCKET?region=R")
	}
	name := "s3://" + u.Host
	b, err := blob.OpenBucket(ctx, where)
	if err != nil {
		return nil, fmt.Errorf("blob: open %s: %w", name, withoutURL(err, u))
	}
	return &Bucket{bucket: b, where: name}, nil
}

// withoutURL is the cause of an error that names the whole address, credentials
// included.
func withoutURL(err error, u *url.URL) error {
	for err != nil && (strings.Contains(err.Error(), u.String()) || u.RawQuery != "" && strings.Contains(err.Error(), u.RawQuery)) {
		err = errors.Unwrap(err)
	}
	if err == nil {
		return errors.New("the address is not one that the S3 client takes")
	}
	return err
}

func openFolder(path string) (*Bucket, error) {
	b, err := fileblob.OpenBucket(path, &fileblob.Options{
		CreateDir: true, DirFileMode: 0o700, Metadata: fileblob.MetadataDontWrite,
		NoTempDir: true, // a rename must stay inside one file system
	})
	if err != nil {
		return nil, fmt.Errorf("blob: open %s: %w", path, err)
	}
	return &Bucket{bucket: b, folder: &folder{filepath.Clean(path)}, where: path}, nil
}

// String names the store for logs, without credentials.
func (b *Bucket) String() string { return b.where }

// Put stores what r gives under key, whole or not at all, over what was there.
// When it returns the bytes are safe: a folder's are on the disk.
func (b *Bucket) Put(ctx context.Context, key string, r io.Reader) error {
	if err := check(key); err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel() // before Close this drops what was written
	w, err := b.bucket.NewWriter(ctx, key, &blob.WriterOptions{ContentType: "application/octet-stream"})
	if err != nil {
		return b.explain("put", key, err)
	}
	if _, err := io.Copy(w, r); err != nil {
		cancel()
		_ = w.Close() // the copy's error says more
		return b.explain("put", key, err)
	}
	if err := w.Close(); err != nil {
		return b.explain("put", key, err)
	}
	return b.explain("put", key, b.folder.sync(key))
}

// Get opens what lies under key. fs.ErrNotExist when nothing does.
func (b *Bucket) Get(ctx context.Context, key string) (io.ReadCloser, error) {
	if err := check(key); err != nil {
		return nil, err
	}
	r, err := b.bucket.NewReader(ctx, key, nil)
	if err != nil {
		return nil, b.explain("get", key, err)
	}
	return r, nil
}

// Size says how many bytes lie under key. fs.ErrNotExist when nothing does.
func (b *Bucket) Size(ctx context.Context, key string) (int64, error) {
	if err := check(key); err != nil {
		return 0, err
	}
	a, err := b.bucket.Attributes(ctx, key)
	if err != nil {
		return 0, b.explain("size of", key, err)
	}
	return a.Size, nil
}

// Delete removes what lies under key; nothing there is no error.
func (b *Bucket) Delete(ctx context.Context, key string) error {
	if err := check(key); err != nil {
		return err
	}
	err := b.bucket.Delete(ctx, key)
	if err != nil && gcerrors.Code(err) != gcerrors.NotFound {
		return b.explain("delete", key, err)
	}
	b.folder.prune(key)
	return nil
}

// List gives the keys that begin with prefix, in order. After an error there
// is no more.
func (b *Bucket) List(ctx context.Context, prefix string) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for it := b.bucket.List(&blob.ListOptions{Prefix: prefix}); ; {
			o, err := it.Next(ctx)
			if errors.Is(err, io.EOF) {
				return
			}
			if err != nil {
				yield("", b.explain("list", prefix, err))
				return
			}
			if check(o.Key) == nil && !yield(o.Key, nil) {
				return
			}
		}
	}
}

// Close lets go of the store.
func (b *Bucket) Close() error { return b.bucket.Close() }

func (b *Bucket) explain(op, key string, err error) error {
	if err == nil {
		return nil
	}
	if gcerrors.Code(err) == gcerrors.NotFound {
		return fmt.Errorf("blob: %s %s in %s: %w", op, key, b.where, fs.ErrNotExist)
	}
	return fmt.Errorf("blob: %s %s in %s: %w", op, key, b.where, err)
}

// check keeps to names that mean the same in a folder and in every store.
func check(key string) error {
	for name := range strings.SplitSeq(key, "/") {
		if name == "" || name[0] == '.' || strings.ContainsFunc(name, odd) {
			return fmt.Errorf("blob: key %q: want names of letters, digits, '.', '_' and '-' with slashes between", key)
		}
	}
	return nil
}

func odd(c rune) bool {
	return (c < '0' || c > '9') && (c < 'a' || c > 'z') && (c < 'A' || c > 'Z') && c != '.' && c != '_' && c != '-'
}
