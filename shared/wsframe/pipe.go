package wsframe

import (
	"errors"
	"io"
	"sync"
	"time"
)

// Errors of Pipe.
var (
	// ErrInsideFrame: the stream stands inside a frame and did not leave it in
	// time. Nothing can be said on this socket any more: drop it.
	ErrInsideFrame = errors.New("wsframe: inside a frame")
	// ErrClosed: a close frame went over dst; nothing may follow it.
	ErrClosed = errors.New("wsframe: closed")
)

// Pipe relays one direction of a WebSocket from src to dst. Run copies; Inject,
// from any goroutine, puts a control frame of ours in between.
type Pipe struct {
	dst       io.Writer
	src       io.Reader
	onControl func(op byte, payload []byte)

	// Of Run's goroutine only.
	parser  Parser
	control controlFrame

	mu       sync.Mutex
	turn     sync.Cond // busy became false
	busy     bool      // somebody writes to dst
	boundary bool      // dst stands between two frames
	ended    bool      // Run has returned
	closed   bool      // we wrote a close frame to dst
	passed   bool      // a close frame of src passed
	err      error     // of a write: nothing can be written any more
	waiting  []*injection
}

type injection struct {
	frame []byte
	done  chan error // holds one
}

// NewPipe makes a Pipe. onControl, which may be nil, sees each control frame of
// src just before it passes, with its payload unmasked; it runs in Run's
// goroutine, must not block, and must not keep payload.
func NewPipe(dst io.Writer, src io.Reader, onControl func(op byte, payload []byte)) *Pipe {
	p := &Pipe{dst: dst, src: src, onControl: onControl, boundary: true}
	p.turn.L = &p.mu
	return p
}

// Run copies until src ends (nil between two frames, io.ErrUnexpectedEOF inside
// one), a read or write fails, src sends what is no frame (ErrFrame; nothing of
// that read is passed on) or Inject sent a close (ErrClosed). Call it once.
func (p *Pipe) Run() error {
	defer p.end()
	var buf buffer
	defer buf.release()
	for {
		b := buf.next()
		n, rerr := p.src.Read(b)
		buf.got(n)
		if n > 0 {
			first, closing, err := p.scan(b[:n])
			if err != nil {
				return err
			}
			if err := p.pass(b[:n], first, closing); err != nil {
				return err
			}
		}
		switch {
		case rerr == io.EOF && !p.parser.AtBoundary():
			return io.ErrUnexpectedEOF
		case rerr == io.EOF:
			return nil
		case rerr != nil:
			return rerr
		}
	}
}

// scan follows the frames in b. first is the first boundary in b, -1 if there
// is none; closing says that a close frame ends in b.
func (p *Pipe) scan(b []byte) (first int, closing bool, err error) {
	first = -1
	if p.parser.AtBoundary() {
		first = 0
	}
	for i := 0; i < len(b); {
		n, h, ok, err := p.parser.Next(b[i:])
		if err != nil {
			return 0, false, err
		}
		if ok {
			p.control.begin(h)
		} else {
			p.control.add(b[i : i+n])
		}
		i += n
		if !p.parser.AtBoundary() {
			continue
		}
		if first < 0 {
			first = i
		}
		if op, payload := p.control.end(); op != 0 {
			closing = closing || op == OpClose
			if p.onControl != nil {
				p.onControl(op, payload)
			}
		}
	}
	return first, closing, nil
}

// pass writes b, and what waits to be injected at its first boundary.
func (p *Pipe) pass(b []byte, first int, closing bool) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.busy {
		p.turn.Wait()
	}
	if first >= 0 && len(p.waiting) > 0 {
		if err := p.write(b[:first], true); err != nil {
			return err
		}
		p.injectWaiting()
		b = b[first:]
	}
	if p.closed {
		return ErrClosed
	}
	if err := p.write(b, p.parser.AtBoundary()); err != nil {
		return err
	}
	p.passed = p.passed || closing
	if p.boundary {
		p.injectWaiting()
	}
	return p.err
}

// write writes to dst without the lock; boundary says where that ends.
func (p *Pipe) write(b []byte, boundary bool) error {
	if p.err != nil || len(b) == 0 {
		return p.err
	}
	p.busy = true
	p.mu.Unlock()
	n, err := p.dst.Write(b)
	p.mu.Lock()
	p.busy = false
	p.turn.Broadcast()
	if err != nil {
		p.err = err
		p.boundary = p.boundary && n == 0
	} else {
		p.boundary = boundary
	}
	return err
}

// injectWaiting writes what waits; dst stands at a boundary.
func (p *Pipe) injectWaiting() {
	for len(p.waiting) > 0 {
		in := p.waiting[0]
		p.waiting = p.waiting[1:]
		in.done <- p.inject(in.frame)
	}
}

func (p *Pipe) inject(frame []byte) error {
	if p.closed || p.passed {
		return ErrClosed
	}
	err := p.write(frame, true)
	if err == nil && frame[0]&0xf == OpClose {
		p.closed = true
	}
	return err
}

// Inject writes a whole control frame to dst: at once when dst stands between
// two frames and nobody writes, else as soon as it does, for at most wait.
// After a close nothing more passes and Run returns ErrClosed. It works after
// Run has returned, too, if that ended at a boundary; else ErrInsideFrame. A
// write that blocks is bounded by dst's own deadline, not by wait.
func (p *Pipe) Inject(frame []byte, wait time.Duration) error {
	p.mu.Lock()
	if err := p.cannot(); err != nil {
		p.mu.Unlock()
		return err
	}
	if !p.busy && p.boundary {
		defer p.mu.Unlock()
		err := p.inject(frame)
		p.injectWaiting() // what came meanwhile
		return err
	}
	in := &injection{frame: frame, done: make(chan error, 1)}
	p.waiting = append(p.waiting, in)
	p.mu.Unlock()

	t := time.NewTimer(wait)
	defer t.Stop()
	select {
	case err := <-in.done:
		return err
	case <-t.C:
		return p.withdraw(in)
	}
}

// cannot says why no frame can be injected now or later.
func (p *Pipe) cannot() error {
	switch {
	case p.closed || p.passed:
		return ErrClosed
	case p.err != nil && !p.boundary, p.ended && !p.boundary && !p.busy:
		return ErrInsideFrame
	}
	return p.err
}

// withdraw takes an injection back, unless it is being written.
func (p *Pipe) withdraw(in *injection) error {
	p.mu.Lock()
	for i, w := range p.waiting {
		if w == in {
			p.waiting = append(p.waiting[:i:i], p.waiting[i+1:]...)
			p.mu.Unlock()
			return ErrInsideFrame
		}
	}
	p.mu.Unlock()
	return <-in.done
}

// end fails what still waits when Run returns.
func (p *Pipe) end() {
	p.mu.Lock()
	defer p.mu.Unlock()
	for p.busy {
		p.turn.Wait()
	}
	p.ended = true
	if p.boundary && p.err == nil {
		p.injectWaiting()
	}
	for _, in := range p.waiting {
		in.done <- p.cannot()
	}
	p.waiting = nil
}

// Position is a copy of the parser that follows src. Only src's own Read may
// call it, which Run calls between two steps.
func (p *Pipe) Position() Parser { return p.parser }

// AtBoundary says whether dst stands between two frames and can be written.
func (p *Pipe) AtBoundary() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.boundary && p.err == nil
}
