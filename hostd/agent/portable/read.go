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
	"time"

	"golang.org/x/sys/unix"
)

// Folder is where the reader lays entries of one name.
type Folder struct {
	Root *os.Root
	// Only, if not nil, are the names directly below Root that may come.
	Only []string
	// Own, if not nil, gives what was laid its owner, in the place of the ids
	// in the stream.
	Own func(chown func(uid, gid int) error) error
}

const (
	maxName = 4096 // PATH_MAX
	maxID   = 1 << 16
	maxDirs = 4 << 20 // what is remembered of one takes memory
	// reserve is what a file must leave free on the disk, so that the machine
	// works on.
	reserve = 16 << 20
)

// dirTime is a directory's time, set when nothing is laid any more.
type dirTime struct {
	folder *Folder
	rel    string
	at     time.Time
}

func (r *reader) lay(h *tar.Header, folders map[string]*Folder) error {
	folder, rel, err := place(h.Name, folders)
	if err != nil {
		return err
	}
	switch h.Typeflag {
	case tar.TypeDir:
		return r.dir(h, folder, rel)
	case tar.TypeSymlink:
		return laySymlink(h, folder, rel)
	case tar.TypeLink:
		return layLink(h, folder, rel, folders)
	case tar.TypeReg:
		return r.file(h, folder, rel)
	}
	return malformed("%q is of type %q", h.Name, h.Typeflag)
}

// place finds the folder that an entry belongs to, and its path there.
func place(name string, folders map[string]*Folder) (*Folder, string, error) {
	top, rel, _ := strings.Cut(strings.TrimSuffix(name, "/"), "/")
	folder := folders[top]
	if folder == nil || len(name) > maxName || rel != path.Clean(rel) || rel == "." || !fs.ValidPath(strings.ToValidUTF8(rel, "x")) || strings.ContainsRune(rel, 0) {
		return nil, "", malformed("an entry named %.100q", name)
	}
	first, _, _ := strings.Cut(rel, "/")
	if folder.Only != nil && !slices.Contains(folder.Only, first) {
		return nil, "", malformed("an entry named %.100q", name)
	}
	return folder, rel, nil
}

func (f *Folder) own(h *tar.Header, chown func(uid, gid int) error) error {
	if f.Own != nil {
		return f.Own(chown)
	}
	if os.Geteuid() != 0 {
		return nil
	}
	if h.Uid < 0 || h.Gid < 0 || h.Uid >= maxID || h.Gid >= maxID {
		return malformed("an owner %d:%d", h.Uid, h.Gid)
	}
	return chown(h.Uid, h.Gid)
}

// mode is the twelve mode bits of a header as package os writes them.
func mode(h *tar.Header) uint32 { return uint32(h.Mode & 0o7777) }

func (r *reader) dir(h *tar.Header, folder *Folder, rel string) error {
	if info, err := folder.Root.Lstat(rel); err != nil || !info.IsDir() {
		if err == nil {
			err = folder.Root.Remove(rel)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("portable: %w", err)
		}
		if err := folder.Root.Mkdir(rel, 0o700); err != nil {
			return fmt.Errorf("portable: %w", err)
		}
	}
	d, err := folder.Root.Open(rel)
	if err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	defer d.Close()
	if err := errors.Join(folder.own(h, d.Chown), unix.Fchmod(int(d.Fd()), mode(h))); err != nil {
		return fmt.Errorf("portable: %s: %w", rel, err)
	}
	if len(r.dirs) == maxDirs {
		return malformed("more than %d directories", maxDirs)
	}
	r.dirs = append(r.dirs, dirTime{folder, rel, h.ModTime})
	return nil
}

func laySymlink(h *tar.Header, folder *Folder, rel string) error {
	if len(h.Linkname) > maxName {
		return malformed("a long link at %.100q", rel)
	}
	if err := clear(folder, rel); err != nil {
		return err
	}
	if err := folder.Root.Symlink(h.Linkname, rel); err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	lchown := func(uid, gid int) error { return folder.Root.Lchown(rel, uid, gid) }
	if err := errors.Join(folder.own(h, lchown), linkTime(folder.Root, rel, h.ModTime)); err != nil {
		return fmt.Errorf("portable: %s: %w", rel, err)
	}
	return nil
}

