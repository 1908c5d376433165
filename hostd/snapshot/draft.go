package snapshot

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
)

// Draft is a snapshot of a machine that still runs. What of it stands still
// already is stored, and given to another host, before the machine stops. A
// draft is nothing to anybody else: it has no manifest, and a crash leaves packs
// that the next Open removes. One goroutine owns it, and must close it.
type Draft struct {
	w *writing
}

// Draft begins a snapshot. ErrExists when there is one of that id.
func (s *Store) Draft(ctx context.Context, o Order) (*Draft, error) {
	d, err := s.draft(ctx, o)
	if err != nil {
		return nil, fmt.Errorf("write snapshot %s: %w", o.ID, err)
	}
	return d, nil
}

func (s *Store) draft(ctx context.Context, o Order) (*Draft, error) {
	if err := o.check(); err != nil {
		return nil, err
	}
	end, err := s.begin(ctx, o.SessionID)
	if err != nil {
		return nil, err
	}
	defer end()
	if err := s.fresh(o.ID); err != nil {
		return nil, err
	}
	w := &writing{s: s, order: o, header: header{ID: o.ID, SessionID: o.SessionID}}
	w.findPrevious()
	return &Draft{w}, nil
}

// Layers stores layers that stand still, those that neither the previous
// snapshot nor an earlier call has. When it returns they are on the disk. After
// an error the draft is of no use any more.
func (d *Draft) Layers(ctx context.Context, layers []machine.Layer) error {
	return d.work(ctx, func() error {
		for _, l := range layers {
			if err := d.w.ahead(l); err != nil {
				return fmt.Errorf("layer %s: %w", l.Name, err)
			}
		}
		return d.w.sync(d.w.own)
	})
}

// Export gives the layers stored so far, and the pages of the previous snapshot,
// of which most will be needed, as one stream, sealed, for Hold on another host;
// have names packs that the other host has.
func (d *Draft) Export(ctx context.Context, have ...string) (e *Exported, err error) {
	err = d.work(ctx, func() error {
		h, c := header{ID: d.w.order.ID, SessionID: d.w.order.SessionID, Created: time.Now().UTC()}, contents{}
		h.Packs = d.w.oldPages()
		for _, l := range d.w.early {
			c.Layers, h.Packs = append(c.Layers, l.layer), append(h.Packs, l.pack)
		}
		raw, err := encodeManifest(d.w.order.Key, h, c)
		if err != nil {
			return err
		}
		p, err := parseManifest(raw)
		if err == nil {
			e, err = d.w.s.exportPacks(p, have)
		}
		return err
	})
	return e, err
}

// oldPages gives the packs of the previous snapshot's pages.
func (w *writing) oldPages() (all []pack) {
	slots, _ := w.oldSlots()
	for _, s := range slots[1:] {
		all = append(all, w.prev.packs[s.Pack])
	}
	return all
}

// Write makes the draft the snapshot of the machine, which has been stopped. As
// Store.Write; the draft is to be closed all the same.
func (d *Draft) Write(ctx context.Context, c machine.Capture) (info Info, err error) {
	err = d.write(ctx, func(w *writing) error { return w.memory(c) }, &info)
	return info, err
}

func (d *Draft) write(ctx context.Context, fill func(*writing) error, info *Info) error {
	return d.work(ctx, func() (err error) {
		if err := d.w.s.fresh(d.w.order.ID); err != nil {
			return err
		}
		d.w.header.Created = time.Now().UTC()
		if err := fill(d.w); err != nil {
			return err
		}
		*info, err = d.w.commit()
		return err
	})
}

// work does something while nobody else changes the session's snapshots.
func (d *Draft) work(ctx context.Context, do func() error) error {
	end, err := d.w.s.begin(ctx, d.w.order.SessionID)
	if err == nil {
		d.w.ctx = ctx
		err = do()
		end()
	}
	if err != nil {
		return fmt.Errorf("write snapshot %s: %w", d.w.order.ID, err)
	}
	return nil
}

// Close lets go of everything; packs that no manifest took in go.
func (d *Draft) Close() error {
	var errs []error
	for _, p := range d.w.own {
		errs = append(errs, p.f.f.Close())
	}
	if err := errors.Join(append(errs, d.w.s.unpin(d.w.pinned...))...); err != nil {
		return fmt.Errorf("write snapshot %s: %w", d.w.order.ID, err)
	}
	return nil
}
