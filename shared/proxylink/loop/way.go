package loop

import "syscall"

const (
	copySize   = 32 << 10     // bytes read at once
	quickQuota = 2 * copySize // bytes a way may move in a turn, where connections begin
	bulkQuota  = pipeSize     // the same, where bulk goes
	bulkReads  = 2            // full reads in a row, until splice takes over
	smallReads = 8            // splices of less than copySize in a row, until it stops
)

// Counter is told of bytes that went one way; nil counts nothing.
type Counter func(n int64)

// Add tells c of n bytes, if any.
func (c Counter) Add(n int) {
	if c != nil && n > 0 {
		c(int64(n))
	}
}

// end is one of a relay's two sockets.
type end struct {
	fd                 int
	readable, writable bool // as far as is known
	hup                bool // its end, or a failure, waits behind what is there
	out                bool // EPOLLOUT is asked for
}

func (e *end) note(events uint32) {
	if events&(syscall.EPOLLRDHUP|syscall.EPOLLHUP|syscall.EPOLLERR) != 0 {
		e.hup, e.readable = true, true
	}
	if events&syscall.EPOLLIN != 0 {
		e.readable = true
	}
	if events&(syscall.EPOLLOUT|syscall.EPOLLHUP|syscall.EPOLLERR) != 0 {
		e.writable = true
	}
}

// way is one direction of a relay. Small messages are read and written, which is
// quicker than splice for them; what fills a read twice in a row is moved inside
// the kernel, until it comes in small pieces again. Memory or a pipe is held
// only while the other end does not take what was read.
type way struct {
	from, to      *end
	read, written Counter
	held          []byte // read and not written
	pipe          *pipe  // nil: nothing is in it
	in            int    // bytes in pipe
	streak        int    // full reads, or small splices, in a row
	bulk          bool
	eof           bool // from has ended
	ended         bool // and to knows
}

// turn moves up to a quota. more says that there may be more at once.
func (w *way) turn(l *Loop) (more bool, err error) {
	for moved := 0; ; {
		if rest, err := w.flush(l); rest || err != nil {
			return false, err
		}
		if w.eof || !w.from.readable {
			return false, nil
		}
		if moved >= l.quota || w.bulk && l.bulk != nil {
			return true, nil
		}
		n, err := w.take(l)
		if err != nil {
			return false, err
		}
		moved += n
	}
}

// take reads once; what could be read and not written is held.
func (w *way) take(l *Loop) (n int, err error) {
	if w.bulk {
		if p := l.pipe(); p != nil {
			return w.splice(l, p)
		}
		w.bulk, w.streak = false, 0 // out of descriptors: copying needs none
	}
	n, err = Read(w.from.fd, l.scratch[:])
	if err == nil && n > 0 && n < copySize && !w.from.hup {
		w.from.readable = false // what comes later is told (epoll(7), question 9)
	}
	if n == 0 {
		return 0, w.nothing(err)
	}
	w.read.Add(n)
	w.note(n == copySize, bulkReads)
	sent, err := w.send(l, l.scratch[:n])
	if err == nil && sent < n {
		w.held = append([]byte(nil), l.scratch[sent:n]...)
	}
	return n, err
}

// nothing takes note of a read without bytes: of the end, or of none for now.
func (w *way) nothing(err error) error {
	switch err {
	case nil:
		w.eof = true
	case syscall.EAGAIN:
		w.from.readable = false
	default:
		return err
	}
	return nil
}

// send writes what b's reader takes.
func (w *way) send(l *Loop, b []byte) (sent int, err error) {
	for sent < len(b) && w.to.writable {
		n, err := Write(w.to.fd, b[sent:])
		if err != nil {
			return sent, w.full(l, err)
		}
		w.written.Add(n)
		sent += n
	}
	return sent, nil
}

// full takes note that there is no room at the other end.
func (w *way) full(l *Loop, err error) error {
	if err != syscall.EAGAIN {
		return err
	}
	w.to.writable = false
	if w.to.out {
		return nil
	}
	w.to.out = true
	return l.writes(w.to.fd)
}

// splice fills p; flush empties it.
func (w *way) splice(l *Loop, p *pipe) (n int, err error) {
	n, err = splice(w.from.fd, p.w, pipeSize)
	if n == 0 {
		l.keep(p)
		return 0, w.nothing(err)
	}
	w.pipe, w.in = p, n
	w.read.Add(n)
	w.note(n < copySize, smallReads)
	return n, nil
}

// flush writes what is held; rest says that some is left.
func (w *way) flush(l *Loop) (rest bool, err error) {
	if len(w.held) > 0 {
		n, err := w.send(l, w.held)
		if w.held = w.held[n:]; len(w.held) > 0 || err != nil {
			return true, err
		}
		w.held = nil
	}
	for w.in > 0 && w.to.writable {
		n, err := splice(w.pipe.r, w.to.fd, w.in)
		if err != nil {
			if err = w.full(l, err); err != nil {
				return true, err
			}
			continue
		}
		w.written.Add(n)
		w.in -= n
	}
	if w.in > 0 {
		return true, nil
	}
	if w.pipe != nil {
		l.keep(w.pipe)
		w.pipe = nil
	}
	return false, nil
}

// note counts reads of a kind in a row and changes the way of moving.
func (w *way) note(same bool, limit int) {
	if w.streak++; !same {
		w.streak = 0
	}
	if w.streak >= limit {
		w.bulk, w.streak = !w.bulk, 0
	}
}
