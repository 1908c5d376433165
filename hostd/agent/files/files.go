// Package files serves the session's workspace over HTTP: read, write, list,
// delete, move, make folders, wait for a file.
//
// Paths are relative to the workspace or absolute inside it; what would leave
// it, by ".." or by a symbolic link, is 400. Reads and writes follow links that
// stay inside; delete and move act on the link itself. File names are bytes: a
// query may carry any, percent-encoded, while JSON shows bytes that are no
// UTF-8 as U+FFFD. Answers name files by their absolute path.
package files

import (
	"io/fs"
	"net/http"
	"net/url"
	"path"
	"strings"
	"syscall"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/hostd/agent/workspace"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
)

// Files serves one workspace. Safe for concurrent use; it keeps nothing.
type Files struct {
	tree  *workspace.Tree
	owner account.Account // of what is made
	// Freezer keeps changes from being made while the customer's processes stand
	// still; nil: never. Set it before the first request.
	Freezer *freeze.Freezer
}

// New serves tree; files and folders that it makes belong to owner.
func New(tree *workspace.Tree, owner account.Account) *Files { return &Files{tree: tree, owner: owner} }

// Register mounts all paths of files on mux.
func (f *Files) Register(mux *http.ServeMux) {
	for _, p := range []string{agentlink.PathFiles, agentlink.PathFilesWait, agentlink.PathFilesMkdir, agentlink.PathFilesMove} {
		mux.Handle(p, f)
	}
}

// ServeHTTP serves the PathFiles* paths as the public API says.
func (f *Files) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var err error
	switch r.URL.Path {
	case agentlink.PathFiles:
		err = f.serveFile(w, r)
	case agentlink.PathFilesWait:
		if reply.Method(w, r, http.MethodGet) {
			err = f.wait(w, r)
		}
	case agentlink.PathFilesMkdir:
		if reply.Method(w, r, http.MethodPost) {
			err = f.change(r, func() error { return f.mkdir(w, r) })
		}
	case agentlink.PathFilesMove:
		if reply.Method(w, r, http.MethodPost) {
			err = f.change(r, func() error { return f.move(w, r) })
		}
	default:
		err = apierr.New(apierr.NotFound, "path: nothing at %s", r.URL.Path)
	}
	if err == nil {
		return
	}
	if r.Context().Err() != nil {
		err = apierr.Wrap(err, apierr.Canceled, "the client left")
	}
	reply.Error(w, r, err)
}

// change makes a change and answers it while nothing is frozen: what was
// answered is in a capture.
func (f *Files) change(r *http.Request, do func() error) error {
	leave, err := f.Freezer.Enter(r.Context(), freeze.Customer)
	if err != nil {
		return err
	}
	defer leave()
	return do()
}

func (f *Files) serveFile(w http.ResponseWriter, r *http.Request) error {
	if !reply.Method(w, r, http.MethodGet, http.MethodHead, http.MethodPut, http.MethodDelete) {
		return nil
	}
	q, err := url.ParseQuery(r.URL.RawQuery)
	if err != nil {
		return apierr.Wrap(err, apierr.InvalidRequest, "path: the query must be percent-encoded")
	}
	name := q.Get("path")
	switch r.Method {
	case http.MethodPut:
		return f.put(w, r, name)
	case http.MethodDelete:
		return f.change(r, func() error { return f.remove(w, name) })
	}
	list, err := flag(q, "list")
	if err != nil {
		return err
	}
	stat, err := flag(q, "stat")
	if err != nil {
		return err
	}
	switch {
	case list && stat:
		return apierr.New(apierr.InvalidRequest, "stat: must not be given with list")
	case list:
		return f.list(w, name)
	case stat:
		return f.stat(w, name)
	}
	return f.get(w, r, name)
}

// flag reads a query field that is 1 or true, 0 or false, or absent.
func flag(q url.Values, name string) (bool, error) {
	switch q.Get(name) {
	case "1", "true":
		return true, nil
	case "", "0", "false":
		return false, nil
	}
	return false, apierr.New(apierr.InvalidRequest, "%s: must be 1 or 0", name)
}

// entry is a file entry of the spec; Path only with stat=1.
type entry struct {
	Name  string `json:"name"`
	Path  string `json:"path,omitempty"`
	Type  string `json:"type"`
	Size  int64  `json:"size"`
	Mtime string `json:"mtime"`
}

// describe makes an entry; what is neither directory nor link is a file, pipes
// and sockets too. A link's size is that of its target's name.
func describe(info fs.FileInfo) entry {
	e := entry{Name: shown(info.Name()), Type: "file", Size: info.Size()}
	e.Mtime = info.ModTime().UTC().Format("2006-01-02T15:04:05.000Z")
	switch {
	case info.IsDir():
		e.Type = "dir"
	case info.Mode()&fs.ModeSymlink != 0:
		e.Type = "symlink"
	}
	return e
}

// shown is a name as JSON can carry it.
func shown(name string) string { return strings.ToValidUTF8(name, "\uFFFD") }

type pathSize struct {
	Path string `json:"path"`
	Size int64  `json:"size"`
}

type pathOnly struct {
	Path string `json:"path"`
}

func (f *Files) abs(rel string) string { return shown(f.tree.Abs(rel)) }

// makeAbove makes the folders above rel that are not there.
func (f *Files) makeAbove(rel string) error {
	dir := path.Dir(rel)
	if dir == "." {
		return nil
	}
	return f.makeFolders(dir)
}

// makeFolders is mkdir -p for a resolved path; what it makes is the owner's.
func (f *Files) makeFolders(rel string) error {
	made := ""
	for _, part := range strings.Split(rel, "/") {
		made = path.Join(made, part)
		err := f.tree.Root.Mkdir(made, 0o755)
		if err == nil {
			err = f.owner.Owns(func(uid, gid int) error { return f.tree.Root.Lchown(made, uid, gid) })
		} else if info, statErr := f.tree.Root.Stat(made); statErr == nil {
			if err = nil; !info.IsDir() {
				err = syscall.ENOTDIR
			}
		}
		if err != nil {
			return err
		}
	}
	return nil
}
