// Package workspace resolves the paths that clients give to files below the
// session's shared folder, and nowhere else.
//
// The customer's programs change the tree while we look at it, and the agent
// is root, so a check of names alone proves nothing. Resolve follows symlinks
// itself, to say plainly what leaves the folder; the operation then goes
// through os.Root (openat2-like, component by component), which refuses again
// whatever changed in between.
package workspace

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/berth-dev/berth/shared/apierr"
)

// maxLinks is how many symlinks one path may pass, as in Linux (path_resolution(7)).
const maxLinks = 40

// Tree is the folder.
type Tree struct {
	// Dir is the path clients know, Root the opened folder.
	Dir  string
	Root *os.Root
	real string // Dir without symlinks
}

// Open opens the folder, an absolute path.
func Open(dir string) (*Tree, error) {
	dir = filepath.Clean(dir)
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		return nil, err
	}
	root, err := os.OpenRoot(real)
	if err != nil {
		return nil, err
	}
	return &Tree{Dir: dir, Root: root, real: real}, nil
}

// Close lets the folder go.
func (t *Tree) Close() error { return t.Root.Close() }

// Abs is the path that clients see for a resolved one.
func (t *Tree) Abs(rel string) string { return filepath.Join(t.Dir, rel) }

// Real is the path of a resolved one without symlinks in the folder's own path.
func (t *Tree) Real(rel string) string { return filepath.Join(t.real, rel) }

// Lexical cleans a client's path to one relative to the folder, "." being the
// folder itself, without looking at the disk. field names it in errors, which
// are 400.
func (t *Tree) Lexical(field, path string) (string, error) {
	switch {
	case path == "":
		return "", apierr.New(apierr.InvalidRequest, "%s: must be a path inside %s", field, t.Dir)
	case len(path) > 4096:
		return "", apierr.New(apierr.InvalidRequest, "%s: must be at most 4096 bytes", field)
	case strings.ContainsRune(path, 0):
		return "", apierr.New(apierr.InvalidRequest, "%s: must not contain a NUL byte", field)
	}
	if !filepath.IsAbs(path) {
		path = t.Dir + "/" + path
	}
	return t.below(field, filepath.Clean(path))
}

func (t *Tree) below(field, abs string) (string, error) {
	for _, top := range []string{t.Dir, t.real} {
		if abs == top {
			return ".", nil
		}
		if rel, ok := strings.CutPrefix(abs, strings.TrimSuffix(top, "/")+"/"); ok {
			return rel, nil
		}
	}
	return "", apierr.New(apierr.InvalidRequest, "%s: must stay inside %s", field, t.Dir)
}

// Resolve gives the path relative to Root, free of symlinks. What does not
// exist yet resolves as far as it does. A link that leads out of the folder is
// a 400 naming field.
func (t *Tree) Resolve(field, path string) (string, error) {
	return t.resolve(field, path, true)
}

// ResolveLink is Resolve but leaves a symlink in the last place alone: for
// operations on the link itself.
func (t *Tree) ResolveLink(field, path string) (string, error) {
	return t.resolve(field, path, false)
}

// resolve walks with at, an absolute path without symlinks, which may be
// outside the folder for a while (a link to "../../workspace/x" is fine) but
// not at the end. Outside, names are taken as they stand.
func (t *Tree) resolve(field, path string, last bool) (string, error) {
	rel, err := t.Lexical(field, path)
	if err != nil {
		return "", err
	}
	at, todo, links := t.real, split(rel), 0
	for len(todo) > 0 {
		next := filepath.Join(at, todo[0])
		todo = todo[1:]
		target := ""
		if len(todo) > 0 || last {
			target = t.link(next)
		}
		if target == "" {
			at = next
			continue
		}
		if links++; links > maxLinks {
			return "", apierr.New(apierr.InvalidRequest, "%s: passes too many symbolic links", field)
		}
		if filepath.IsAbs(target) {
			at = "/"
		}
		todo = append(split(target), todo...)
	}
	rel, err = t.below(field, at)
	if err != nil {
		return "", apierr.New(apierr.InvalidRequest, "%s: a symbolic link leads out of %s", field, t.Dir)
	}
	return rel, nil
}

// link is the target of the symlink at abs; "" where there is none, nothing at
// all, or no business of ours.
func (t *Tree) link(abs string) string {
	if abs == t.Dir && t.Dir != t.real {
		return t.real
	}
	rel, ok := strings.CutPrefix(abs, strings.TrimSuffix(t.real, "/")+"/")
	if !ok {
		return ""
	}
	target, err := t.Root.Readlink(rel)
	if err != nil {
		return ""
	}
	return target
}

func split(path string) []string {
	return strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
}

// Error turns an operation's error into what the client may see: 404 for
// nothing there, 400 for what the path itself makes impossible.
func (t *Tree) Error(field, path string, err error) error {
	bad := func(sentence string) error {
		return apierr.Wrap(err, apierr.InvalidRequest, "%s: %s", field, sentence)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, fs.ErrNotExist):
		return apierr.Wrap(err, apierr.NotFound, "%s: nothing at %s", field, strings.ToValidUTF8(path, "\uFFFD"))
	case strings.HasSuffix(err.Error(), "path escapes from parent"): // os.Root; the error has no exported name
		return bad("must stay inside " + t.Dir)
	}
	if sentence := impossible(err); sentence != "" {
		return bad(sentence)
	}
	if full(err) {
		return apierr.Wrap(err, apierr.TooLarge, "%s: the disk of the session is full", field)
	}
	return err
}
