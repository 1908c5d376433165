package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"iter"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/hostd/machine"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeMachine is a frozen machine: a machine.Capture.
type fakeMachine struct {
	template string
	pages    map[uint64][]byte // nil: zeros
	device   []byte
	layers   []fakeLayer
	readings int // of pages
	fail     error
}

type fakeLayer struct {
	name string
	data []byte
}

func (m *fakeMachine) Driver() string   { return "fake" }
func (m *fakeMachine) CPUClass() string { return "class" }
func (m *fakeMachine) Template() string { return m.template }
func (m *fakeMachine) Close() error     { return nil }

func (m *fakeMachine) Pages() iter.Seq2[machine.Page, error] {
	m.readings++
	return func(yield func(machine.Page, error) bool) {
		buf := make([]byte, machine.PageSize) // valid until the next step only
		for _, i := range slices.Sorted(maps.Keys(m.pages)) {
			p := machine.Page{Index: i}
			if d := m.pages[i]; d != nil {
				copy(buf, d)
				p.Data = buf
			}
			if !yield(p, nil) {
				return
			}
		}
		if m.fail != nil {
			yield(machine.Page{}, m.fail)
		}
	}
}

func (m *fakeMachine) Device() (io.ReadCloser, error) {
	return io.NopCloser(bytes.NewReader(m.device)), nil
}

func (m *fakeMachine) Layers() (all []machine.Layer) {
	for _, l := range m.layers {
		all = append(all, machine.Layer{Name: l.name, Size: int64(len(l.data)), Open: func() (io.ReadCloser, error) {
			return io.NopCloser(bytes.NewReader(l.data)), nil
		}})
	}
	return all
}

func (m *fakeMachine) clone() *fakeMachine {
	c := *m
	c.pages, c.layers = maps.Clone(m.pages), slices.Clone(m.layers)
	return &c
}

// page makes a page of a seed that compresses to about half.
func page(seed uint64) []byte {
	p := make([]byte, machine.PageSize)
	x := seed*2862933555777941757 + 3037000493
	for i := 0; i < len(p); i += 2 {
		x ^= x << 13
		x ^= x >> 7
		x ^= x << 17
		p[i] = byte(x)
	}
	return p
}

var layerData = bytes.Repeat([]byte("disk"), 700_000) // never altered

// newMachine has count pages from index 1000 on, every seventh of zeros.
func newMachine(count int) *fakeMachine {
	m := &fakeMachine{template: "t1", pages: map[uint64][]byte{}, device: []byte("device state"),
		layers: []fakeLayer{{"layer-1", layerData}, {"layer-2", nil}}}
	for i := range uint64(count) {
		m.pages[1000+i+i/100] = page(i)
		if i%7 == 0 {
			m.pages[1000+i+i/100] = nil
		}
	}
	return m
}

// same compares what was loaded with the machine that was captured.
func same(c machine.Capture, m *fakeMachine) error {
	if c.Driver() != m.Driver() || c.CPUClass() != m.CPUClass() || c.Template() != m.Template() {
		return fmt.Errorf("it is of %s %s %s", c.Driver(), c.CPUClass(), c.Template())
	}
	want := slices.Sorted(maps.Keys(m.pages))
	n := 0
	for p, err := range c.Pages() {
		if err != nil {
			return err
		}
		if n == len(want) || p.Index != want[n] {
			return fmt.Errorf("page %d came as number %d of %d", p.Index, n, len(want))
		}
		if d := m.pages[p.Index]; (p.Data == nil) != (d == nil || bytes.Equal(d, zeros[:])) || p.Data != nil && !bytes.Equal(p.Data, d) {
			return fmt.Errorf("page %d differs", p.Index)
		}
		n++
	}
	if n != len(want) {
		return fmt.Errorf("%d pages of %d", n, len(want))
	}
	return sameStreams(c, m)
}

func sameStreams(c machine.Capture, m *fakeMachine) error {
	if err := gives(c.Device, m.device); err != nil {
		return fmt.Errorf("device: %w", err)
	}
	layers := c.Layers()
	if len(layers) != len(m.layers) {
		return fmt.Errorf("%d layers of %d", len(layers), len(m.layers))
	}
	for i, l := range layers {
		if l.Name != m.layers[i].name || l.Size != int64(len(m.layers[i].data)) {
			return fmt.Errorf("layer %d is %s of %d bytes", i, l.Name, l.Size)
		}
		if err := gives(l.Open, m.layers[i].data); err != nil {
			return fmt.Errorf("layer %s: %w", l.Name, err)
		}
	}
	return nil
}

