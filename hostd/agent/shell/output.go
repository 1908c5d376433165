package shell

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// readSize is how much one read of a command's output takes: a pipe holds
// 64 KiB, so a fast writer's output is coalesced into pieces of that size.
const readSize = 64 << 10

// Deadlines of a file that end its reads at once, and never.
var past, never = time.Unix(1, 0), time.Time{}

var readBuffers = sync.Pool{New: func() any { b := make([]byte, readSize); return &b }}

// tap reads one stream of a command to its sink from start to the moment the
// command ended, and then throws away what background jobs still write, so
// that they neither block nor die of SIGPIPE.
type tap struct {
	r     *os.File
	ended chan struct{}
}

// openTap begins to read r into sink. tails counts what goes on afterwards.
func openTap(r *os.File, sink io.Writer) *tap {
	t := &tap{r: r, ended: make(chan struct{})}
	go t.run(sink)
	return t
}

func (t *tap) run(sink io.Writer) {
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	defer close(t.ended)
	for {
		n, err := t.r.Read(*buf)
		_, _ = sink.Write((*buf)[:n]) // a sink that fails belongs to a client that left
		if errors.Is(err, os.ErrDeadlineExceeded) {
			drain(t.r, sink, *buf)
			return
		}
		if err != nil {
			return
		}
	}
}

// drain reads what is in the pipe now, whatever its deadline, and no more: a
// background job may write for ever.
func drain(pipe *os.File, sink io.Writer, buf []byte) {
	conn, err := pipe.SyscallConn()
	if err != nil {
		return
	}
	_ = conn.Control(func(fd uintptr) {
		left, err := unix.IoctlGetInt(int(fd), unix.TIOCINQ) // FIONREAD
		for err == nil && left > 0 {
			var n int
			if n, err = syscall.Read(int(fd), buf[:min(left, len(buf))]); n <= 0 {
				return
			}
			_, _ = sink.Write(buf[:n])
			left -= n
		}
	})
}

// finish ends the reading once the command has ended. The output before that
// moment is in the sink when it returns.
func (t *tap) finish(s *Shells) {
	_ = t.r.SetReadDeadline(past)
	<-t.ended
	if t.closedByAll() {
		t.r.Close()
		return
	}
	s.tails.Go(func() { s.discard(t.r) })
}

// closedByAll says whether no process can write any more.
func (t *tap) closedByAll() bool {
	gone := true
	if conn, err := t.r.SyscallConn(); err == nil {
		_ = conn.Control(func(fd uintptr) {
			fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
			_, err := unix.Poll(fds, 0)
			gone = err == nil && fds[0].Revents&unix.POLLHUP != 0
		})
	}
	return gone
}

// discard reads r to its end, or until the shells close.
func (s *Shells) discard(r *os.File) {
	stop := context.AfterFunc(s.ctx, func() { r.Close() })
	defer stop()
	_ = r.SetReadDeadline(never)
	buf := readBuffers.Get().(*[]byte)
	defer readBuffers.Put(buf)
	for {
		if _, err := r.Read(*buf); err != nil {
			r.Close()
			return
		}
	}
}
