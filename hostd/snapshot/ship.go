package snapshot

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
)

// Exported is a sealed snapshot as one stream for another host: "BERTHSX", 1,
// the manifest with its length before it (u32), and for each pack of the
// manifest a byte, 1 with the pack's bytes after it or 0 for one that the
// receiver has. A Draft's is the same, of a manifest that knows layers only.
type Exported struct {
	io.Reader
	Size   int64 // bytes of the stream
	closes []io.Closer
}

// Close lets go of the files.
func (e *Exported) Close() error {
	var errs []error
	for _, c := range e.closes {
		errs = append(errs, c.Close())
	}
	return errors.Join(errs...)
}

// Export gives a snapshot that is here to another host; it needs no key. have
// names packs that the receiver holds (Packs on its side) and that are left out.
// The stream stays whole when the snapshot is deleted meanwhile.
func (s *Store) Export(ctx context.Context, ref Ref, have ...string) (*Exported, error) {
	e, err := s.export(ctx, ref, have)
	if err != nil {
		return nil, fmt.Errorf("export snapshot %s: %w", ref.ID, err)
	}
	return e, nil
}

func (s *Store) export(ctx context.Context, ref Ref, have []string) (*Exported, error) {
	if err := ref.check(); err != nil {
		return nil, err
	}
	end, err := s.begin(ctx, ref.SessionID)
	if err != nil {
		return nil, err
	}
	defer end()
	if _, ok := s.have(ref.ID); !ok {
		return nil, ErrNotFound
	}
	p, err := s.readManifest(ref.ID)
	if err != nil {
		return nil, err
	}
	if err := p.is(ref); err != nil {
		return nil, err
	}
	return s.exportPacks(p, have)
}

func (s *Store) exportPacks(p parsed, have []string) (*Exported, error) {
	e := &Exported{}
	first := binary.BigEndian.AppendUint32([]byte(exportMagic), uint32(len(p.raw)))
	parts := []io.Reader{bytes.NewReader(append(first, p.raw...))}
	e.Size = int64(len(first) + len(p.raw))
	for _, k := range p.Packs {
		if slices.Contains(have, k.Name) {
			parts = append(parts, bytes.NewReader([]byte{0}))
			e.Size++
			continue
		}
		f, err := s.openPackFile(k)
		if err != nil {
			return nil, errors.Join(err, e.Close())
		}
		e.closes = append(e.closes, f)
		parts = append(parts, bytes.NewReader([]byte{1}), io.NewSectionReader(f, 0, k.Size))
		e.Size += 1 + k.Size
	}
	e.Reader = io.MultiReader(parts...)
	return e, nil
}

// Import takes another host's Export in; it needs no key, so it checks sizes
// and checksums, and Load checks the seals. On error nothing of it is left; one
// that is here already is left as it is, and r unread. A pack that was left out
// and is not here is *Refused with Missing: ask again, without leaving out.
func (s *Store) Import(ctx context.Context, ref Ref, r io.Reader) error {
	if err := s.importFrom(ctx, ref, r); err != nil {
		return fmt.Errorf("import snapshot %s: %w", ref.ID, err)
	}
	return nil
}

func (s *Store) importFrom(ctx context.Context, ref Ref, r io.Reader) error {
	if err := ref.check(); err != nil {
		return err
	}
	end, err := s.begin(ctx, ref.SessionID)
	if err != nil {
		return err
	}
	defer end()
	if _, ok := s.have(ref.ID); ok {
		return nil
	}
	if err := s.fresh(ref.ID); err != nil {
		return err
	}
	r = heeding{ctx, r}
	p, err := readExport(r)
	if err != nil {
		return err
	}
	return s.takeIn(ref, p, false, fromStream(r))
}

// fromStream gives the packs of an export, which must end with the last.
func fromStream(r io.Reader) source {
	return source{func(k pack, here bool) (io.ReadCloser, error) { return nextPack(r, k, here) }, func() error {
		if n, err := io.ReadFull(r, make([]byte, 1)); n > 0 {
			return refuse(Damaged, "the stream goes on after its end")
		} else if err != io.EOF {
			return err
		}
		return nil
	}}
}

