package files

import (
	"crypto/rand"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/apierr"
)

// asidePrefix begins the names of files that are being written.
const asidePrefix = ".berth-put-"

// Aside says whether a file of this name is being written: no capture takes it.
func Aside(name string) bool { return strings.HasPrefix(name, asidePrefix) }

// put writes the body beside the file and renames it into place: whoever reads
// sees the old file or the whole new one. Nothing is left of a body that breaks off.
func (f *Files) put(w http.ResponseWriter, r *http.Request, name string) error {
	rel, err := f.tree.Resolve("path", name)
	if err != nil {
		return err
	}
	if strings.HasSuffix(name, "/") || rel == "." {
		return apierr.New(apierr.InvalidRequest, "path: must be a file, not a directory")
	}
	mode := fs.FileMode(0o644)
	if info, err := f.tree.Root.Lstat(rel); err == nil {
		if info.IsDir() {
			return apierr.New(apierr.InvalidRequest, "path: is a directory")
		}
		if info.Mode().IsRegular() {
			mode = info.Mode().Perm() // a script stays executable
		}
	}
	if err := f.makeAbove(rel); err != nil {
		return f.tree.Error("path", name, err)
	}
	aside, size, err := f.writeAside(rel, mode, r.Body)
	if err != nil {
		return f.putError(name, err)
	}
	err = f.change(r, func() error {
		if err := f.tree.Root.Rename(aside, rel); err != nil {
			return f.tree.Error("path", name, err)
		}
		reply.JSON(w, http.StatusOK, pathSize{f.abs(rel), size})
		return nil
	})
	if err != nil {
		_ = f.tree.Root.Remove(aside)
	}
	return err
}

// errBody marks a failure to read the body, which is the client's.
type errBody struct{ error }

func (e errBody) Unwrap() error { return e.error }

func (f *Files) putError(name string, err error) error {
	var body errBody
	if errors.As(err, &body) {
		return apierr.Wrap(err, apierr.InvalidRequest, "body: broke off before its end")
	}
	return f.tree.Error("path", name, err)
}

// writeAside writes the body to a file beside rel, ready to take its place.
func (f *Files) writeAside(rel string, mode fs.FileMode, body io.Reader) (aside string, size int64, err error) {
	aside = path.Join(path.Dir(rel), asidePrefix+rand.Text())
	file, err := f.tree.Root.OpenFile(aside, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", 0, err
	}
	defer func() {
		if err != nil {
			file.Close()
			_ = f.tree.Root.Remove(aside)
		}
	}()
	if size, err = copyTo(file, bodyReader{body}); err != nil {
		return aside, 0, err
	}
	// In this order: a change of owner would drop set-id bits, and until the
	// mode is right nobody else can open the file.
	err = errors.Join(f.owner.Owns(file.Chown), file.Chmod(mode), file.Close())
	return aside, size, err
}

// bodyReader marks errors of the request's body.
type bodyReader struct{ r io.Reader }

func (b bodyReader) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err != nil && err != io.EOF {
		err = errBody{err}
	}
	return n, err
}

// remove deletes a file, a link itself, or a directory with what it holds.
func (f *Files) remove(w http.ResponseWriter, name string) error {
	rel, err := f.tree.ResolveLink("path", name)
	if err != nil {
		return err
	}
	if rel == "." {
		return apierr.New(apierr.InvalidRequest, "path: must not be the workspace itself")
	}
	if _, err = f.tree.Root.Lstat(rel); err == nil {
		err = f.tree.Root.RemoveAll(rel)
	}
	if err != nil {
		return f.tree.Error("path", name, err)
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// mkdir makes a directory and the missing ones above it; one that is there is fine.
func (f *Files) mkdir(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Path string `json:"path"`
	}
	if err := reply.Decode(w, r, &req); err != nil {
		return err
	}
	rel, err := f.tree.Resolve("path", req.Path)
	if err != nil {
		return err
	}
	if rel != "." {
		if err := f.makeFolders(rel); err != nil {
			return f.tree.Error("path", req.Path, err)
		}
	}
	reply.JSON(w, http.StatusOK, pathOnly{f.abs(rel)})
	return nil
}

// move renames, links themselves included. A file at the new place is
// replaced, a directory is not, and missing folders above it are made.
func (f *Files) move(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		From string `json:"from"`
		To   string `json:"to"`
	}
	if err := reply.Decode(w, r, &req); err != nil {
		return err
	}
	from, err := f.tree.ResolveLink("from", req.From)
	if err != nil {
		return err
	}
	to, err := f.tree.ResolveLink("to", req.To)
	if err != nil {
		return err
	}
	switch {
	case from == ".":
		return apierr.New(apierr.InvalidRequest, "from: must not be the workspace itself")
	case to == ".":
		return apierr.New(apierr.InvalidRequest, "to: must not be the workspace itself")
	case strings.HasPrefix(to, from+"/"):
		return apierr.New(apierr.InvalidRequest, "to: must not be inside from")
	}
	if _, err := f.tree.Root.Lstat(from); err != nil {
		return f.tree.Error("from", req.From, err)
	}
	if info, err := f.tree.Root.Lstat(to); err == nil && info.IsDir() && to != from {
		return apierr.New(apierr.InvalidRequest, "to: is an existing directory; name the new place itself")
	}
	if err := f.makeAbove(to); err != nil {
		return f.tree.Error("to", req.To, err)
	}
	if err := f.tree.Root.Rename(from, to); err != nil {
		if errors.Is(err, syscall.ENOENT) {
			return f.tree.Error("from", req.From, err) // gone since
		}
		return f.tree.Error("to", req.To, err)
	}
	reply.JSON(w, http.StatusOK, pathOnly{f.abs(to)})
	return nil
}