// linkTime sets the time of whatever is at rel, a link itself.
func linkTime(root *os.Root, rel string, at time.Time) error {
	d, err := root.Open(path.Dir(rel))
	if err != nil {
		return err
	}
	defer d.Close()
	ts, err := unix.TimeToTimespec(at)
	if err != nil {
		return malformed("the time of %.100q", rel)
	}
	return unix.UtimesNanoAt(int(d.Fd()), path.Base(rel), []unix.Timespec{ts, ts}, unix.AT_SYMLINK_NOFOLLOW)
}

func layLink(h *tar.Header, folder *Folder, rel string, folders map[string]*Folder) error {
	from, old, err := place(h.Linkname, folders)
	if err != nil {
		return err
	}
	if from != folder {
		return malformed("%.100q links to another folder", rel)
	}
	if info, err := folder.Root.Lstat(old); err != nil || !info.Mode().IsRegular() {
		return malformed("%.100q links to no file", rel)
	}
	if old == rel {
		return malformed("%.100q links to itself", rel)
	}
	if err := clear(folder, rel); err != nil {
		return err
	}
	if err := folder.Root.Link(old, rel); err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	return nil
}

// clear makes room for an entry. A directory that holds something stays, and
// what comes then fails.
func clear(folder *Folder, rel string) error {
	if err := folder.Root.Remove(rel); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("portable: %w", err)
	}
	return nil
}

func (r *reader) file(h *tar.Header, folder *Folder, rel string) error {
	size, extents, err := sparse(h)
	if err != nil {
		return err
	}
	if err := clear(folder, rel); err != nil {
		return err
	}
	f, err := folder.Root.OpenFile(rel, os.O_WRONLY|os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("portable: %w", err)
	}
	err = r.fill(f, h.Size, size, extents)
	if err == nil {
		// In this order: a change of owner drops set-id bits.
		err = errors.Join(folder.own(h, f.Chown), unix.Fchmod(int(f.Fd()), mode(h)))
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = linkTime(folder.Root, rel, h.ModTime)
	}
	if err != nil {
		return fmt.Errorf("portable: %s: %w", rel, err)
	}
	return nil
}

// fill writes a file's data where it belongs.
func (r *reader) fill(f *os.File, data, size int64, extents []extent) error {
	var disk unix.Statfs_t
	if err := unix.Fstatfs(int(f.Fd()), &disk); err == nil && data > 0 && uint64(data)+reserve > disk.Bavail*uint64(disk.Bsize) {
		return unix.ENOSPC
	}
	for _, e := range extents {
		n, err := io.CopyBuffer(io.NewOffsetWriter(f, e.offset), onlyReader{io.LimitReader(r.tar, e.length)}, r.buf)
		if err != nil {
			var path *fs.PathError
			if errors.As(err, &path) {
				return err // of the file
			}
			return malformed("%v", err)
		}
		if n != e.length {
			return malformed("%d of %d bytes", n, e.length)
		}
	}
	return f.Truncate(size)
}

// onlyReader hides WriteTo, which does without our buffer.
type onlyReader struct{ io.Reader }

// sparse gives the size of the file and where its data goes.
func sparse(h *tar.Header) (size int64, list []extent, err error) {
	record, ok := h.PAXRecords[sparseRecord]
	if !ok {
		return h.Size, []extent{{0, h.Size}}, nil
	}
	numbers, bad := []int64{}, false
	for text := range strings.SplitSeq(record, " ") {
		n, err := strconv.ParseInt(text, 10, 64)
		bad = bad || err != nil || n < 0 || len(numbers) > 2*maxExtents
		if bad {
			return 0, nil, malformed("the holes of %.100q", h.Name)
		}
		numbers = append(numbers, n)
	}
	size, numbers = numbers[0], numbers[1:]
	sum, end := int64(0), int64(0)
	for ; len(numbers) >= 2; numbers = numbers[2:] {
		e := extent{numbers[0], numbers[1]}
		if e.offset < end || e.length > size-e.offset {
			bad = true
			break
		}
		sum, end = sum+e.length, e.offset+e.length
		list = append(list, e)
	}
	if bad || len(numbers) > 0 || sum != h.Size {
		return 0, nil, malformed("the holes of %.100q", h.Name)
	}
	return size, list, nil
}

// finish sets the times of directories, children before their parents.
func (r *reader) finish() error {
	for _, d := range slices.Backward(r.dirs) {
		if err := linkTime(d.folder.Root, d.rel, d.at); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("portable: %s: %w", d.rel, err)
		}
	}
	return nil
}
