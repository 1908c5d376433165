package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/berth-dev/berth/hostd/machine"
)

// Held is packs that came ahead of the snapshot that they are for. They are on
// the disk, but nothing there says whose they are: a crash makes leftovers of
// them.
type Held struct {
	s         *Store
	sessionID string
	packs     []pack
	manifest  parsed // of the draft
}

// Hold takes a Draft's Export in, so that the snapshot's own Export may leave out
// what is in it (Packs). It needs no key, checks as Import does, and leaves
// nothing on error. The packs stay until Release.
func (s *Store) Hold(ctx context.Context, sessionID string, r io.Reader) (*Held, error) {
	h, err := s.hold(ctx, sessionID, r)
	if err != nil {
		return nil, fmt.Errorf("hold what comes ahead for session %s: %w", sessionID, err)
	}
	return h, nil
}

func (s *Store) hold(ctx context.Context, sessionID string, r io.Reader) (*Held, error) {
	if err := checkID("session", sessionID); err != nil {
		return nil, err
	}
	end, err := s.begin(ctx, sessionID)
	if err != nil {
		return nil, err
	}
	defer end()
	r = heeding{ctx, r}
	p, err := readExport(r)
	if err != nil {
		return nil, err
	}
	if err := p.is(Ref{p.ID, sessionID}); err != nil {
		return nil, err
	}
	names := p.names()
	s.pin(names...)
	if err := s.takePacks(p, fromStream(r)); err != nil {
		return nil, errors.Join(err, s.unpin(names...))
	}
	h := &Held{s, sessionID, p.Packs, p}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[h] = true
	for _, k := range p.Packs {
		s.packs[k.Name] = k
	}
	return h, nil
}

// Open gives the disk layers that are held, to be read until Close: *Refused where
// the key is another one. Nothing else is in it.
func (h *Held) Open(key Key) (machine.Capture, error) {
	c, err := h.manifest.open(key)
	if err != nil {
		return nil, fmt.Errorf("what came ahead for session %s: %w", h.sessionID, err)
	}
	p := &previous{header: h.manifest.header, contents: c, packs: map[string]pack{}}
	for _, k := range h.packs {
		p.packs[k.Name] = k
	}
	o := &opened{s: h.s, previous: p, key: key, files: map[string]*os.File{}}
	if err := o.openFiles(); err != nil {
		return nil, errors.Join(err, o.Close())
	}
	return o, nil
}

// Release lets go of the packs; those that no snapshot took in go. Once.
func (h *Held) Release() error {
	h.s.mu.Lock()
	delete(h.s.held, h)
	h.s.mu.Unlock()
	names := make([]string, 0, len(h.packs))
	for _, p := range h.packs {
		names = append(names, p.Name)
	}
	if err := h.s.unpin(names...); err != nil {
		return fmt.Errorf("let go of what came ahead for session %s: %w", h.sessionID, err)
	}
	return nil
}
