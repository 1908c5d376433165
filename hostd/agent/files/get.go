package files

import (
	"io"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/apierr"
)

// get sends a file's bytes, or the ranges asked for (RFC 9110 section 14).
func (f *Files) get(w http.ResponseWriter, r *http.Request, name string) error {
	file, info, err := f.open(name)
	if err != nil {
		return err
	}
	defer file.Close()
	// One type for all: what a customer's page made must not run in a viewer.
	w.Header().Set("Content-Type", "application/octet-stream")
	w.Header().Set("X-Content-Type-Options", "nosniff")
	understandRange(r.Header)
	http.ServeContent(&sender{ResponseWriter: w, r: r}, r, "", info.ModTime(), file)
	return nil
}

// open opens a regular file. Others are told from it before and after: opening
// a pipe could wait for ever and a device do anything.
func (f *Files) open(name string) (*os.File, fs.FileInfo, error) {
	rel, err := f.tree.Resolve("path", name)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.tree.Root.Lstat(rel)
	if err != nil {
		return nil, nil, f.tree.Error("path", name, err)
	}
	if err := regular(info); err != nil {
		return nil, nil, err
	}
	file, err := f.tree.Root.OpenFile(rel, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, f.tree.Error("path", name, err)
	}
	if info, err = file.Stat(); err == nil {
		err = regular(info)
	}
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	return file, info, nil
}

func regular(info fs.FileInfo) error {
	switch {
	case info.IsDir():
		return apierr.New(apierr.InvalidRequest, "path: is a directory; add list=1 to list it")
	case !info.Mode().IsRegular():
		return apierr.New(apierr.InvalidRequest, "path: must be a regular file, not a pipe, socket, device or dangling link")
	}
	return nil
}

// list answers with a directory's entries, sorted by name.
func (f *Files) list(w http.ResponseWriter, name string) error {
	rel, err := f.tree.Resolve("path", name)
	if err != nil {
		return err
	}
	dir, err := f.tree.Root.OpenFile(rel, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return f.tree.Error("path", name, err)
	}
	defer dir.Close()
	infos, err := dir.Readdir(-1) // lstat, and leaves out what goes meanwhile
	if err != nil {
		return f.tree.Error("path", name, err)
	}
	slices.SortFunc(infos, func(a, b fs.FileInfo) int { return strings.Compare(a.Name(), b.Name()) })
	entries := make([]entry, 0, len(infos))
	for _, info := range infos {
		entries = append(entries, describe(info))
	}
	reply.JSON(w, http.StatusOK, struct {
		Path    string  `json:"path"`
		Entries []entry `json:"entries"`
	}{f.abs(rel), entries})
	return nil
}

// stat answers with one entry; a link in the last place is described itself.
func (f *Files) stat(w http.ResponseWriter, name string) error {
	rel, err := f.tree.ResolveLink("path", name)
	if err != nil {
		return err
	}
	info, err := f.tree.Root.Lstat(rel)
	if err != nil {
		return f.tree.Error("path", name, err)
	}
	e := describe(info)
	e.Path = f.abs(rel)
	if rel == "." {
		e.Name = shown(strings.TrimPrefix(f.tree.Dir[strings.LastIndexByte(f.tree.Dir, '/'):], "/"))
	}
	reply.JSON(w, http.StatusOK, e)
	return nil
}

// copySize is how much is copied at a time: large enough that the link's
// framing costs nothing beside it.
const copySize = 256 << 10

var copyBuffers = sync.Pool{New: func() any { b := make([]byte, copySize); return &b }}

// copyTo is io.Copy with a large buffer and none of its shortcuts, which fall
// back to 32 KiB where neither side is a plain socket.
func copyTo(dst io.Writer, src io.Reader) (int64, error) {
	buf := copyBuffers.Get().(*[]byte)
	defer copyBuffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{dst}, struct{ io.Reader }{src}, *buf)
}

// sender is the ResponseWriter given to http.ServeContent: large copies, and
// its one error answered as the envelope.
type sender struct {
	http.ResponseWriter
	r      *http.Request
	failed bool // what follows is the text of an error already answered
}

func (s *sender) WriteHeader(status int) {
	if status < 400 {
		s.ResponseWriter.WriteHeader(status)
		return
	}
	s.failed = true
	err := apierr.New(apierr.Internal, "the file cannot be read")
	if status == http.StatusRequestedRangeNotSatisfiable {
		err = apierr.New(apierr.RangeNotSatisfiable, "Range: must be bytes=first-last inside the file")
	}
	if status == http.StatusPreconditionFailed {
		s.ResponseWriter.WriteHeader(status)
		return
	}
	unsatisfied := s.Header().Get("Content-Range") // RFC 9110 15.5.17: bytes */length
	s.Header().Del("X-Content-Type-Options")
	reply.Error(contentRange{s.ResponseWriter, unsatisfied}, s.r, err)
}

func (s *sender) Write(p []byte) (int, error) {
	if s.failed {
		return len(p), nil
	}
	return s.ResponseWriter.Write(p)
}

// ReadFrom is what io.Copy inside http.ServeContent calls. The server hands it
// on to the session link, which reads the file straight into what it sends.
func (s *sender) ReadFrom(src io.Reader) (int64, error) {
	if to, ok := s.ResponseWriter.(io.ReaderFrom); ok {
		return to.ReadFrom(src)
	}
	return copyTo(s.ResponseWriter, src)
}

// contentRange puts the header back that an error's answer drops.
type contentRange struct {
	http.ResponseWriter
	value string
}

func (c contentRange) WriteHeader(status int) {
	if c.value != "" {
		c.Header().Set("Content-Range", c.value)
	}
	c.ResponseWriter.WriteHeader(status)
}
