package snapshot

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

var errCrash = errors.New("the computer stands still")

// disk counts a store's changes, stops them at a moment, and then takes what a
// power failure may take: what was not synced.
type disk struct {
	mu      sync.Mutex      // packs are synced side by side
	left    int             // changes until the crash; negative: never
	dirty   map[string]bool // files with unsynced bytes
	entries map[string]bool // files made or renamed, whose folder is not synced
	removed map[string][]byte
}

func newDisk() *disk {
	return &disk{left: -1, dirty: map[string]bool{}, entries: map[string]bool{}, removed: map[string][]byte{}}
}

func (d *disk) hook(op, path string) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.left == 0 {
		return errCrash
	}
	d.left--
	switch op {
	case "create":
		d.entries[path] = true
	case "write":
		d.dirty[path] = true
	case "sync":
		delete(d.dirty, path)
	case "rename":
		delete(d.entries, path+".tmp")
		d.entries[path] = true
	case "remove":
		d.remove(path)
	case "syncdir":
		mine := func(p string) bool { return filepath.Dir(p) == path }
		maps.DeleteFunc(d.entries, func(p string, _ bool) bool { return mine(p) })
		maps.DeleteFunc(d.removed, func(p string, _ []byte) bool { return mine(p) })
	}
	return nil
}

func (d *disk) remove(path string) {
	data, err := os.ReadFile(path)
	if err == nil && !d.entries[path] && !d.dirty[path] {
		d.removed[path] = data
	}
	delete(d.entries, path)
	delete(d.dirty, path)
}

// fail takes what was not synced, or not, as the kernel happened to write.
func (d *disk) fail(t *rapid.T) {
	happened := rapid.Bool()
	for _, path := range slices.Sorted(maps.Keys(d.removed)) {
		if happened.Draw(t, "removal undone") {
			must(t, os.WriteFile(path, d.removed[path], 0o600))
		}
	}
	for _, path := range slices.Sorted(maps.Keys(d.dirty)) {
		if st, err := os.Stat(path); err == nil {
			must(t, os.Truncate(path, rapid.Int64Range(0, st.Size()).Draw(t, "bytes that were written")))
		}
	}
	for _, path := range slices.Sorted(maps.Keys(d.entries)) {
		if happened.Draw(t, "file lost") {
			_ = os.Remove(path) // may be gone already
		}
	}
}

