package loop

import (
	"errors"
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

const (
	maxAccepts  = 8                     // of one turn: then others have theirs
	acceptPause = 50 * time.Millisecond // out of descriptors: let some close
)

// Listener accepts connections on all loops.
type Listener struct {
	fd     int
	parts  []*accepting
	got    func(l *Loop, fd int)
	failed func(error)
}

// Listen has the loops accept ln's connections, which do not block then, and
// closes ln. got is called by the goroutine of the loop that accepted; failed
// is told of failures that pass, such as a lack of descriptors.
func Listen(ln *net.TCPListener, got func(l *Loop, fd int), failed func(error)) (*Listener, error) {
	all, err := quicks()
	if err != nil {
		return nil, err
	}
	fd, err := duplicate(ln)
	if err != nil {
		return nil, err
	}
	ln.Close()
	x := &Listener{fd: fd, got: got, failed: failed}
	for _, l := range all {
		a := &accepting{Listener: x, l: l}
		x.parts = append(x.parts, a)
		l.Call(a.begin)
	}
	return x, nil
}

// accepting is a Listener's part in one loop.
type accepting struct {
	*Listener
	l    *Loop
	over bool
}

// begin waits for connections; of several loops one is told of each.
func (a *accepting) begin() {
	if a.over {
		return
	}
	if err := a.l.add(a.fd, a, syscall.EPOLLIN|unix.EPOLLEXCLUSIVE); err != nil {
		a.failed(err)
	}
}

// Ready accepts.
func (a *accepting) Ready(int, uint32) {
	for range maxAccepts {
		fd, err := accept(a.fd)
		switch err {
		case nil:
			a.got(a.l, fd)
		case syscall.EAGAIN:
			return
		case syscall.ECONNABORTED:
		default:
			a.failed(err)
			a.l.Remove(a.fd)
			time.AfterFunc(acceptPause, func() { a.l.Call(a.begin) })
			return
		}
	}
}

// Close ends the accepting. When it returns no connection comes any more.
func (x *Listener) Close() {
	var all sync.WaitGroup
	for _, a := range x.parts {
		all.Add(1)
		a.l.Call(func() {
			a.over = true
			a.l.Remove(x.fd)
			all.Done()
		})
	}
	all.Wait()
	closeFD(x.fd)
}

// Take gives the socket of conn, which is closed as far as Go knows. It does not
// block.
func Take(conn *net.TCPConn) (fd int, err error) {
	fd, err = duplicate(conn)
	conn.Close()
	return fd, err
}

// duplicate gives another descriptor of a socket.
func duplicate(c syscall.Conn) (fd int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return -1, err
	}
	failed := raw.Control(func(own uintptr) { fd, err = unix.FcntlInt(own, unix.F_DUPFD_CLOEXEC, 0) })
	return fd, errors.Join(failed, err)
}
