package api

import (
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// watchClient calls gone once when the client's end of conn is closed, half or
// whole, or the connection has failed. stop ends the watch and waits for its
// goroutine.
//
// fasthttp's request context ends only with the server. The watch stands on a
// duplicate of the descriptor: it waits in the runtime's poller without taking
// the read lock or the deadlines of conn, so a handler may read a body
// meanwhile, and it consumes nothing, so a pipelined request stays where it
// is. poll(2) with POLLRDHUP sees a FIN behind unread bytes, which a peek
// would not.
func watchClient(conn net.Conn, gone func()) (stop func()) {
	f := duplicate(conn)
	if f == nil {
		return func() {} // no socket under it (a test's pipe): nobody can tell
	}
	raw, err := f.SyscallConn()
	if err != nil {
		_ = f.Close()
		return func() {}
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		left := false
		err := raw.Read(func(fd uintptr) bool {
			left = hungUp(int(fd))
			return left
		})
		if err == nil && left {
			gone()
		}
	}()
	return func() {
		_ = f.Close() // wakes the poller
		<-done
	}
}

// leftNow says whether the client's end of conn is closed at this moment.
func leftNow(conn net.Conn) (left bool) {
	c, ok := conn.(syscall.Conn)
	if !ok {
		return false
	}
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	err = raw.Control(func(fd uintptr) { left = hungUp(int(fd)) })
	return err == nil && left
}

func duplicate(conn net.Conn) *os.File {
	c, ok := conn.(interface{ File() (*os.File, error) })
	if !ok {
		return nil
	}
	f, err := c.File()
	if err != nil {
		return nil
	}
	return f
}

func hungUp(fd int) bool {
	p := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
	for {
		n, err := unix.Poll(p, 0)
		if err == unix.EINTR {
			continue
		}
		return err == nil && n > 0 && p[0].Revents&(unix.POLLRDHUP|unix.POLLHUP|unix.POLLERR) != 0
	}
}
