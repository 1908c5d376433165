package portable

import (
	"archive/tar"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// Folder writes what lies below root under a name, links as such. only, if not
// nil, says which names directly below root are meant; a missing one is fine.
// Nothing below root may change meanwhile.
func (w *Writer) Folder(name string, root *os.Root, only []string) error {
	t := &treeWriter{Writer: w, folder: name, root: root, links: map[inode]string{}}
	if only == nil {
		return t.children(".")
	}
	for _, top := range only {
		if err := t.entry(top); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// inode names a file by what hard links to it share.
type inode struct{ dev, ino uint64 }

type treeWriter struct {
	*Writer
	folder string
	root   *os.Root
	links  map[inode]string // files with several names that were written
}

func (t *treeWriter) children(dir string) error {
	d, err := t.root.Open(dir)
	if err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	names, err := d.Readdirnames(-1)
	d.Close()
	if err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	slices.Sort(names)
	for _, name := range names {
		if t.Skip != nil && t.Skip(name) {
			continue
		}
		if err := t.entry(path.Join(dir, name)); err != nil {
			return err
		}
	}
	return nil
}

func (t *treeWriter) entry(rel string) error {
	info, err := t.root.Lstat(rel)
	if err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fmt.Errorf("portable: %s: no owner", rel)
	}
	h := &tar.Header{
		Format: tar.FormatPAX, Name: t.folder + "/" + rel, ModTime: info.ModTime(),
		Mode: int64(st.Mode & 0o7777), Uid: int(st.Uid), Gid: int(st.Gid),
	}
	switch info.Mode().Type() {
	case fs.ModeDir:
		h.Typeflag = tar.TypeDir
		h.Name += "/"
		if err := t.header(h); err != nil {
			return err
		}
		return t.children(rel)
	case fs.ModeSymlink:
		h.Typeflag = tar.TypeSymlink
		if h.Linkname, err = t.root.Readlink(rel); err != nil {
			return fmt.Errorf("portable: %w", err)
		}
		return t.header(h)
	case 0:
		return t.file(rel, h, st)
	}
	return nil // pipes, sockets and devices belong to processes that are gone
}

func (t *treeWriter) header(h *tar.Header) error {
	t.entries++
	if err := t.tar.WriteHeader(h); err != nil {
		return fmt.Errorf("portable: %s: %w", h.Name, err)
	}
	return nil
}

func (t *treeWriter) file(rel string, h *tar.Header, st *syscall.Stat_t) error {
	if st.Nlink > 1 {
		id := inode{uint64(st.Dev), st.Ino}
		if first, seen := t.links[id]; seen {
			h.Typeflag, h.Linkname = tar.TypeLink, first
			return t.header(h)
		}
		t.links[id] = h.Name
	}
	f, err := t.root.OpenFile(rel, os.O_RDONLY|unix.O_NOFOLLOW|unix.O_NONBLOCK, 0)
	if err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	defer f.Close()
	h.Typeflag = tar.TypeReg
	extents, err := dataOf(f, st.Size)
	if err != nil {
		return fmt.Errorf("portable: %s: %w", rel, err)
	}
	for _, e := range extents {
		h.Size += e.length
	}
	if h.Size < st.Size {
		h.PAXRecords = map[string]string{sparseRecord: encodeExtents(st.Size, extents)}
	}
	if err := t.header(h); err != nil {
		return err
	}
	for _, e := range extents {
		if n, err := io.CopyBuffer(onlyWriter{t.tar}, io.NewSectionReader(f, e.offset, e.length), t.buf); err != nil || n != e.length {
			return fmt.Errorf("portable: %s: %d of %d bytes: %w", rel, n, e.length, errors.Join(err, errShrank))
		}
	}
	return nil
}

var errShrank = errors.New("the file changed")

// onlyWriter hides tar.Writer's ReadFrom, which does without our buffer.
type onlyWriter struct{ io.Writer }

// extent is a part of a file that holds data.
type extent struct{ offset, length int64 }

// maxExtents bounds the record of a sparse file; holes beyond are written as
// zeros.
const maxExtents = 4096

// dataOf lists the data of a file, between its holes.
func dataOf(f *os.File, size int64) (list []extent, err error) {
	fd := int(f.Fd())
	for at := int64(0); at < size; {
		start, err := unix.Seek(fd, at, unix.SEEK_DATA)
		if err == unix.ENXIO { // a hole to the end
			break
		}
		if err != nil {
			return []extent{{0, size}}, nil // a file system that knows no holes
		}
		end, err := unix.Seek(fd, start, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("holes: %w", err)
		}
		end = min(end, size)
		if start >= end {
			break
		}
		if len(list) == maxExtents {
			last := &list[maxExtents-1]
			last.length = size - last.offset
			break
		}
		list = append(list, extent{start, end - start})
		at = end
	}
	return list, nil
}

func encodeExtents(size int64, list []extent) string {
	var b strings.Builder
	b.WriteString(strconv.FormatInt(size, 10))
	for _, e := range list {
		fmt.Fprintf(&b, " %d %d", e.offset, e.length)
	}
	return b.String()
}