// readExport reads the stream up to the first pack.
func readExport(r io.Reader) (parsed, error) {
	first := make([]byte, len(exportMagic)+4)
	if _, err := io.ReadFull(r, first); err != nil {
		return parsed{}, short(err, "the stream")
	}
	if got := first[:len(exportMagic)]; string(got) != exportMagic {
		if string(got[:7]) == exportMagic[:7] {
			return parsed{}, refuse(Version, "stream of version %d, this host reads 1", got[7])
		}
		return parsed{}, refuse(Damaged, "no snapshot comes in the stream")
	}
	n := binary.BigEndian.Uint32(first[len(exportMagic):])
	if n > maxManifest {
		return parsed{}, refuse(Damaged, "manifest of %d bytes", n)
	}
	var raw bytes.Buffer // grows with what really comes
	if _, err := io.CopyN(&raw, r, int64(n)); err != nil {
		return parsed{}, short(err, "the stream")
	}
	return parseManifest(raw.Bytes())
}

// nextPack gives the stream's next pack, nil if it was left out. One that came
// although it is here is read over.
func nextPack(r io.Reader, k pack, here bool) (io.ReadCloser, error) {
	var flag [1]byte
	if _, err := io.ReadFull(r, flag[:]); err != nil {
		return nil, short(err, "the stream")
	}
	switch {
	case flag[0] > 1:
		return nil, refuse(Damaged, "the stream is out of step")
	case flag[0] == 1 && here:
		_, err := io.CopyN(io.Discard, r, k.Size)
		return nil, short(err, "the stream")
	case flag[0] == 0 && !here:
		return nil, refuse(Missing, "pack %s was left out and is not here", k.Name)
	case flag[0] == 0:
		return nil, nil
	}
	return io.NopCloser(io.LimitReader(r, k.Size)), nil
}

// source gives packs: next is asked for each in turn and gives nil for one that
// is here, done is called after the last.
type source struct {
	next func(k pack, here bool) (io.ReadCloser, error)
	done func() error
}

// takeIn makes a snapshot here of its manifest and packs.
func (s *Store) takeIn(ref Ref, p parsed, durable bool, from source) (err error) {
	if err := p.is(ref); err != nil {
		return err
	}
	names := p.names()
	s.pin(names...)
	defer func() { err = errors.Join(err, s.unpin(names...)) }()
	if err := s.takePacks(p, from); err != nil {
		return err
	}
	_, err = s.enter(p.raw, p.header, durable)
	return err
}

// takePacks brings a manifest's packs to the disk, those that are not here. They
// must be pinned.
func (s *Store) takePacks(p parsed, from source) error {
	for _, k := range p.Packs {
		here, err := s.holds(k)
		if err != nil {
			return err
		}
		r, err := from.next(k, here)
		if err != nil {
			return err
		}
		if r == nil {
			continue
		}
		if err := errors.Join(s.receive(k, r), r.Close()); err != nil {
			return err
		}
	}
	return errors.Join(from.done(), s.fs.syncDir(s.path(packs, "")))
}

// holds says whether a pack is here; another one of that name is refused.
func (s *Store) holds(k pack) (bool, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	mine, ok := s.packs[k.Name]
	if ok && (mine.Size != k.Size || !bytes.Equal(mine.Sum, k.Sum)) {
		return false, refuse(Foreign, "another pack %s is here", k.Name)
	}
	return ok, nil
}

// receive writes a pack as it comes and compares size and checksum.
func (s *Store) receive(k pack, r io.Reader) (err error) {
	path := s.packPath(k.Name)
	if err := s.fs.remove(path); err != nil { // left by a crash: nobody refers to it
		return err
	}
	f, err := s.fs.create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.f.Close()) }()
	sum := sha256.New()
	n, err := io.CopyBuffer(io.MultiWriter(f, sum), io.LimitReader(r, k.Size+1), make([]byte, 256<<10))
	switch {
	case err != nil:
		return err
	case n != k.Size:
		return refuse(Truncated, "pack %s came with %d bytes of %d", k.Name, n, k.Size)
	case !bytes.Equal(sum.Sum(nil), k.Sum):
		return refuse(Damaged, "checksum of pack %s is wrong", k.Name)
	}
	return f.sync()
}
