package proxylink

import (
	"runtime"
	"sync"
	"syscall"
)

// pipe is what splice moves bytes through: it wants one between two sockets.
type pipe struct{ r, w int }

// From linux/fcntl.h, which package syscall lacks.
const (
	fSetPipeSize   = 1031
	spliceMove     = 1
	spliceNonblock = 2
)

// pipes are empty ones. One that the pool forgets is closed.
var pipes sync.Pool

func getPipe() (*pipe, error) {
	if p, ok := pipes.Get().(*pipe); ok {
		return p, nil
	}
	var fds [2]int
	if err := syscall.Pipe2(fds[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK); err != nil {
		return nil, err
	}
	p := &pipe{fds[0], fds[1]}
	// The kernel may refuse a size beyond a user's share: then 64 KiB must do.
	_, _, _ = syscall.Syscall(syscall.SYS_FCNTL, uintptr(p.w), fSetPipeSize, spliceSize)
	runtime.SetFinalizer(p, (*pipe).close)
	return p, nil
}

// putPipe keeps an empty pipe.
func putPipe(p *pipe) { pipes.Put(p) }

// close is for a pipe that nobody will use again.
func (p *pipe) close() {
	runtime.SetFinalizer(p, nil)
	syscall.Close(p.r)
	syscall.Close(p.w)
}

// spliceOnce moves what it can at once from one descriptor to another, one of
// which is a pipe's. EAGAIN: nothing.
func spliceOnce(from, to int) (int, error) {
	n, err := syscall.Splice(from, nil, to, nil, spliceSize, spliceMove|spliceNonblock)
	return int(n), err
}
