package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"

	"github.com/berth-dev/berth/hostd/machine"
)

// Loaded is a snapshot open for reading. It stays readable when the snapshot is
// deleted meanwhile.
type Loaded struct {
	Info     Info
	Memory   machine.Capture // nil for a portable snapshot
	Portable io.ReadCloser   // nil for one of memory
}

// Close lets go of the files.
func (l *Loaded) Close() error {
	if l.Memory != nil {
		return l.Memory.Close()
	}
	return l.Portable.Close()
}

// Load opens a snapshot, after fetching it from the blob store if it is not
// here: ErrNotFound when it is in neither. What cannot be trusted is refused
// (*Refused): the manifest here, the rest when it is read.
func (s *Store) Load(ctx context.Context, ref Ref, key Key) (*Loaded, error) {
	l, err := s.load(ctx, ref, key)
	if err != nil {
		return nil, fmt.Errorf("load snapshot %s: %w", ref.ID, err)
	}
	return l, nil
}

func (s *Store) load(ctx context.Context, ref Ref, key Key) (*Loaded, error) {
	if err := ref.check(); err != nil {
		return nil, err
	}
	if err := s.fetch(ctx, ref); err != nil {
		return nil, err
	}
	end, err := s.begin(ctx, ref.SessionID)
	if err != nil {
		return nil, err
	}
	defer end()
	p, err := s.openManifest(ref, key)
	if err != nil {
		return nil, err
	}
	info, _ := s.Info(ref.ID)
	o := &opened{s: s, previous: p, key: key, info: info, files: map[string]*os.File{}}
	if err := o.openFiles(); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	if p.header.Memory {
		return &Loaded{Info: info, Memory: o}, nil
	}
	r, err := o.stream(p.Portable, -1, o.Close)
	if err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return &Loaded{Info: info, Portable: r}, nil
}

// openManifest reads a manifest that is here and unseals it.
func (s *Store) openManifest(ref Ref, key Key) (*previous, error) {
	s.mu.Lock()
	here, broken := s.entries[ref.ID] != nil, s.broken[ref.ID]
	s.mu.Unlock()
	if broken.err != nil {
		return nil, broken.err
	}
	if !here {
		return nil, ErrNotFound
	}
	p, err := s.readManifest(ref.ID)
	if err != nil {
		return nil, err
	}
	if err := p.is(ref); err != nil {
		return nil, err
	}
	c, err := p.open(key)
	if err != nil {
		return nil, err
	}
	prev := &previous{header: p.header, contents: c, packs: map[string]pack{}}
	for _, k := range p.Packs {
		prev.packs[k.Name] = k
	}
	return prev, prev.checkContents()
}

// checkContents refuses contents that name packs which the header has not.
func (p *previous) checkContents() error {
	need := []string{p.Portable}
	if p.header.Memory {
		need = []string{p.Table, p.Device}
	}
	for _, l := range p.Layers {
		need = append(need, l.Pack)
	}
	for _, s := range p.Slots {
		if s.Pack != "" {
			need = append(need, s.Pack)
		}
	}
	for _, name := range need {
		if _, ok := p.packs[name]; !ok {
			return refuse(Damaged, "the manifest has no pack %q", name)
		}
	}
	if len(p.Slots) >= zeroSlot {
		return refuse(Damaged, "the manifest has %d slots", len(p.Slots))
	}
	return nil
}

