package loop

import "syscall"

// pipe is what splice moves bytes through: it wants one between two sockets.
type pipe struct{ r, w int }

const (
	pipeSize = 512 << 10 // bytes, and moved at once at most: with less the CPU a byte costs grows, with more nothing gets quicker
	fSetPipe = 1031      // F_SETPIPE_SZ, from linux/fcntl.h
	maxPipes = 8         // empty ones that a loop keeps
)

// pipe gives an empty one, nil where there are no more descriptors.
func (l *Loop) pipe() *pipe {
	if n := len(l.pipes); n > 0 {
		p := l.pipes[n-1]
		l.pipes = l.pipes[:n-1]
		return p
	}
	var fds [2]int
	if syscall.Pipe2(fds[:], syscall.O_CLOEXEC|syscall.O_NONBLOCK) != nil {
		return nil
	}
	// The kernel may refuse a size beyond a user's share: then 64 KiB must do.
	_, _ = raw(syscall.SYS_FCNTL, uintptr(fds[1]), fSetPipe, pipeSize, 0, 0, 0)
	return &pipe{fds[0], fds[1]}
}

// keep takes an empty pipe back.
func (l *Loop) keep(p *pipe) {
	if len(l.pipes) < maxPipes {
		l.pipes = append(l.pipes, p)
		return
	}
	p.close()
}

func (p *pipe) close() {
	closeFD(p.r)
	closeFD(p.w)
}

func (l *Loop) closePipes() {
	for _, p := range l.pipes {
		p.close()
	}
	l.pipes = nil
}
