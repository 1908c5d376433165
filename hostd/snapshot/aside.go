package snapshot

import (
	"errors"
	"os"
)

// broken is a manifest that could not be read, and why.
type broken struct {
	err error
	// aside: nobody will ever read it, and its packs are kept no longer. Else
	// another hostd may: it is of a later format, or the disk did not answer.
	aside bool
}

// lookAt decides over a manifest that cannot be read: what is damaged makes way,
// or no pack of any session would be removed any more. For Open, when nobody
// writes.
func (s *Store) lookAt(id string, err error) broken {
	var r *Refused
	if !errors.As(err, &r) || r.Reason == Version {
		s.log.Error("a snapshot cannot be read; until it can, packs without a snapshot stay too", "snapshot", id, "error", err)
		return broken{err: err}
	}
	from, to := s.path(manifests, id), s.path(aside, id)
	if e := errors.Join(s.fs.rename(from, to), s.fs.syncDir(s.path(aside, "")), s.fs.syncDir(s.path(manifests, ""))); e != nil {
		s.log.Error("a damaged manifest could not be moved aside", "snapshot", id, "error", e)
		return broken{err: err}
	}
	s.log.Error("a snapshot is damaged; its manifest was moved aside", "snapshot", id, "to", to, "error", err)
	return broken{err, true}
}

// readAside remembers what was moved aside before, so that who wants it hears
// why it is not here. A whole one may have come since.
func (s *Store) readAside() error {
	ids, err := s.names(aside)
	if err != nil {
		return err
	}
	for _, id := range ids {
		switch {
		case s.broken[id].err != nil:
		case s.entries[id] != nil:
			err = errors.Join(err, s.fs.remove(s.path(aside, id)))
		default:
			s.broken[id] = broken{s.whyAside(id), true}
		}
	}
	return err
}

func (s *Store) whyAside(id string) error {
	raw, err := os.ReadFile(s.path(aside, id))
	if err != nil {
		return err
	}
	p, err := parseManifest(raw)
	switch {
	case err != nil:
		return err
	case p.ID != id:
		return refuse(Foreign, "manifest %s is that of %s", id, p.ID)
	}
	return refuse(Damaged, "manifest %s was moved aside", id)
}
