package cdp

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
)

// Frame opcodes (RFC 6455 5.2).
const (
	opContinuation = 0x0
	opText         = 0x1
	opBinary       = 0x2
	opClose        = 0x8
	opPing         = 0x9
	opPong         = 0xA
)

const (
	finBit     = 0x80
	rsvBits    = 0x70
	maskBit    = 0x80
	maxHeader  = 14
	maxControl = 125
)

var errFrame = errors.New("malformed WebSocket frame")

// frame is a frame's header.
type frame struct {
	fin    bool
	opcode byte
	masked bool
	mask   [4]byte
	length int64
	size   int // of the header itself, bytes
}

// peekFrame reads the header at the front of r without consuming it.
func peekFrame(r *bufio.Reader) (frame, error) {
	b, err := r.Peek(2)
	if err != nil {
		return frame{}, err
	}
	if b[0]&rsvBits != 0 {
		return frame{}, fmt.Errorf("%w: reserved bits set", errFrame)
	}
	f := frame{fin: b[0]&finBit != 0, opcode: b[0] & 0xF, masked: b[1]&maskBit != 0, length: int64(b[1] &^ maskBit), size: 2}
	switch f.length {
	case 126:
		f.size += 2
	case 127:
		f.size += 8
	}
	if f.masked {
		f.size += 4
	}
	if b, err = r.Peek(f.size); err != nil {
		return frame{}, err
	}
	switch f.length {
	case 126:
		f.length = int64(binary.BigEndian.Uint16(b[2:]))
	case 127:
		f.length = int64(binary.BigEndian.Uint64(b[2:]))
	}
	if f.masked {
		copy(f.mask[:], b[f.size-4:])
	}
	return f, f.check()
}

func (f frame) check() error {
	switch {
	case f.length < 0:
		return fmt.Errorf("%w: length out of range", errFrame)
	case f.opcode > opBinary && f.opcode < opClose || f.opcode > opPong:
		return fmt.Errorf("%w: opcode %d", errFrame, f.opcode)
	case f.control() && (!f.fin || f.length > maxControl):
		return fmt.Errorf("%w: control frame too long or in parts", errFrame)
	}
	return nil
}

func (f frame) control() bool { return f.opcode >= opClose }

// appendHeader appends a frame header. A masked one gets the key zero, which
// leaves the payload as it is: masking guards intermediaries (RFC 6455 10.3),
// and there is none between the broker and Chrome.
func appendHeader(b []byte, fin bool, opcode byte, masked bool, length int64) []byte {
	first, mask := opcode, byte(0)
	if fin {
		first |= finBit
	}
	if masked {
		mask = maskBit
	}
	switch {
	case length <= maxControl:
		b = append(b, first, mask|byte(length))
	case length <= 0xFFFF:
		b = binary.BigEndian.AppendUint16(append(b, first, mask|126), uint16(length))
	default:
		b = binary.BigEndian.AppendUint64(append(b, first, mask|127), uint64(length))
	}
	if masked {
		b = append(b, 0, 0, 0, 0)
	}
	return b
}

// unmask removes the mask from b, the part of a payload that begins at offset.
func unmask(b []byte, key [4]byte, offset int64) {
	var k [8]byte
	for i := range k {
		k[i] = key[(int64(i)+offset)&3]
	}
	wide := binary.LittleEndian.Uint64(k[:])
	for len(b) >= 8 {
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)^wide)
		b = b[8:]
	}
	for i := range b {
		b[i] ^= k[i]
	}
}

// closeFrame is a Close to a client.
func closeFrame(code int, reason string) []byte {
	b := appendHeader(nil, true, opClose, false, int64(2+len(reason)))
	return append(binary.BigEndian.AppendUint16(b, uint16(code)), reason...)
}
