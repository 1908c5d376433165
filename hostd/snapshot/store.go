package snapshot

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Bucket is what the store asks of a blob store (shared/blob). Get and Size
// answer fs.ErrNotExist for keys that are not there, Put stores whole or not at
// all, Delete of nothing is no error.
type Bucket interface {
	Put(ctx context.Context, key string, r io.Reader) error
	Get(ctx context.Context, key string) (io.ReadCloser, error)
	Size(ctx context.Context, key string) (int64, error)
	Delete(ctx context.Context, key string) error
	List(ctx context.Context, prefix string) iter.Seq2[string, error]
}

// Ref names a snapshot.
type Ref struct{ ID, SessionID string }

// Info is what is known of a snapshot without its session's key.
type Info struct {
	ID        string
	SessionID string
	Created   time.Time
	Memory    bool   // else portable
	Driver    string // of a memory capture, as are CPUClass and Template
	CPUClass  string
	Template  string // content hash
	Pages     int64  // that differ from the template, those of zeros included
	Bytes     int64  // on the disk for this snapshot alone
	Total     int64  // Bytes and what it refers to of earlier ones
	Durable   bool   // in the blob store
}

// Store keeps snapshots in a folder. All methods may be called at once; those
// that change a session's snapshots wait for each other.
type Store struct {
	dir    string
	bucket Bucket // nil: none
	log    *slog.Logger
	fs     files
	queue  *queue // nil without a bucket

	mu      sync.Mutex        // guards what is below
	entries map[string]*entry // by snapshot id
	broken  map[string]broken // manifests that could not be read, by snapshot id
	refs    map[string]int    // by pack: manifests and writers that need it
	packs   map[string]pack   // those that a manifest names, or that came ahead of theirs
	held    map[*Held]bool
	busy    map[string]chan struct{} // sessions that somebody works on, closed when done
}

// entry is a snapshot that is here, whole.
type entry struct {
	header
	durable bool
}

// The folders of a store. A file's name is a snapshot's id, a pack's in packs.
const (
	manifests = "manifests"
	packs     = "packs"
	wanted    = "upload"  // to be brought to the blob store
	stored    = "durable" // brought there, or fetched from there
	condemned = "gone"    // to be removed there; holds the session's id
	aside     = "aside"   // manifests that are of no use to anybody
)

// Open opens the store in dir, made if absent, and goes on with what was to be
// uploaded or removed when it was last closed. bucket may be nil.
func Open(dir string, bucket Bucket, log *slog.Logger) (*Store, error) {
	return open(dir, bucket, log, nil)
}

func open(dir string, bucket Bucket, log *slog.Logger, hook func(op, path string) error) (*Store, error) {
	s := &Store{
		dir: dir, bucket: bucket, log: log, fs: files{hook},
		entries: map[string]*entry{}, broken: map[string]broken{}, refs: map[string]int{},
		packs: map[string]pack{}, held: map[*Held]bool{}, busy: map[string]chan struct{}{},
	}
	for _, sub := range []string{manifests, packs, wanted, stored, condemned, aside} {
		if err := os.MkdirAll(filepath.Join(dir, sub), 0o700); err != nil {
			return nil, fmt.Errorf("open snapshots: %w", err)
		}
	}
	if err := s.read(); err != nil {
		return nil, fmt.Errorf("open snapshots in %s: %w", dir, err)
	}
	if err := s.tidy(); err != nil { // Sweep tries again
		log.Warn("leftovers of snapshots stay", "error", err)
	}
	if bucket != nil {
		if err := s.startQueue(); err != nil {
			return nil, fmt.Errorf("open snapshots in %s: %w", dir, err)
		}
	}
	return s, nil
}

// Close stops the background work; what is left of it goes on at the next Open.
func (s *Store) Close() error {
	if s.queue != nil {
		s.queue.stop()
	}
	return nil
}

// read takes in the manifests that are there.
func (s *Store) read() error {
	ids, err := s.names(manifests)
	if err != nil {
		return err
	}
	for _, id := range ids {
		if strings.HasSuffix(id, ".tmp") {
			continue
		}
		p, err := s.readManifest(id)
		if err == nil && p.ID != id {
			err = refuse(Foreign, "manifest %s is that of %s", id, p.ID)
		}
		if err != nil {
			s.broken[id] = s.lookAt(id, err)
			continue
		}
		s.addLocked(p.header, s.marked(stored, id))
	}
	return s.readAside()
}

// names lists a folder of the store.
func (s *Store) names(sub string) (names []string, err error) {
	all, err := os.ReadDir(filepath.Join(s.dir, sub))
	for _, e := range all {
		names = append(names, e.Name())
	}
	return names, err
}