func must(t *rapid.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// model is a store with what it must hold.
type model struct {
	t      *rapid.T
	dir    string
	disk   *disk
	s      *Store
	away   *Store // another host's
	live   map[string]*fakeMachine
	aloft  map[string]*fakeMachine // writes and removals that a crash met: there or not
	number int
}

func (m *model) open() {
	m.disk = newDisk()
	s, err := open(m.dir, nil, quiet(), m.disk.hook)
	must(m.t, err)
	m.s = s
}

// draw picks a live snapshot, or none.
func (m *model) draw(what string) string {
	return rapid.SampledFrom(append([]string{""}, slices.Sorted(maps.Keys(m.live))...)).Draw(m.t, what)
}

// machine makes one, or alters that of an earlier snapshot.
func (m *model) machine(previous string) *fakeMachine {
	rng := rapid.Uint64()
	c := newMachine(rapid.SampledFrom([]int{0, 1, 30, 260}).Draw(m.t, "pages"))
	c.layers[0].data = c.layers[0].data[:5000]
	if p := m.live[previous]; p != nil {
		c = p.clone()
	}
	indexes := slices.Sorted(maps.Keys(c.pages))
	changes := rapid.IntRange(0, len(indexes)+3).Draw(m.t, "changes")
	seed := rng.Draw(m.t, "seed")
	for i := range changes {
		x := seed + uint64(i)*0x9e3779b97f4a7c15
		switch at := 900 + x>>8%700; x % 5 {
		case 0:
			delete(c.pages, at)
		case 1:
			c.pages[at] = nil
		default:
			c.pages[at] = page(x)
		}
	}
	if changes%2 == 1 {
		c.layers = append(c.layers, fakeLayer{fmt.Sprintf("layer-%x", seed), page(seed)})
	}
	c.device = page(seed)[:seed%100]
	return c
}

func (m *model) write(*rapid.T) {
	previous := m.draw("previous")
	c, id := m.machine(previous), m.id()
	_, err := m.s.Write(context.Background(), order(id, previous), c)
	m.settle(id, c, err, true)
}

// draft writes layers ahead, and something else happens before it is a snapshot,
// if it becomes one.
func (m *model) draft(*rapid.T) {
	previous := m.draw("previous")
	c, id := m.machine(previous), m.id()
	d, err := m.s.Draft(context.Background(), order(id, previous))
	must(m.t, err)
	there := rapid.Bool().Draw(m.t, "is written")
	err = d.Layers(context.Background(), c.Layers()[:rapid.IntRange(0, len(c.layers)).Draw(m.t, "ahead")])
	if gone := m.draw("deleted meanwhile"); err == nil && gone != "" {
		was := m.live[gone]
		if err = m.s.Delete(context.Background(), ref(gone)); errors.Is(err, errCrash) {
			m.aloft[gone] = was
		}
		delete(m.live, gone)
	}
	if err == nil && there {
		_, err = d.Write(context.Background(), c)
	}
	if e := d.Close(); err == nil {
		err = e
	}
	if errors.Is(err, errCrash) && !there {
		m.crash(m.t)
		return
	}
	m.settle(id, c, err, there)
}

func (m *model) id() string {
	m.number++
	return fmt.Sprintf("s%d", m.number)
}

// settle notes how an operation ended.
func (m *model) settle(id string, c *fakeMachine, err error, there bool) {
	switch {
	case errors.Is(err, errCrash):
		delete(m.live, id)
		m.aloft[id] = c
		m.crash(m.t)
	case err != nil:
		m.t.Fatal(err)
	case there:
		m.live[id] = c
	default:
		delete(m.live, id)
	}
}

func (m *model) take(*rapid.T) {
	previous := m.draw("previous")
	if _, ok := m.away.have(previous); !ok {
		previous = ""
	}
	c, id := m.machine(previous), m.id()
	d, err := m.away.Draft(context.Background(), order(id, previous))
	must(m.t, err)
	must(m.t, d.Layers(context.Background(), c.Layers()[:rapid.IntRange(0, len(c.layers)).Draw(m.t, "ahead")]))
	ahead, err := d.Export(context.Background(), m.s.Packs("session")...)
	must(m.t, err)
	held, err := m.s.Hold(context.Background(), "session", ahead)
	must(m.t, ahead.Close())
	_, errWrite := d.Write(context.Background(), c)
	must(m.t, errors.Join(errWrite, d.Close()))
	e, errExport := m.away.Export(context.Background(), ref(id), m.s.Packs("session")...)
	must(m.t, errExport)
	if err == nil {
		err = m.s.Import(context.Background(), ref(id), e)
		if e := held.Release(); err == nil {
			err = e
		}
	}
	must(m.t, e.Close())
	m.settle(id, c, err, true)
}

func (m *model) delete(*rapid.T) {
	if id := m.draw("delete"); id != "" {
		c := m.live[id]
		m.settle(id, c, m.s.Delete(context.Background(), ref(id)), false)
	}
}

// soon lets one of the next changes be the last.
func (m *model) soon(t *rapid.T) {
	m.disk.left = rapid.IntRange(0, 40).Draw(t, "changes until the crash")
}

// crash cuts the power and starts again.
func (m *model) crash(t *rapid.T) {
	m.disk.fail(t)
	m.open()
	for id, c := range m.aloft {
		if _, ok := m.s.have(id); ok {
			m.live[id] = c
		}
	}
	clear(m.aloft)
	must(t, wantFiles(m.s))
	m.checkAll(t)
}

func (m *model) sweep(t *rapid.T) {
	if m.disk.left >= 0 {
		return
	}
	drop := m.draw("sweep")
	must(t, m.s.Sweep(func(id string) bool { return id != drop }))
	delete(m.live, drop)
}

// check is the property: what should be here loads and is the same, and nothing
// else is here. All of it after a crash, else one of it.
func (m *model) check(t *rapid.T) {
	if id := m.draw("look at"); id != "" {
		must(t, loads(m.s, ref(id), testKey, m.live[id]))
	}
	if m.disk.left < 0 {
		must(t, wantFiles(m.s))
	}
}

func (m *model) checkAll(t *rapid.T) {
	if got, want := len(m.s.List()), len(m.live); got != want {
		t.Fatalf("%d snapshots are here, want %d", got, want)
	}
	for id, c := range m.live {
		if err := loads(m.s, ref(id), testKey, c); err != nil {
			t.Fatalf("%s: %v", id, err)
		}
	}
}

// memoryFolder is where a sync costs nothing: the power failures are made here.
func memoryFolder() string {
	if st, err := os.Stat("/dev/shm"); err == nil && st.IsDir() {
		return "/dev/shm"
	}
	return ""
}

func TestModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(memoryFolder(), "snapshots")
		must(t, err)
		defer os.RemoveAll(dir)
		away, err := Open(filepath.Join(dir, "away"), nil, quiet())
		must(t, err)
		m := &model{t: t, dir: filepath.Join(dir, "here"), away: away, live: map[string]*fakeMachine{}, aloft: map[string]*fakeMachine{}}
		m.open()
		t.Repeat(map[string]func(*rapid.T){
			"write": m.write, "write more": m.write, "draft": m.draft, "take": m.take, "delete": m.delete, "soon": m.soon, "power failure": m.crash,
			"sweep": m.sweep, "": m.check,
		})
		m.checkAll(t)
	})
}
