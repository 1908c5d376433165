package session

import (
	"bytes"
	"context"
	"errors"
	"io"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// how says what happens to a hostd at its n-th effect.
type how int

const (
	fail      how = iota // the step fails, once, and does nothing
	dieBefore            // hostd dies, and does nothing from here on
	dieAfter             // the same, when the step has had its effect
)

// cut lets one step of many fail, or ends hostd there. nil lets all pass.
type cut struct {
	mu   sync.Mutex // guards what follows
	n    int        // steps until now
	at   int        // 0: never
	how  how
	dead bool
	name string // of the step that was hit
}

var errDead = errors.New("hostd is dead")

func nothing() error { return nil }

func (c *cut) do(step string, effect func() error) error {
	if c == nil {
		return effect()
	}
	c.mu.Lock()
	if c.dead {
		c.mu.Unlock()
		return errDead
	}
	c.n++
	hit := c.n == c.at
	if hit {
		c.name = step
		c.dead = c.how != fail
	}
	c.mu.Unlock()
	switch {
	case !hit:
		return effect()
	case c.how == fail:
		return syscall.ENOSPC
	case c.how == dieAfter:
		_ = effect()
	}
	return errDead
}

func (c *cut) isDead() bool {
	if c == nil {
		return false
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.dead
}

// disarm lets all pass and names the step that was hit; empty: none was.
func (c *cut) disarm() string { c.mu.Lock(); defer c.mu.Unlock(); c.at = 0; return c.name }

// revive is the next hostd: nothing happens to it.
func (c *cut) revive() { c.mu.Lock(); defer c.mu.Unlock(); c.dead, c.at = false, 0 }

// memSnapshots is a store in memory.
type memSnapshots struct {
	cut  *cut
	mu   sync.Mutex
	all  map[string]memSnapshot // guarded by mu
	blob map[string]memSnapshot // in the blob store, guarded by mu
	bad  map[string]bool        // that cannot be loaded, or exported; guarded by mu
	open map[any]bool           // drafts and what came ahead, of this hostd; guarded by mu
	slow time.Duration          // what storing layers takes
}

var errDamaged = apierr.New(apierr.Internal, "it is damaged")

type memSnapshot struct{ sessionID, state string }

func newMemSnapshots() *memSnapshots {
	return &memSnapshots{all: map[string]memSnapshot{}, open: map[any]bool{}}
}

// memDraft is a draft; its Export is how many layers it has.
type memDraft struct {
	m         *memSnapshots
	sessionID string
	order     hostlink.Capture
	layers    int
}

func (m *memSnapshots) Draft(_ context.Context, sessionID string, o hostlink.Capture) (Draft, error) {
	d := &memDraft{m: m, sessionID: sessionID, order: o}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.open[d] = true
	return d, nil
}

func (d *memDraft) Layers(ctx context.Context, layers []machine.Layer) error {
	select {
	case <-time.After(d.m.slow):
	case <-ctx.Done():
		return ctx.Err()
	}
	return d.m.cut.do("store layers", func() error { d.layers = len(layers); return nil })
}

func (d *memDraft) Export(_ context.Context, have []string) (io.ReadCloser, error) {
	return io.NopCloser(strings.NewReader(strings.Repeat("l", d.layers-len(have)))), nil
}

func (d *memDraft) Write(ctx context.Context, c machine.Capture) (session.Snapshot, error) {
	return session.Snapshot{Memory: true, Driver: "fake", CPUClass: "c", Template: "t"}, d.m.put(ctx, "write snapshot", d.sessionID, d.order.SnapshotID, c.(*fakeCapture).state)
}

func (d *memDraft) Close() error { return d.m.close(d) }

// memHeld is layers that came ahead.
type memHeld struct {
	m      *memSnapshots
	layers int
}

func (h *memHeld) Release() error { return h.m.close(h) }

func (h *memHeld) Open([]byte) (machine.Capture, error) {
	return &fakeCapture{layers: make([]machine.Layer, h.layers)}, nil
}

func (m *memSnapshots) close(what any) error {
	return m.cut.do("let go", func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		if !m.open[what] && !m.cut.isDead() {
			return errors.New("it was closed before")
		}
		delete(m.open, what)
		return nil
	})
}

func (m *memSnapshots) Hold(_ context.Context, _ string, r io.Reader) (h Held, err error) {
	b, err := io.ReadAll(r)
	if err == nil {
		err = m.cut.do("take layers in", func() error {
			m.mu.Lock()
			defer m.mu.Unlock()
			h = &memHeld{m, len(b)}
			m.open[h] = true
			return nil
		})
	}
	return h, err
}

// begun is how many drafts and layers that came ahead there are.
func (m *memSnapshots) begun() int { m.mu.Lock(); defer m.mu.Unlock(); return len(m.open) }

func (m *memSnapshots) put(ctx context.Context, step, sessionID, id, state string) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	return m.cut.do(step, func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.all[id] = memSnapshot{sessionID, state}
		return nil
	})
}

