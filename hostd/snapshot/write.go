package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-dev/berth/hostd/machine"
)

// Order asks for a snapshot.
type Order struct {
	Ref
	Key Key
	// Previous is the snapshot from which this machine was restored, or empty:
	// what has not changed since is taken from it. One that is not here, or
	// cannot be read with Key, is passed over.
	Previous string
}

// Write stores a capture of memory. When it returns everything is on the disk.
// On error (a full disk is syscall.ENOSPC) nothing of it is left. ErrExists when
// there is a snapshot of that id. Memory in use does not grow with the capture.
func (s *Store) Write(ctx context.Context, o Order, c machine.Capture) (Info, error) {
	return s.write(ctx, o, func(w *writing) error { return w.memory(c) })
}

// WritePortable stores what the agent exported, as Write does a capture.
func (s *Store) WritePortable(ctx context.Context, o Order, r io.Reader) (Info, error) {
	return s.write(ctx, o, func(w *writing) (err error) {
		w.contents.Portable, err = w.stream(r, nil)
		return err
	})
}

func (s *Store) write(ctx context.Context, o Order, fill func(*writing) error) (info Info, err error) {
	d, err := s.Draft(ctx, o)
	if err != nil {
		return Info{}, err
	}
	err = d.write(ctx, fill, &info)
	if err = errors.Join(err, d.Close()); err != nil {
		return Info{}, err
	}
	return info, nil
}

// writing is a snapshot on its way to the disk.
type writing struct {
	s        *Store
	ctx      context.Context // of the call that writes
	order    Order
	header   header
	contents contents
	prev     *previous
	early    []placed      // layers that were stored before the machine stopped
	own      []*packWriter // all that were begun here
	kept     []pack        // what of own the snapshot needs
	old      []pack        // those of others that it refers to
	pinned   []string      // names of own and of prev's, until close
	took     struct{ pages, sync time.Duration }
}

// previous is an earlier snapshot of the session, open.
type previous struct {
	header
	contents
	packs map[string]pack
}

// findPrevious looks for something to refer to. Not finding it costs space only.
func (w *writing) findPrevious() {
	if w.order.Previous == "" {
		return
	}
	prev, err := w.s.openManifest(Ref{w.order.Previous, w.order.SessionID}, w.order.Key)
	if err != nil {
		w.s.log.Info("a snapshot is written whole", "session", w.order.SessionID, "snapshot", w.order.ID,
			"previous", w.order.Previous, "error", err)
		return
	}
	w.prev, w.pinned = prev, prev.names() // it may be removed before the machine has stopped
	w.s.pin(w.pinned...)
}

// newPack begins a pack of this snapshot.
func (w *writing) newPack(k kind) (*packWriter, error) {
	p, err := newPack(w.s.fs, func(name string) string {
		w.s.pin(name) // before there is a file that Sweep could take for a leftover
		w.pinned = append(w.pinned, name)
		return w.s.packPath(name)
	}, w.order.Key, w.order.SessionID, k)
	if p != nil {
		w.own = append(w.own, p)
	}
	return p, err
}

// keep finishes a pack that the snapshot needs.
func (w *writing) keep(p *packWriter) error {
	done, err := p.finish()
	w.kept = append(w.kept, done)
	return err
}

// refer notes packs of earlier snapshots that this one needs.
func (w *writing) refer(p pack) { w.old = append(w.old, p) }

// memory stores the parts of a machine's capture.
func (w *writing) memory(c machine.Capture) error {
	h := &w.header
	h.Memory, h.Driver, h.CPUClass, h.Template = true, c.Driver(), c.CPUClass(), c.Template()
	if w.prev != nil && w.prev.Template != h.Template { // what differs from another template says nothing here
		w.prev = nil
	}
	began := time.Now()
	if err := w.pages(c); err != nil {
		return fmt.Errorf("pages: %w", err)
	}
	w.took.pages = time.Since(began)
	device, err := c.Device()
	if err != nil {
		return fmt.Errorf("device state: %w", err)
	}
	if w.contents.Device, err = w.stream(device, device.Close); err != nil {
		return fmt.Errorf("device state: %w", err)
	}
	for _, l := range c.Layers() {
		if err := w.layer(l); err != nil {
			return fmt.Errorf("layer %s: %w", l.Name, err)
		}
	}
	return nil
}

