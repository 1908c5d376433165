package snapshot

import (
	"fmt"
	"io"
	"slices"

	"github.com/berth-dev/berth/hostd/machine"
)

// placed is a layer and the pack that it is in.
type placed struct {
	layer
	pack pack
	old  bool // the pack is the previous snapshot's
}

// layer puts a disk layer into the snapshot, and stores it unless it is stored
// already.
func (w *writing) layer(l machine.Layer) error {
	found, err := w.place(l)
	if err != nil {
		return err
	}
	if w.contents.Layers = append(w.contents.Layers, found.layer); found.old {
		w.refer(found.pack)
	} else {
		w.kept = append(w.kept, found.pack)
	}
	return nil
}

// ahead stores a layer before it is known whether there will be a snapshot.
func (w *writing) ahead(l machine.Layer) error {
	if slices.ContainsFunc(w.early, func(p placed) bool { return p.Name == l.Name }) {
		return nil
	}
	found, err := w.place(l)
	if err != nil {
		return err
	}
	w.early = append(w.early, found)
	return nil
}

// find looks for a layer that was stored ahead or is the previous snapshot's.
func (w *writing) find(l machine.Layer) (placed, bool) {
	for _, p := range w.early {
		if p.Name == l.Name && p.Size == l.Size {
			return p, true
		}
	}
	if w.prev == nil {
		return placed{}, false
	}
	for _, old := range w.prev.Layers {
		if old.Name == l.Name && old.Size == l.Size {
			return placed{old, w.prev.packs[old.Pack], true}, true
		}
	}
	return placed{}, false
}

// place finds a layer's pack or makes it.
func (w *writing) place(l machine.Layer) (placed, error) {
	if found, ok := w.find(l); ok {
		return found, nil
	}
	r, err := l.Open()
	if err != nil {
		return placed{}, err
	}
	sized := &counted{Reader: r}
	done, err := w.streamPack(sized, r.Close)
	if err != nil {
		return placed{}, err
	}
	if sized.n != l.Size {
		return placed{}, fmt.Errorf("has %d bytes, not %d: is it still being written?", sized.n, l.Size)
	}
	return placed{layer: layer{l.Name, l.Size, done.Name}, pack: done}, nil
}

type counted struct {
	io.Reader
	n int64
}

func (c *counted) Read(p []byte) (int, error) {
	n, err := c.Reader.Read(p)
	c.n += int64(n)
	return n, err
}
