package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
)

// Held is packs that came ahead of the snapshot that they are for. They are on
// the disk, but nothing there says whose they are: a crash makes leftovers of
// them.
type Held struct {
	s         *Store
	sessionID string
	packs     []pack
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
	h := &Held{s, sessionID, p.Packs}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[h] = true
	for _, k := range p.Packs {
		s.packs[k.Name] = k
	}
	return h, nil
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