// stream stores what r gives as a pack of the snapshot; done, if any, is called
// in any case.
func (w *writing) stream(r io.Reader, done func() error) (name string, err error) {
	p, err := w.streamPack(r, done)
	if err == nil {
		w.kept = append(w.kept, p)
	}
	return p.Name, err
}

// streamPack is stream for a pack that the snapshot may come to need.
func (w *writing) streamPack(r io.Reader, done func() error) (_ pack, err error) {
	if done != nil {
		defer func() { err = errors.Join(err, done()) }()
	}
	p, err := w.newPack(kindStream)
	if err != nil {
		return pack{}, err
	}
	c := newChunker(p)
	defer c.close()
	if _, err := io.CopyBuffer(c, heeding{w.ctx, r}, make([]byte, 256<<10)); err != nil {
		return pack{}, err
	}
	if err := c.flush(); err != nil {
		return pack{}, err
	}
	return p.finish()
}

// heeding ends a stream when its context does.
type heeding struct {
	ctx context.Context
	r   io.Reader
}

func (h heeding) Read(p []byte) (int, error) {
	if h.ctx.Err() != nil {
		return 0, context.Cause(h.ctx)
	}
	return h.r.Read(p)
}

// commit brings the packs to the disk, then the manifest: from there on the
// snapshot is one.
func (w *writing) commit() (Info, error) {
	began := time.Now()
	if err := w.sync(w.needed()); err != nil {
		return Info{}, err
	}
	w.took.sync = time.Since(began)
	for _, p := range w.kept {
		w.header.Bytes += p.Size
	}
	w.header.Packs = append(w.kept, w.referred()...)
	raw, err := encodeManifest(w.order.Key, w.header, w.contents)
	if err != nil {
		return Info{}, err
	}
	info, err := w.s.enter(raw, w.header, false)
	w.s.log.Debug("snapshot written", "snapshot", w.order.ID, "bytes", w.header.Bytes, "pages", w.header.Pages,
		"took", time.Since(w.header.Created), "of it pages", w.took.pages, "sync", w.took.sync, "manifest", time.Since(began)-w.took.sync)
	return info, err
}

// needed gives the packs begun here that the snapshot needs.
func (w *writing) needed() (some []*packWriter) {
	for _, p := range w.own {
		if slices.ContainsFunc(w.kept, func(k pack) bool { return k.Name == p.name }) {
			some = append(some, p)
		}
	}
	return some
}

// sync brings packs to the disk, side by side, those that are not there yet.
func (w *writing) sync(some []*packWriter) error {
	var g errgroup.Group
	for _, p := range some {
		if !p.synced {
			g.Go(p.f.sync)
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, p := range some {
		p.synced = true
	}
	return w.s.fs.syncDir(w.s.path(packs, ""))
}

// referred gives the packs of others, each once.
func (w *writing) referred() (all []pack) {
	seen := map[string]bool{}
	for _, p := range w.old {
		if !seen[p.Name] {
			seen[p.Name] = true
			all = append(all, p)
		}
	}
	return all
}

// enter writes a manifest whose packs are all on the disk, and pinned.
func (s *Store) enter(raw []byte, h header, durable bool) (Info, error) {
	if durable {
		if err := s.fs.put(s.path(stored, h.ID), nil); err != nil {
			return Info{}, err
		}
	}
	if err := s.fs.put(s.path(manifests, h.ID), raw); err != nil {
		return Info{}, errors.Join(err, s.fs.remove(s.path(stored, h.ID)))
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.addLocked(h, durable)
	return s.entries[h.ID].info(), nil
}
