package snapshot

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

// In the blob store a session's snapshots lie under snapshots/<session>/:
//
//	<id>.manifest   the snapshot is whole
//	<id>.claim      its manifest, put before anything else: it is on its way
//	<pack>.pack     in which a manifest or claim is interested
//
// A pack goes when no manifest and no claim names it. Hosts do not know of each
// other: the one that uploads claims first and looks for its packs again in the
// end; the one that collects looks at manifests and claims just before it
// removes, and not for longer than collectTime. An upload would have to fit
// whole between another host's look and its removal to lose a pack.

const collectTime = 10 * time.Second

func folderKey(sessionID string) string   { return "snapshots/" + sessionID + "/" }
func manifestKey(r Ref) string            { return folderKey(r.SessionID) + r.ID + ".manifest" }
func claimKey(r Ref) string               { return folderKey(r.SessionID) + r.ID + ".claim" }
func packKey(sessionID, pk string) string { return folderKey(sessionID) + pk + ".pack" }

// fetch brings a snapshot here from the blob store, unless it is here.
func (s *Store) fetch(ctx context.Context, ref Ref) error {
	end, err := s.begin(ctx, ref.SessionID)
	if err != nil {
		return err
	}
	defer end()
	s.mu.Lock()
	here, none := s.entries[ref.ID] != nil, ErrNotFound
	if b := s.broken[ref.ID]; b.err != nil { // there may be a whole one
		none = b.err
	}
	s.mu.Unlock()
	if here {
		return nil
	}
	if s.bucket == nil || s.marked(condemned, ref.ID) {
		return none
	}
	p, err := s.fetchManifest(ctx, manifestKey(ref))
	if errors.Is(err, fs.ErrNotExist) {
		return none
	}
	if err != nil {
		return err
	}
	return s.takeIn(ref, p, true, source{func(k pack, here bool) (io.ReadCloser, error) {
		if here {
			return nil, nil
		}
		r, err := s.bucket.Get(ctx, packKey(ref.SessionID, k.Name))
		if errors.Is(err, fs.ErrNotExist) {
			err = refuse(Missing, "pack %s is not in the blob store", k.Name)
		}
		return r, err
	}, func() error { return nil }})
}

func (s *Store) fetchManifest(ctx context.Context, key string) (parsed, error) {
	r, err := s.bucket.Get(ctx, key)
	if err != nil {
		return parsed{}, err
	}
	raw, err := io.ReadAll(io.LimitReader(r, maxManifest+1))
	if err := errors.Join(err, r.Close()); err != nil {
		return parsed{}, err
	}
	return parseManifest(raw)
}

// upload brings a snapshot to the blob store. Packs that are there stay.
func (s *Store) upload(ctx context.Context, h header) error {
	ref := Ref{h.ID, h.SessionID}
	raw, err := os.ReadFile(s.path(manifests, h.ID))
	if err != nil {
		return err
	}
	if err := s.bucket.Put(ctx, claimKey(ref), bytes.NewReader(raw)); err != nil {
		return err
	}
	if err := s.uploadPacks(ctx, h); err != nil {
		return err
	}
	if err := s.bucket.Put(ctx, manifestKey(ref), bytes.NewReader(raw)); err != nil {
		return err
	}
	if err := s.uploadPacks(ctx, h); err != nil { // what another host removed before it saw the claim
		return err
	}
	return s.bucket.Delete(ctx, claimKey(ref))
}

func (s *Store) uploadPacks(ctx context.Context, h header) error {
	for _, p := range h.Packs {
		key := packKey(h.SessionID, p.Name)
		size, err := s.bucket.Size(ctx, key)
		if err == nil && size == p.Size {
			continue
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		f, err := s.openPackFile(p)
		if err != nil {
			return err
		}
		if err := errors.Join(s.bucket.Put(ctx, key, f), f.Close()); err != nil {
			return err
		}
	}
	return nil
}

// expunge removes a snapshot from the blob store.
func (s *Store) expunge(ctx context.Context, ref Ref) error {
	if err := errors.Join(s.bucket.Delete(ctx, manifestKey(ref)), s.bucket.Delete(ctx, claimKey(ref))); err != nil {
		return err
	}
	return s.collect(ctx, ref.SessionID)
}

// collect removes a session's packs that no manifest and no claim names.
func (s *Store) collect(ctx context.Context, sessionID string) error {
	ctx, cancel := context.WithTimeout(ctx, collectTime)
	defer cancel()
	packs := map[string]bool{}
	needed := map[string]bool{}
	for key, err := range s.bucket.List(ctx, folderKey(sessionID)) {
		if err != nil {
			return err
		}
		if strings.HasSuffix(key, ".pack") {
			packs[key] = true
			continue
		}
		if !strings.HasSuffix(key, ".manifest") && !strings.HasSuffix(key, ".claim") {
			continue // half an object: a store in a folder keeps what a host that died was writing; it goes with the session
		}
		p, err := s.fetchManifest(ctx, key)
		if errors.Is(err, fs.ErrNotExist) { // went meanwhile
			continue
		}
		if err != nil {
			return fmt.Errorf("what %s needs: %w", key, err)
		}
		for _, k := range p.Packs {
			needed[packKey(sessionID, k.Name)] = true
		}
	}
	for _, key := range slices.Sorted(maps.Keys(packs)) {
		if needed[key] {
			continue
		}
		if err := s.bucket.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}

// DeleteSession removes all of a session's snapshots, here and in the blob
// store, whichever host brought them there. For a session that ended: nobody may
// upload one of them any more.
func (s *Store) DeleteSession(ctx context.Context, sessionID string) error {
	if err := s.deleteSession(ctx, sessionID); err != nil {
		return fmt.Errorf("delete snapshots of session %s: %w", sessionID, err)
	}
	return nil
}

func (s *Store) deleteSession(ctx context.Context, sessionID string) error {
	if err := checkID("session", sessionID); err != nil {
		return err
	}
	for _, i := range s.List() {
		if i.SessionID == sessionID {
			if err := s.Delete(ctx, Ref{i.ID, sessionID}); err != nil {
				return err
			}
		}
	}
	if s.bucket == nil {
		return nil
	}
	for key, err := range s.bucket.List(ctx, folderKey(sessionID)) {
		if err != nil {
			return err
		}
		if err := s.bucket.Delete(ctx, key); err != nil {
			return err
		}
	}
	return nil
}
