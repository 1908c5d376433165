package proxylink

import (
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A pump moves one direction. Small messages are copied through a buffer, which
// is quicker than splice for them; what fills the buffer twice in a row is
// moved inside the kernel, until it comes in small pieces again. Neither a
// buffer nor a pipe is held while there is nothing to read: most connections of
// a browser are idle.

const (
	copySize   = 32 << 10  // of a buffer
	spliceSize = 512 << 10 // of a pipe, and moved at once at most: with less the CPU a byte costs grows, with more nothing gets quicker
	bulkReads  = 2         // full buffers in a row, until splice takes over
	smallReads = 8         // splices of less than a buffer in a row, until it stops
)

// pump copies from src to dst until src ends. read and written are told of
// bytes that src gave and dst took.
func pump(dst, src HalfCloser, read, written Counter) error {
	p := &oneWay{dst: dst, src: src, read: read, written: written}
	if from, ok := src.(*net.TCPConn); ok {
		p.from, _ = from.SyscallConn() // fails on a closed one: then reading does too
		if to, ok := dst.(*net.TCPConn); ok {
			p.to, _ = to.SyscallConn()
		}
	}
	for {
		if more, err := p.step(); err != nil || !more {
			return err
		}
		if p.bulk {
			p.giveWay()
		}
	}
}

// relays counts the open ones.
var relays atomic.Int64

// giveWay lets other connections have their turn. While the goroutine of a bulk
// direction can run on, nobody may be looking for what arrived elsewhere: the
// runtime looks when a thread has nothing to run, and otherwise each 10 ms.
func (p *oneWay) giveWay() {
	waited := p.waited
	p.waited = false
	if waited || relays.Load() < 2 { // it let them just now, or nobody is there
		return
	}
	time.Sleep(time.Microsecond) // Gosched would run it again before looking
}

// oneWay is a direction. One goroutine owns it.
type oneWay struct {
	dst, src      HalfCloser
	from, to      syscall.RawConn // nil: not a bare TCP connection
	read, written Counter
	streak        int // full reads, or small splices, in a row
	bulk          bool
	waited        bool // for bytes, since it gave way
}

// step moves what is there; more is false at the end of src.
func (p *oneWay) step() (more bool, err error) {
	if !p.bulk {
		return p.copy()
	}
	return p.splice()
}

func (c Counter) add(n int) {
	if c != nil && n > 0 {
		c(int64(n))
	}
}

var buffers = sync.Pool{New: func() any { return new([copySize]byte) }}

func (p *oneWay) copy() (more bool, err error) {
	buf, n, err := p.fill()
	if buf != nil {
		defer buffers.Put(buf)
	}
	p.read.add(n)
	if n > 0 {
		w, failed := p.dst.Write(buf[:n])
		p.written.add(w)
		if failed != nil {
			return false, failed
		}
	}
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	p.note(n == copySize, bulkReads)
	return true, err
}

// fill waits for bytes and reads them; buf may be nil where there are none.
func (p *oneWay) fill() (buf *[copySize]byte, n int, err error) {
	if p.from == nil {
		buf = buffers.Get().(*[copySize]byte)
		n, err = p.src.Read(buf[:])
		return buf, n, err
	}
	var failed error
	err = p.from.Read(func(fd uintptr) bool {
		buf = buffers.Get().(*[copySize]byte)
		if n, failed = retry(func() (int, error) { return syscall.Read(int(fd), buf[:]) }); failed != syscall.EAGAIN {
			return true
		}
		buffers.Put(buf)
		buf = nil
		return false
	})
	return buf, max(n, 0), ended(n, err, failed)
}

// splice moves up to a pipe's content from socket to socket.
func (p *oneWay) splice() (more bool, err error) {
	var pp *pipe
	var n int
	var failed error
	err = p.from.Read(func(fd uintptr) bool {
		if pp, failed = getPipe(); failed != nil {
			return true
		}
		if n, failed = retry(func() (int, error) { return spliceOnce(int(fd), pp.w) }); failed != syscall.EAGAIN {
			return true
		}
		putPipe(pp)
		pp = nil
		p.waited = true
		return false
	})
	if pp == nil && err == nil { // out of descriptors: copying needs none
		p.bulk, p.streak = false, 0
		return true, nil
	}
	err = ended(n, err, failed)
	p.read.add(n)
	p.note(n < copySize, smallReads)
	for n > 0 && err == nil {
		var w int
		w, err = p.drain(pp)
		p.written.add(w)
		n -= w
	}
	switch {
	case pp == nil:
	case n > 0: // what is in it is nobody's
		pp.close()
	default:
		putPipe(pp)
	}
	if errors.Is(err, io.EOF) {
		return false, nil
	}
	return true, err
}

// drain moves what it can from a pipe to dst.
func (p *oneWay) drain(pp *pipe) (n int, err error) {
	var failed error
	err = p.to.Write(func(fd uintptr) bool {
		n, failed = retry(func() (int, error) { return spliceOnce(pp.r, int(fd)) })
		return failed != syscall.EAGAIN
	})
	if err == nil && failed == nil && n == 0 {
		failed = io.ErrShortWrite // no kernel does that
	}
	return max(n, 0), errors.Join(err, failed)
}

// note counts reads of a kind in a row and changes the way of moving.
func (p *oneWay) note(same bool, limit int) {
	if p.streak++; !same {
		p.streak = 0
	}
	if p.streak >= limit && p.to != nil {
		p.bulk, p.streak = !p.bulk, 0
	}
}

// retry repeats a system call that a signal interrupted.
func retry(call func() (int, error)) (int, error) {
	for {
		if n, err := call(); err != syscall.EINTR {
			return n, err
		}
	}
}

// ended is the verdict of a read: of the wait, of the call, or the end.
func ended(n int, wait, call error) error {
	switch {
	case wait != nil:
		return wait
	case call != nil:
		return call
	case n == 0:
		return io.EOF
	}
	return nil
}