func (s *Store) path(sub, name string) string { return filepath.Join(s.dir, sub, name) }
func (s *Store) packPath(name string) string  { return s.path(packs, name) }

func (s *Store) marked(sub, id string) bool {
	_, err := os.Lstat(s.path(sub, id))
	return err == nil
}

func (s *Store) readManifest(id string) (parsed, error) {
	f, err := os.Open(s.path(manifests, id))
	if err != nil {
		return parsed{}, err
	}
	defer f.Close()
	raw, err := io.ReadAll(io.LimitReader(f, maxManifest+1))
	if err != nil {
		return parsed{}, err
	}
	return parseManifest(raw)
}

// addLocked counts a manifest and what it refers to. Needs mu, but in Open.
func (s *Store) addLocked(h header, durable bool) {
	s.entries[h.ID] = &entry{h, durable}
	delete(s.broken, h.ID)
	for _, p := range h.Packs {
		s.refs[p.Name]++
		s.packs[p.Name] = p
	}
}

// pin keeps packs from being removed until unpin.
func (s *Store) pin(names ...string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, name := range names {
		s.refs[name]++
	}
}

// pinAll pins the packs of a snapshot that is here.
func (s *Store) pinAll(id string) (header, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[id]
	if e == nil {
		return header{}, false
	}
	for _, p := range e.Packs {
		s.refs[p.Name]++
	}
	return e.header, true
}

// unpin lets go of packs; those that nobody needs any more are removed.
func (s *Store) unpin(names ...string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	var errs []error
	for _, name := range names {
		if s.refs[name]--; s.refs[name] == 0 {
			delete(s.refs, name)
			delete(s.packs, name)
			errs = append(errs, s.fs.remove(s.packPath(name)))
		}
	}
	return errors.Join(errs...)
}

// begin waits until nobody else works on a session's snapshots.
func (s *Store) begin(ctx context.Context, sessionID string) (end func(), err error) {
	for {
		s.mu.Lock()
		other := s.busy[sessionID]
		if other == nil {
			mine := make(chan struct{})
			s.busy[sessionID] = mine
			s.mu.Unlock()
			return func() { s.end(sessionID, mine) }, nil
		}
		s.mu.Unlock()
		select {
		case <-other:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

func (s *Store) end(sessionID string, mine chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.busy, sessionID)
	close(mine)
}

// Info tells of a snapshot that is here.
func (s *Store) Info(id string) (Info, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	e := s.entries[id]
	if e == nil {
		return Info{}, false
	}
	return e.info(), true
}

// List tells of all snapshots that are here, in no order.
func (s *Store) List() []Info {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := make([]Info, 0, len(s.entries))
	for _, e := range s.entries {
		all = append(all, e.info())
	}
	return all
}

// Templates names the templates that snapshots here go back to, by content hash;
// whole is false where a snapshot cannot be read now that might be later.
func (s *Store) Templates() (hashes []string, whole bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, e := range s.entries {
		if e.Template != "" {
			hashes = append(hashes, e.Template)
		}
	}
	for _, b := range s.broken {
		if !b.aside {
			return hashes, false
		}
	}
	return hashes, true
}

func (e *entry) info() Info {
	i := Info{ID: e.ID, SessionID: e.SessionID, Created: e.Created, Memory: e.Memory, Driver: e.Driver,
		CPUClass: e.CPUClass, Template: e.Template, Pages: e.Pages, Bytes: e.Bytes, Durable: e.durable}
	for _, p := range e.Packs {
		i.Total += p.Size
	}
	return i
}

// have gives a snapshot's header if it is here.
func (s *Store) have(id string) (header, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e := s.entries[id]; e != nil {
		return e.header, true
	}
	return header{}, false
}

// fresh says whether a snapshot of that id may be made here.
func (s *Store) fresh(id string) error {
	if _, ok := s.have(id); ok {
		return ErrExists
	}
	if s.marked(condemned, id) {
		return fmt.Errorf("%w: it is being removed from the blob store", ErrExists)
	}
	return nil
}

// Packs names the packs of a session that are here: what an Export to this host
// may leave out.
func (s *Store) Packs(sessionID string) []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	seen := map[string]bool{}
	names := []string{}
	add := func(from []pack) {
		for _, p := range from {
			if !seen[p.Name] {
				seen[p.Name] = true
				names = append(names, p.Name)
			}
		}
	}
	for _, e := range s.entries {
		if e.SessionID == sessionID {
			add(e.Packs)
		}
	}
	for h := range s.held {
		if h.sessionID == sessionID {
			add(h.packs)
		}
	}
	return names
}
