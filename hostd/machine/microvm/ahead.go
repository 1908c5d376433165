package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"github.com/berth-dev/berth/hostd/machine"
)

// aheadName is the folder below Home of layers that came ahead of their machine.
const aheadName = ".ahead"

// ahead is those layers: files that a restore takes instead of reading the
// capture's. A layer's name stands for its content, so whoever brought it brought
// what is wanted.
type ahead struct {
	dir string

	mu   sync.Mutex     // guards what follows
	uses map[string]int // by layer: callers of AddLayers that have not dropped it
}

func newAhead(home string) *ahead {
	return &ahead{dir: filepath.Join(home, aheadName), uses: map[string]int{}}
}

func (a *ahead) path(name string) string { return filepath.Join(a.dir, layerFile(name)) }

// AddLayers takes layers in for a Restore to come; see machine.Keeper.
func (d *Driver) AddLayers(ctx context.Context, layers []machine.Layer) (drop func() error, err error) {
	var names []string
	drop = func() error { return d.ahead.drop(names) }
	for _, l := range layers {
		if !validLayer.MatchString(l.Name) {
			return nil, errors.Join(fmt.Errorf("add layer %q: not a name of a layer", l.Name), drop())
		}
		names = append(names, l.Name)
		if d.ahead.use(l.Name) > 1 {
			continue
		}
		if err := d.ahead.take(ctx, l); err != nil {
			return nil, errors.Join(fmt.Errorf("add layer %s: %w", l.Name, err), drop())
		}
	}
	return drop, nil
}

func (a *ahead) use(name string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.uses[name]++
	return a.uses[name]
}

// take writes a layer; it has its name when it is whole.
func (a *ahead) take(ctx context.Context, l machine.Layer) (err error) {
	if err := os.MkdirAll(a.dir, 0o700); err != nil {
		return err
	}
	from, err := l.Open()
	if err != nil {
		return err
	}
	defer from.Close()
	half := a.path(l.Name) + ".tmp"
	f, err := os.OpenFile(half, os.O_CREATE|os.O_TRUNC|os.O_RDWR, 0o600) // a crash may have left one
	if err != nil {
		return err
	}
	n, err := copySparse(f, io.LimitReader(until{ctx, from}, l.Size+1))
	if err == nil && n != l.Size {
		err = fmt.Errorf("%d bytes, want %d", n, l.Size)
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(half, a.path(l.Name))
	}
	if err != nil {
		return errors.Join(err, os.Remove(half))
	}
	return nil
}

// until reads until its context ends.
type until struct {
	ctx context.Context
	r   io.Reader
}

func (u until) Read(b []byte) (int, error) {
	if u.ctx.Err() != nil {
		return 0, context.Cause(u.ctx)
	}
	return u.r.Read(b)
}

// drop removes those layers that nobody else has brought. A machine that was
// made with them has names of its own for them.
func (a *ahead) drop(names []string) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	var errs []error
	for _, name := range names {
		if a.uses[name]--; a.uses[name] > 0 {
			continue
		}
		delete(a.uses, name)
		if err := os.Remove(a.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// give puts a layer into a machine's folder, if it is here in that size.
func (a *ahead) give(l machine.Layer, dir string) bool {
	info, err := os.Stat(a.path(l.Name))
	return err == nil && info.Size() == l.Size && os.Link(a.path(l.Name), filepath.Join(dir, layerFile(l.Name))) == nil
}

// sweep removes what an earlier hostd left.
func (a *ahead) sweep() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.uses) > 0 {
		return nil
	}
	return os.RemoveAll(a.dir)
}