func (m *memSnapshots) get(id string) (memSnapshot, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	s, ok := m.all[id]
	if m.bad[id] {
		return s, errDamaged
	}
	if !ok {
		return s, apierr.New(apierr.NotFound, "no snapshot %s", id)
	}
	return s, nil
}

func (m *memSnapshots) WritePortable(ctx context.Context, sessionID string, o hostlink.Capture, state io.Reader) (session.Snapshot, error) {
	b, err := io.ReadAll(state)
	if err != nil {
		return session.Snapshot{}, err
	}
	return session.Snapshot{}, m.put(ctx, "write snapshot", sessionID, o.SnapshotID, string(b))
}

func (m *memSnapshots) Load(_ context.Context, _, id string, _ []byte) (machine.Capture, error) {
	s, err := m.get(id)
	if s, ok := m.blob[id]; ok && err != nil {
		return &fakeCapture{state: s.state}, nil
	}
	return &fakeCapture{state: s.state}, err
}

func (m *memSnapshots) LoadPortable(_ context.Context, _, id string, _ []byte) (io.ReadCloser, error) {
	s, err := m.get(id)
	return io.NopCloser(bytes.NewReader([]byte(s.state))), err
}
func (m *memSnapshots) Has(id string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	_, ok := m.all[id]
	return ok
}

// Parts are the layers that came ahead.
func (m *memSnapshots) Parts(string) (all []string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for what := range m.open {
		if h, ok := what.(*memHeld); ok {
			all = append(all, make([]string, h.layers)...)
		}
	}
	return all
}
func (m *memSnapshots) Drop(id string) error  { return m.Delete(context.Background(), id, "") }
func (m *memSnapshots) List() (_, _ []string) { return nil, nil }
func (m *memSnapshots) Export(_ context.Context, id string, _ []string) (io.ReadCloser, error) {
	return m.LoadPortable(context.Background(), "", id, nil)
}

func (m *memSnapshots) Import(ctx context.Context, sessionID, id string, r io.Reader) error {
	b, err := io.ReadAll(r)
	if err != nil {
		return err
	}
	return m.put(ctx, "import snapshot", sessionID, id, string(b))
}

func (m *memSnapshots) Delete(_ context.Context, id, _ string) error {
	return m.cut.do("delete snapshot", func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		delete(m.all, id)
		return nil
	})
}

func (m *memSnapshots) DeleteSession(_ context.Context, sessionID string) error {
	return m.cut.do("delete snapshots", func() error {
		m.mu.Lock()
		defer m.mu.Unlock()
		for id, s := range m.all {
			if s.sessionID == sessionID {
				delete(m.all, id)
			}
		}
		return nil
	})
}

func (c *cut) steps() int { c.mu.Lock(); defer c.mu.Unlock(); return c.n }

// arm makes the n-th step from now the one.
func (c *cut) arm(n int, h how) { c.mu.Lock(); defer c.mu.Unlock(); c.at, c.how = c.n+n, h }