func gives(open func() (io.ReadCloser, error), want []byte) error {
	r, err := open()
	if err != nil {
		return err
	}
	got, err := io.ReadAll(r)
	if err := errors.Join(err, r.Close()); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return fmt.Errorf("%d bytes that differ, want %d", len(got), len(want))
	}
	return nil
}

// loads loads a snapshot and compares it.
func loads(s *Store, ref Ref, key Key, m *fakeMachine) error {
	l, err := s.Load(context.Background(), ref, key)
	if err != nil {
		return err
	}
	return errors.Join(same(l.Memory, m), l.Close())
}

var testKey = Key{1, 2, 3}

func ref(id string) Ref { return Ref{id, "session"} }

func order(id, previous string) Order {
	return Order{Ref: ref(id), Key: testKey, Previous: previous}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }

func newStore(t testing.TB, bucket Bucket) *Store {
	t.Helper()
	return reopen(t, t.TempDir(), bucket)
}

func reopen(t testing.TB, dir string, bucket Bucket) *Store {
	t.Helper()
	s, err := Open(dir, bucket, quiet())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.Close(); err != nil {
			t.Error(err)
		}
	})
	return s
}

func write(t testing.TB, s *Store, o Order, m machine.Capture) Info {
	t.Helper()
	i, err := s.Write(context.Background(), o, m)
	if err != nil {
		t.Fatal(err)
	}
	return i
}

// filesIn lists the files of a store, relative.
func filesIn(t testing.TB, dir string) (names []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			names = append(names, strings.TrimPrefix(path, dir+"/"))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return names
}

// wantFiles fails unless exactly the files that the store's manifests need are there.
func wantFiles(s *Store) error {
	want := []string{}
	seen := map[string]bool{}
	for _, e := range s.entries {
		want = append(want, "manifests/"+e.ID)
		for _, p := range e.Packs {
			if !seen[p.Name] {
				seen[p.Name] = true
				want = append(want, "packs/"+p.Name)
			}
		}
	}
	got := []string{}
	for _, sub := range []string{manifests, packs} {
		all, err := os.ReadDir(filepath.Join(s.dir, sub))
		if err != nil {
			return err
		}
		for _, e := range all {
			got = append(got, sub+"/"+e.Name())
		}
	}
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		return fmt.Errorf("files %q, want %q", got, want)
	}
	return nil
}

// memBucket is a blob store in memory that can be made to fail.
type memBucket struct {
	mu      sync.Mutex
	objects map[string][]byte
	fail    error
	puts    int
	gate    chan struct{} // a Put waits until it can receive; nil: does not wait
}

func newBucket() *memBucket { return &memBucket{objects: map[string][]byte{}} }

func (b *memBucket) set(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fail = err
}

func (b *memBucket) keys() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.objects))
}

func (b *memBucket) Put(ctx context.Context, key string, r io.Reader) error {
	if b.gate != nil {
		select {
		case <-b.gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	data, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.puts++
	if b.fail == nil {
		b.objects[key] = data
	}
	return b.fail
}

func (b *memBucket) Get(_ context.Context, key string) (io.ReadCloser, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fail != nil {
		return nil, b.fail
	}
	data, ok := b.objects[key]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return io.NopCloser(bytes.NewReader(data)), nil
}

func (b *memBucket) Size(ctx context.Context, key string) (int64, error) {
	r, err := b.Get(ctx, key)
	if err != nil {
		return 0, err
	}
	return io.Copy(io.Discard, r)
}

func (b *memBucket) Delete(_ context.Context, key string) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.fail == nil {
		delete(b.objects, key)
	}
	return b.fail
}

func (b *memBucket) List(_ context.Context, prefix string) iter.Seq2[string, error] {
	return func(yield func(string, error) bool) {
		for _, key := range b.keys() {
			if strings.HasPrefix(key, prefix) && !yield(key, nil) {
				return
			}
		}
	}
}
