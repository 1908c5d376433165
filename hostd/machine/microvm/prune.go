package microvm

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// unusedFolder holds, by hash, since when a template has been of no use.
const unusedFolder = "unused"

// PruneTemplates removes the templates that keep refuses, that no machine of
// this host runs from, and that have been so for rest; see machine.Keeper. A
// template's share in the guest image goes with it.
func (d *Driver) PruneTemplates(ctx context.Context, keep func(hash string) bool, rest time.Duration) (removed []string, err error) {
	leave, err := d.enter(ctx)
	if err != nil {
		return nil, fmt.Errorf("prune templates: %w", err)
	}
	defer leave()
	used, err := d.templatesInUse()
	if err != nil {
		return nil, fmt.Errorf("prune templates: %w", err)
	}
	removed, err = d.store.prune(func(hash string) bool { return keep(hash) || used[hash] }, time.Now(), rest)
	if err != nil {
		return removed, fmt.Errorf("prune templates: %w", err)
	}
	return removed, nil
}

// templatesInUse are those that machines of this host were started from, and
// those that are loaded. A machine whose state cannot be read may be of any.
func (d *Driver) templatesInUse() (map[string]bool, error) {
	ids, err := d.known()
	if err != nil {
		return nil, err
	}
	used := map[string]bool{}
	for _, id := range ids {
		s, err := readState(d.dir(id))
		if errors.Is(err, fs.ErrNotExist) {
			continue // a leftover that never ran
		}
		if err != nil {
			return nil, fmt.Errorf("machine %s: %w", id, err)
		}
		used[s.Template] = true
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for hash := range d.templates {
		used[hash] = true
	}
	return used, nil
}

// prune removes the templates that keep has refused for rest.
func (s store) prune(keep func(hash string) bool, now time.Time, rest time.Duration) (removed []string, err error) {
	entries, err := os.ReadDir(s.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var errs []error
	for _, e := range entries {
		hash := e.Name()
		if !validHash.MatchString(hash) {
			continue
		}
		gone, err := s.pruneOne(hash, keep(hash), now, rest)
		if errs = append(errs, err); gone {
			removed = append(removed, hash)
		}
	}
	return removed, errors.Join(append(errs, s.dropIndex())...)
}

func (s store) pruneOne(hash string, keep bool, now time.Time, rest time.Duration) (gone bool, err error) {
	mark := filepath.Join(s.dir, unusedFolder, hash)
	if keep {
		return false, forgetFile(mark)
	}
	since, err := readMark(mark)
	if err != nil && rest > 0 { // it has none, or what a power failure left of one
		return false, s.put(unusedFolder, hash, now.UTC().Format(time.RFC3339)+"\n")
	}
	rest -= now.Sub(since)
	if rest > 0 {
		return false, nil
	}
	// By renaming, as it came: what a crash leaves of it is no template.
	away := filepath.Join(s.dir, ".new-"+newID())
	if err := os.Rename(filepath.Join(s.dir, hash), away); err != nil {
		return false, err
	}
	return true, errors.Join(os.RemoveAll(away), forgetFile(mark))
}

func readMark(path string) (since time.Time, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return since, err
	}
	return time.Parse(time.RFC3339, strings.TrimSpace(string(text)))
}

// dropIndex forgets which template a recipe made where that is not here any
// more.
func (s store) dropIndex() error {
	dir := filepath.Join(s.dir, "index")
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	errs := []error{err}
	for _, e := range entries {
		hash, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			errs = append(errs, err)
			continue
		}
		if _, err := os.Lstat(filepath.Join(s.dir, strings.TrimSpace(string(hash)))); errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, forgetFile(filepath.Join(dir, e.Name())))
		}
	}
	return errors.Join(errs...)
}

// forgetFile removes a file; one that is not there is no error.
func forgetFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
