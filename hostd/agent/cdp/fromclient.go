package cdp

import (
	"fmt"
)

// message collects one message of the client. The front of buf is kept free
// for the header towards Chrome, so that a message leaves with one write.
type message struct {
	buf    []byte
	opcode byte
	open   bool  // begun, not finished
	stream bool  // too large to keep: its parts go on as they come
	total  int64 // payload bytes so far
}

func (m *message) reset() {
	if cap(m.buf) > keepBuffer {
		m.buf = nil
	}
	if m.buf == nil {
		m.buf = make([]byte, maxHeader, 4096)
	}
	*m = message{buf: m.buf[:maxHeader]}
}

// fromClient reads the client's frames until the client leaves.
func (r *relay) fromClient() error {
	var m message
	m.reset()
	for {
		f, err := peekFrame(r.in)
		if err != nil {
			return fmt.Errorf("from client: %w", err)
		}
		if !f.masked {
			return fmt.Errorf("from client: %w: not masked (RFC 6455 5.1)", errFrame)
		}
		if f.control() {
			err = r.control(f)
		} else {
			err = r.data(&m, f)
		}
		if err != nil {
			return fmt.Errorf("from client: %w", err)
		}
	}
}

func (r *relay) control(f frame) error {
	payload, err := readPayload(r.in, f, make([]byte, 0, maxControl))
	if err != nil {
		return err
	}
	switch f.opcode {
	case opPing:
		return r.send(append(appendHeader(nil, true, opPong, false, f.length), payload...))
	case opClose:
		r.code = clientClose(payload)
		return errLeft
	}
	return nil
}

func (r *relay) data(m *message, f frame) error {
	if (f.opcode == opContinuation) != m.open {
		return fmt.Errorf("%w: continuation out of place", errFrame)
	}
	if !m.open {
		m.opcode, m.open = f.opcode, true
	}
	if m.total += f.length; m.total > maxMessage || m.total < 0 {
		return errTooBig
	}
	if err := r.await(); err != nil {
		return errLeft // the relay ends
	}
	if m.stream || m.total > maxLooked {
		return r.streamPart(m, f)
	}
	var err error
	if m.buf, err = readPayload(r.in, f, m.buf); err != nil || !f.fin {
		return err
	}
	err = r.deliver(m)
	m.reset()
	return err
}

// deliver looks at a whole message and does what follows from it.
func (r *relay) deliver(m *message) error {
	if err := r.awaitPage(m.buf[maxHeader:]); err != nil {
		return err
	}
	v := look(m.buf[maxHeader:], r.names.dir)
	if v.naming {
		r.names.hide.Store(v.hideEvents)
		r.naming.Store(true)
	}
	if v.reply != nil {
		if err := r.sendText(v.reply); err != nil {
			return err
		}
	}
	switch {
	case v.leave:
		return errLeft
	case v.reply != nil:
		return nil
	case v.replace != nil:
		m.buf = append(m.buf[:maxHeader], v.replace...)
	}
	payload := int64(len(m.buf) - maxHeader)
	header := appendHeader(make([]byte, 0, maxHeader), true, m.opcode, true, payload)
	start := maxHeader - len(header)
	copy(m.buf[start:], header)
	return r.toChrome(m.buf[start:])
}

// awaitPage waits until Chrome shows a page, but for a message that asks the
// browser for nothing that a page could change.
func (r *relay) awaitPage(msg []byte) error {
	if r.page == nil || pageless(msg) {
		return nil
	}
	if err := r.page(r.ctx); err != nil {
		return errLeft // the relay ends
	}
	r.page = nil
	return nil
}

func (r *relay) toChrome(b []byte) error {
	if _, err := r.chrome.Write(b); err != nil {
		return fmt.Errorf("to chrome: %w", err)
	}
	return nil
}

// streamPart passes one frame of a large message on as it comes. What of the
// message was kept so far goes first.
func (r *relay) streamPart(m *message, f frame) error {
	opcode := byte(opContinuation)
	if !m.stream {
		if err := r.awaitPage(nil); err != nil {
			return err
		}
		m.stream = true
		opcode = m.opcode
		if kept := m.buf[maxHeader:]; len(kept) > 0 {
			if err := r.toChrome(append(appendHeader(nil, false, opcode, true, int64(len(kept))), kept...)); err != nil {
				return err
			}
			opcode = opContinuation
		}
	}
	if _, err := r.in.Discard(f.size); err != nil {
		return err
	}
	if err := r.toChrome(appendHeader(make([]byte, 0, maxHeader), f.fin, opcode, true, f.length)); err != nil {
		return err
	}
	for offset := int64(0); offset < f.length; {
		if _, err := r.in.Peek(1); err != nil {
			return err
		}
		part, err := r.in.Peek(int(min(int64(r.in.Buffered()), f.length-offset)))
		if err != nil {
			return err
		}
		unmask(part, f.mask, offset)
		if err := r.toChrome(part); err != nil {
			return err
		}
		_, _ = r.in.Discard(len(part))
		offset += int64(len(part))
	}
	if f.fin {
		m.reset()
	}
	return nil
}