// openPackFile opens a pack that must be here with the size it had.
func (s *Store) openPackFile(p pack) (*os.File, error) {
	f, err := os.Open(s.packPath(p.Name))
	if errors.Is(err, os.ErrNotExist) {
		return nil, refuse(Missing, "pack %s is not here", p.Name)
	}
	if err != nil {
		return nil, err
	}
	st, err := f.Stat()
	if err == nil && st.Size() != p.Size {
		err = refuse(Truncated, "pack %s has %d bytes, not %d", p.Name, st.Size(), p.Size)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// opened is a machine.Capture made of a snapshot's files. Its parts may be read
// at once.
type opened struct {
	s *Store
	*previous
	key   Key
	info  Info
	files map[string]*os.File // by pack
}

var _ machine.Capture = (*opened)(nil)

func (o *opened) openFiles() error {
	for name, p := range o.packs {
		f, err := o.s.openPackFile(p)
		if err != nil {
			return err
		}
		o.files[name] = f
	}
	return nil
}

func (o *opened) Driver() string   { return o.header.Driver }
func (o *opened) CPUClass() string { return o.header.CPUClass }
func (o *opened) Template() string { return o.header.Template }

// Close lets go of the files; readers that are still open fail.
func (o *opened) Close() error {
	var errs []error
	for name, f := range o.files {
		errs = append(errs, f.Close())
		delete(o.files, name)
	}
	return errors.Join(errs...)
}

func (o *opened) reader(name string, k kind, ahead int) (*packReader, error) {
	f := o.files[name]
	if f == nil {
		return nil, os.ErrClosed
	}
	return openPack(f, o.packs[name].Size, o.key, o.SessionID, k, name, ahead)
}

func (o *opened) stream(name string, size int64, done func() error) (io.ReadCloser, error) {
	p, err := o.reader(name, kindStream, depth)
	if err != nil {
		return nil, err
	}
	return newStreamReader(p, size, done), nil
}

func (o *opened) Device() (io.ReadCloser, error) { return o.stream(o.previous.Device, -1, nil) }

func (o *opened) Layers() []machine.Layer {
	all := make([]machine.Layer, 0, len(o.previous.Layers))
	for _, l := range o.previous.Layers {
		all = append(all, machine.Layer{Name: l.Name, Size: l.Size, Open: func() (io.ReadCloser, error) {
			return o.stream(l.Pack, l.Size, nil)
		}})
	}
	return all
}

// Pages follows the table and takes each page from its pack; table and packs
// are in the same order, so each is read once from front to back.
func (o *opened) Pages() iter.Seq2[machine.Page, error] {
	return func(yield func(machine.Page, error) bool) {
		if err := o.eachPage(func(p machine.Page) bool { return yield(p, nil) }); err != nil {
			yield(machine.Page{}, err)
		}
	}
}

func (o *opened) eachPage(yield func(machine.Page) bool) error {
	runs, err := o.runs()
	defer func() {
		for _, r := range runs {
			if r != nil {
				r.close()
			}
		}
	}()
	if err != nil {
		return err
	}
	p, err := o.reader(o.Table, kindTable, 2)
	if err != nil {
		return err
	}
	table := newTableReader(newStreamReader(p, -1, nil))
	defer table.close()
	for {
		r, err := table.next()
		if err == io.EOF && table.count != o.header.Pages {
			return refuse(Truncated, "the table has %d pages of %d", table.count, o.header.Pages)
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		data, err := pageOf(runs, r)
		if err != nil {
			return err
		}
		if !yield(machine.Page{Index: r.index, Data: data}) {
			return nil
		}
	}
}

// runs opens the packs of pages, by slot; slots of one pack share its reader.
func (o *opened) runs() ([]*run, error) {
	runs := make([]*run, len(o.Slots))
	shared := map[string]*run{}
	for _, s := range o.Slots {
		shared[s.Pack] = nil
	}
	ahead := max(2, 2*depth/max(1, len(shared)))
	for i, s := range o.Slots {
		if s.Pack == "" {
			continue
		}
		if shared[s.Pack] == nil {
			p, err := o.reader(s.Pack, kindPages, ahead)
			if err != nil {
				return runs, err
			}
			shared[s.Pack] = &run{p: p, name: s.Pack}
		}
		runs[i] = shared[s.Pack]
	}
	return runs, nil
}

// pageOf gives the page of a record, nil for zeros.
func pageOf(runs []*run, r record) ([]byte, error) {
	if r.slot == zeroSlot {
		return nil, nil
	}
	if int(r.slot) >= len(runs) || runs[r.slot] == nil {
		return nil, refuse(Damaged, "page %d is in pack %d of %d", r.index, r.slot, len(runs))
	}
	return runs[r.slot].find(r.index, r.hash)
}

// run reads one pack of pages from front to back.
type run struct {
	p    *packReader
	name string
	cur  *chunk
	i    int    // in cur
	last uint64 // index of the page before
	any  bool   // there was a page before
}

func (r *run) close() {
	r.drop()
	r.p.close()
}

// find goes to the page of that index, which must have that hash.
func (r *run) find(index uint64, h pageHash) ([]byte, error) {
	for {
		if r.cur == nil || r.i == len(r.cur.index) {
			if err := r.advance(index); err != nil {
				return nil, err
			}
			continue
		}
		at := r.cur.index[r.i]
		if r.any && at <= r.last {
			return nil, refuse(Damaged, "pack %s is out of order", r.name)
		}
		if at > index {
			return nil, refuse(Damaged, "page %d is not in pack %s", index, r.name)
		}
		i := r.i
		r.i, r.last, r.any = r.i+1, at, true
		if at < index {
			continue
		}
		if r.cur.hash[i] != h {
			return nil, refuse(Damaged, "page %d in pack %s is not the one in the table", index, r.name)
		}
		return r.cur.page(i), nil
	}
}

func (r *run) drop() {
	if r.cur != nil {
		r.p.release(r.cur)
		r.cur = nil
	}
}

func (r *run) advance(index uint64) error {
	r.drop()
	c, err := r.p.next()
	if err == io.EOF {
		return refuse(Damaged, "page %d is not in pack %s", index, r.name)
	}
	if err != nil {
		return err
	}
	r.cur, r.i = c, 0
	return nil
}
