package blob

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// stores opens every kind of store, empty.
func stores(t *testing.T) map[string]*Bucket {
	t.Helper()
	t.Setenv("AWS_ACCESS_KEY_ID", "test")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "test")
	s3 := httptest.NewServer(&fakeS3{objects: map[string][]byte{}})
	t.Cleanup(s3.Close)
	all := map[string]*Bucket{}
	for name, where := range map[string]string{
		"folder": t.TempDir(),
		"file":   "file://" + filepath.Join(t.TempDir(), "made", "here"),
		"s3":     "s3://bucket?region=local&use_path_style=true&endpoint=" + s3.URL,
	} {
		b, err := Open(t.Context(), where)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := b.Close(); err != nil {
				t.Error(err)
			}
		})
		all[name] = b
	}
	return all
}

func TestStores(t *testing.T) {
	for name, b := range stores(t) {
		t.Run(name, func(t *testing.T) { lifeOfAKey(t, b) })
	}
}

func lifeOfAKey(t *testing.T, b *Bucket) {
	ctx := t.Context()
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16) // 1 MiB
	for key, data := range map[string][]byte{"a/x/1.pack": big, "a/x/2": []byte("two"), "b": {}} {
		if err := b.Put(ctx, key, bytes.NewReader(data)); err != nil {
			t.Fatal(err)
		}
		if got := get(t, b, key); !bytes.Equal(got, data) {
			t.Fatalf("%s: got %d bytes, want %d", key, len(got), len(data))
		}
		if n, err := b.Size(ctx, key); err != nil || n != int64(len(data)) {
			t.Fatalf("%s: size %d, %v", key, n, err)
		}
	}
	if got := list(t, b, "a/x/"); !slices.Equal(got, []string{"a/x/1.pack", "a/x/2"}) {
		t.Fatalf("list: %q", got)
	}
	if err := b.Put(ctx, "a/x/2", strings.NewReader("again")); err != nil || string(get(t, b, "a/x/2")) != "again" {
		t.Fatalf("a second put does not replace: %v", err)
	}
	for range 2 {
		if err := b.Delete(ctx, "a/x/2"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := b.Get(ctx, "a/x/2"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("get of what was deleted: %v", err)
	}
	if _, err := b.Size(ctx, "a/x/2"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatalf("size of what was deleted: %v", err)
	}
}

func TestABrokenPutLeavesNothing(t *testing.T) {
	for name, b := range stores(t) {
		t.Run(name, func(t *testing.T) {
			cut := errors.New("cut")
			err := b.Put(t.Context(), "k", io.MultiReader(strings.NewReader("half"), &failing{cut}))
			if !errors.Is(err, cut) {
				t.Fatalf("got %v", err)
			}
			if _, err := b.Get(t.Context(), "k"); !errors.Is(err, fs.ErrNotExist) {
				t.Fatalf("there is something: %v", err)
			}
		})
	}
}

type failing struct{ err error }

func (f *failing) Read([]byte) (int, error) { return 0, f.err }

func TestDeleteLeavesNoEmptyFolders(t *testing.T) {
	dir := t.TempDir()
	b, err := Open(t.Context(), dir)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for _, key := range []string{"a/b/1", "a/b/2"} {
		if err := b.Put(t.Context(), key, strings.NewReader("x")); err != nil {
			t.Fatal(err)
		}
	}
	for i, left := range []int{1, 0} {
		if err := b.Delete(t.Context(), []string{"a/b/1", "a/b/2"}[i]); err != nil {
			t.Fatal(err)
		}
		if entries, err := os.ReadDir(dir); err != nil || len(entries) != left {
			t.Fatalf("%d entries, %v", len(entries), err)
		}
	}
}

func TestKeysAndPlacesAreChecked(t *testing.T) {
	b, err := Open(t.Context(), t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	for _, key := range []string{"", "/", "a/", "/a", "a//b", "../x", "a/../b", ".hidden", "a b", "ä", "a\\b", "a\x00"} {
		if err := b.Put(t.Context(), key, strings.NewReader("x")); err == nil {
			t.Errorf("put of %q went through", key)
		}
	}
	for _, where := range []string{"", "relative/folder", "http://x", "s3://", "gs://bucket"} {
		if _, err := Open(t.Context(), where); err == nil {
			t.Errorf("%q opened", where)
		}
	}
}

func get(t *testing.T, b *Bucket, key string) []byte {
	t.Helper()
	r, err := b.Get(t.Context(), key)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	data, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

func list(t *testing.T, b *Bucket, prefix string) (keys []string) {
	t.Helper()
	for key, err := range b.List(context.Background(), prefix) {
		if err != nil {
			t.Fatal(err)
		}
		keys = append(keys, key)
	}
	return keys
}

// fakeS3 speaks as much of S3's path-style protocol as the driver uses on one
// bucket with small objects.
type fakeS3 struct {
	mu      sync.Mutex
	objects map[string][]byte
}

func (s *fakeS3) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	key := strings.TrimPrefix(strings.TrimPrefix(r.URL.Path, "/bucket"), "/")
	switch {
	case r.Method == http.MethodPut:
		s.put(w, r, key)
	case r.Method == http.MethodDelete:
		delete(s.objects, key)
		w.WriteHeader(http.StatusNoContent)
	case key == "":
		s.list(w, r.URL.Query().Get("prefix"))
	default:
		s.get(w, r, key)
	}
}

// What an address holds beside the bucket may be credentials: no error tells it.
func TestOpenTellsNoCredentials(t *testing.T) {
	for _, where := range []string{
		"s3://bucket?region=local&secret_key=hunter2",
		"s3://user:hunter2@bucket?region=local&no_such_thing=1",
		"s3://user:hunter2@bucket?region=local&use_path_style=perhaps",
		"s3://user:hunter2@",
		"https://user:hunter2@example.com/bucket",
		"user:hunter2@bucket\x7f",
	} {
		_, err := Open(t.Context(), where)
		if err == nil {
			t.Fatalf("%q opened", where)
		}
		if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "user") {
			t.Errorf("the error tells the secret: %v", err)
		}
	}
}
