package browser

import (
	"context"
	"errors"
	"fmt"
	"os"
)

// StorageFolders are what of the profile a portable capture takes as files,
// while Chrome stands still: their databases come back from any such moment.
// Cookies, sessionStorage and the localStorage of open pages go by State.
var StorageFolders = []string{"Local Storage", "IndexedDB", "WebStorage"}

// replacement asks for another Chrome, with something done while there is none.
type replacement struct {
	between func() error
	done    chan error // holds one
}

var errReplaced = errors.New("chrome was replaced")

// Storage opens the folder that StorageFolders are in.
func (b *Browser) Storage() (*os.Root, error) {
	profile, err := os.OpenRoot(b.cfg.Profile)
	if err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	defer profile.Close()
	root, err := profile.OpenRoot("Default")
	if err != nil {
		return nil, fmt.Errorf("storage: %w", err)
	}
	return root, nil
}

// OwnStorage gives what is laid into Storage to Chrome's user.
func (b *Browser) OwnStorage(chown func(uid, gid int) error) error {
	if b.cfg.UID == 0 {
		return nil
	}
	return chown(b.cfg.owner())
}

// Replace ends Chrome, calls between while there is none, and returns when
// another one is usable, or with what between returned.
func (b *Browser) Replace(ctx context.Context, between func() error) error {
	r := replacement{between: between, done: make(chan error, 1)}
	select {
	case b.replacing <- r:
	case <-ctx.Done():
		return fmt.Errorf("replace chrome: %w", context.Cause(ctx))
	}
	if err := <-r.done; err != nil {
		return fmt.Errorf("replace chrome: %w", err)
	}
	if _, err := b.wait(ctx); err != nil {
		return fmt.Errorf("replace chrome: %w", err)
	}
	return nil
}
