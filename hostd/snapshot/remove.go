package snapshot

import (
	"context"
	"errors"
	"fmt"
	"strings"
)

// Delete removes a snapshot here, and in the background from the blob store;
// what other snapshots refer to stays. One that is not here is removed from the
// blob store only. A crash in between is made good at the next Open.
func (s *Store) Delete(ctx context.Context, ref Ref) error {
	return s.take(ctx, ref, s.condemn)
}

// Forget removes a snapshot here only: another host, or the blob store, has it,
// and what is under way of an Upload is given up.
func (s *Store) Forget(ctx context.Context, ref Ref) error {
	return s.take(ctx, ref, func(ref Ref) error {
		if s.queue != nil {
			s.queue.forget(ref.ID)
		}
		return nil
	})
}

// take removes a snapshot here, after first.
func (s *Store) take(ctx context.Context, ref Ref, first func(Ref) error) (err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("delete snapshot %s: %w", ref.ID, err)
		}
	}()
	if err := ref.check(); err != nil {
		return err
	}
	end, err := s.begin(ctx, ref.SessionID)
	if err != nil {
		return err
	}
	defer end()
	if h, ok := s.have(ref.ID); ok && h.SessionID != ref.SessionID {
		return refuse(Foreign, "it is not one of session %s", ref.SessionID)
	}
	if err := first(ref); err != nil {
		return err
	}
	return s.drop(ref.ID)
}

func (r Ref) check() error {
	return errors.Join(checkID("snapshot", r.ID), checkID("session", r.SessionID))
}

// drop removes a snapshot's files here. The manifest goes first: without it the
// rest is a leftover, with it all must be there.
func (s *Store) drop(id string) error {
	if err := s.fs.remove(s.path(manifests, id)); err != nil {
		return err
	}
	s.mu.Lock()
	e := s.entries[id]
	delete(s.entries, id)
	delete(s.broken, id)
	s.mu.Unlock()
	errs := []error{s.fs.syncDir(s.path(manifests, "")), s.fs.remove(s.path(wanted, id)), s.fs.remove(s.path(stored, id)), s.fs.remove(s.path(aside, id))}
	if e != nil && errs[0] == nil { // a manifest that comes back after a power failure must find its packs
		errs = append(errs, s.unpin(e.names()...))
	}
	return errors.Join(errs...)
}

func (h header) names() []string {
	names := make([]string, 0, len(h.Packs))
	for _, p := range h.Packs {
		names = append(names, p.Name)
	}
	return names
}

// Sweep removes the snapshots here whose id keep refuses, and packs that nobody
// refers to. It leaves the blob store alone.
func (s *Store) Sweep(keep func(id string) bool) error {
	var errs []error
	for id, sessionID := range s.everyID() {
		if keep(id) {
			continue
		}
		errs = append(errs, s.sweepOne(id, sessionID))
	}
	if err := errors.Join(append(errs, s.sweepPacks())...); err != nil {
		return fmt.Errorf("sweep snapshots: %w", err)
	}
	return nil
}

// everyID gives all snapshots here with their sessions, the unreadable too.
func (s *Store) everyID() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := map[string]string{}
	for id, e := range s.entries {
		all[id] = e.SessionID
	}
	for id := range s.broken {
		all[id] = ""
	}
	return all
}

func (s *Store) sweepOne(id, sessionID string) error {
	end, err := s.begin(context.Background(), sessionID)
	if err != nil {
		return err
	}
	defer end()
	if s.queue != nil {
		s.queue.forget(id)
	}
	return s.drop(id)
}

// tidy removes what a crash left: half-written small files, marks without a
// snapshot, packs that nobody refers to. For Open, when nobody writes.
func (s *Store) tidy() error {
	var errs []error
	for _, sub := range []string{manifests, wanted, stored, condemned} {
		names, err := s.names(sub)
		errs = append(errs, err)
		for _, name := range names {
			_, broken := s.broken[name]
			stray := (sub == wanted || sub == stored) && s.entries[name] == nil && !broken
			if stray || strings.HasSuffix(name, ".tmp") {
				errs = append(errs, s.fs.remove(s.path(sub, name)))
			}
		}
	}
	return errors.Join(append(errs, s.sweepPacks())...)
}

// sweepPacks removes packs that nobody refers to. As long as there is a manifest
// that cannot be read now and might be later, nobody knows which those are.
func (s *Store) sweepPacks() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.broken {
		if !b.aside {
			return nil
		}
	}
	names, err := s.names(packs)
	errs := []error{err}
	for _, name := range names {
		if s.refs[name] == 0 {
			errs = append(errs, s.fs.remove(s.packPath(name)))
		}
	}
	return errors.Join(errs...)
}
