package files

import (
	"context"
	"fmt"
	"os"
	"path"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/agent/workspace"
)

// watchFallback is how often a wait looks without being told of a change: for
// file systems that tell none, and for changes made through another mount.
const watchFallback = time.Second

const watchMask = unix.IN_CREATE | unix.IN_MOVED_TO | unix.IN_CLOSE_WRITE | unix.IN_MODIFY | unix.IN_ATTRIB |
	unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR

// watch tells when something happens in a folder, or in the nearest one above
// it that exists (inotify(7)).
type watch struct {
	file    *os.File // the inotify descriptor
	changed chan struct{}
	done    chan struct{}
	id      int // its watch descriptor, -1 for none
}

func newWatch() (*watch, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, fmt.Errorf("inotify: %w", err)
	}
	w := &watch{file: os.NewFile(uintptr(fd), "inotify"), changed: make(chan struct{}, 1), done: make(chan struct{}), id: -1}
	go w.read()
	return w, nil
}

// read turns events into one pending wake-up; what happened is looked at anew.
func (w *watch) read() {
	defer close(w.done)
	buf := make([]byte, 16<<10)
	for {
		if _, err := w.file.Read(buf); err != nil {
			return
		}
		select {
		case w.changed <- struct{}{}:
		default:
		}
	}
}

// follow watches the resolved folder rel, or what exists of the way to it. The
// folder is opened through the workspace's root and watched by descriptor, so
// that a swapped link leads nowhere else.
func (w *watch) follow(t *workspace.Tree, rel string) {
	for ; ; rel = path.Dir(rel) {
		dir, err := t.Root.OpenFile(rel, os.O_RDONLY|unix.O_DIRECTORY|unix.O_NONBLOCK, 0)
		if err != nil && rel != "." {
			continue
		}
		if err == nil {
			w.set(dir)
			dir.Close()
		}
		return
	}
}

// set replaces the watch. Adding one that is there already gives its number
// again and costs nothing.
func (w *watch) set(dir *os.File) {
	conn, err := w.file.SyscallConn()
	if err != nil {
		return
	}
	_ = conn.Control(func(fd uintptr) {
		id, err := unix.InotifyAddWatch(int(fd), fmt.Sprintf("/proc/self/fd/%d", dir.Fd()), watchMask)
		if err != nil || id == w.id {
			return // then the fallback looks
		}
		if w.id >= 0 {
			_, _ = unix.InotifyRmWatch(int(fd), uint32(w.id))
		}
		w.id = id
	})
}

// next returns at a change, after again, or with ctx's cause. Changes that
// come in a burst are one: a writer in a loop would keep us looking.
func (w *watch) next(ctx context.Context, again time.Duration) error {
	timer := time.NewTimer(again)
	defer timer.Stop()
	select {
	case <-w.changed:
	case <-timer.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	calm := time.NewTimer(10 * time.Millisecond)
	defer calm.Stop()
	select {
	case <-calm.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func (w *watch) close() {
	w.file.Close()
	<-w.done
}
