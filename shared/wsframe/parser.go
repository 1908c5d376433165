package wsframe

import (
	"encoding/binary"
	"errors"
	"fmt"
)

// Opcodes (RFC 6455 section 11.8).
const (
	OpContinuation byte = 0x0
	OpText         byte = 0x1
	OpBinary       byte = 0x2
	OpClose        byte = 0x8
	OpPing         byte = 0x9
	OpPong         byte = 0xA
)

// MaxControl is the longest payload of a control frame (section 5.5).
const MaxControl = 125

const maxHeader = 2 + 8 + 4

// ErrFrame is a header that no endpoint may send; the socket is to be closed
// with CloseProtocolError.
var ErrFrame = errors.New("wsframe: bad frame")

// Header is one frame's header.
type Header struct {
	Opcode byte
	Fin    bool
	RSV    byte // the three reserved bits, for extensions the ends agreed on
	Masked bool
	Key    [4]byte // with Masked
	Len    int64   // of the payload
}

// Control says whether it is a close, ping or pong.
func (h Header) Control() bool { return h.Opcode&8 != 0 }

// Parser follows a stream of frames, fed in any pieces. The zero value stands
// at the start of a stream.
type Parser struct {
	part [maxHeader]byte // an incomplete header
	have int
	rest int64 // payload of the current frame still to come
	open bool  // inside a fragmented message
}

// Next consumes n > 0 bytes of b, which is not empty: payload of the current
// frame, or bytes of a header. ok says that they completed h.
func (p *Parser) Next(b []byte) (n int, h Header, ok bool, err error) {
	if p.rest > 0 {
		n = int(min(p.rest, int64(len(b))))
		p.rest -= int64(n)
		return n, h, false, nil
	}
	if p.have == 0 && len(b) >= 2 { // the usual case: the header is all there
		if size := headerLen(b[1]); len(b) >= size {
			h, err = p.begin(b[:size])
			return size, h, err == nil, err
		}
	}
	for n < len(b) {
		p.part[p.have] = b[n]
		p.have++
		n++
		if p.have >= 2 && p.have == headerLen(p.part[1]) {
			p.have = 0
			h, err = p.begin(p.part[:headerLen(p.part[1])])
			return n, h, err == nil, err
		}
	}
	return n, h, false, nil
}

// headerLen is the length of a header by its second byte.
func headerLen(second byte) int {
	n := 2
	switch second & 0x7f {
	case 126:
		n += 2
	case 127:
		n += 8
	}
	if second&0x80 != 0 {
		n += 4
	}
	return n
}

// begin takes in a whole header.
func (p *Parser) begin(b []byte) (Header, error) {
	h := decode(b)
	switch {
	case h.Len < 0:
		return h, fmt.Errorf("%w: length with the top bit set", ErrFrame)
	case h.Opcode > OpPong || h.Opcode > OpBinary && h.Opcode < OpClose:
		return h, fmt.Errorf("%w: reserved opcode %#x", ErrFrame, h.Opcode)
	case h.Control() && !h.Fin:
		return h, fmt.Errorf("%w: fragmented control frame", ErrFrame)
	case h.Control() && h.Len > MaxControl:
		return h, fmt.Errorf("%w: control frame of %d bytes", ErrFrame, h.Len)
	case h.Opcode == OpContinuation && !p.open:
		return h, fmt.Errorf("%w: continuation of nothing", ErrFrame)
	case (h.Opcode == OpText || h.Opcode == OpBinary) && p.open:
		return h, fmt.Errorf("%w: a message inside a fragmented one", ErrFrame)
	}
	if !h.Control() {
		p.open = !h.Fin
	}
	p.rest = h.Len
	return h, nil
}

func decode(b []byte) Header {
	h := Header{Opcode: b[0] & 0xf, Fin: b[0]&0x80 != 0, RSV: b[0] >> 4 & 7, Masked: b[1]&0x80 != 0}
	switch n := b[1] & 0x7f; n {
	case 126:
		h.Len = int64(binary.BigEndian.Uint16(b[2:]))
	case 127:
		h.Len = int64(binary.BigEndian.Uint64(b[2:]))
	default:
		h.Len = int64(n)
	}
	if h.Masked {
		copy(h.Key[:], b[len(b)-4:])
	}
	return h
}

// AtBoundary says that the stream stands between two frames: a control frame
// may be put here.
func (p *Parser) AtBoundary() bool { return p.rest == 0 && p.have == 0 }

// InMessage says that a fragmented message has begun and not ended.
func (p *Parser) InMessage() bool { return p.open }

// Rest is how much of the current frame's payload is still to come.
func (p *Parser) Rest() int64 { return p.rest }
