package link

import (
	"encoding/binary"
	"fmt"
)

// The protocol. Integers are big-endian.
//
// A transport begins with one hello of the dialler, 100 bytes:
//
//	magic[4] flags[1] 0[3] attempt[4] buffer[4] step[4] id[16] secret[32] lineage[16] received[8] consumed[8]
//
// attempt counts the transports of a stream, so that one that arrives late
// cannot displace a newer one. buffer is the most the sender of the hello is
// ready to hold unread; step is a quarter of its smallest send window: the
// other side acknowledges at least that often. lineage is zero until the
// first welcome told it. received counts the stream bytes that arrived,
// consumed those that the application has read.
//
// From then on both sides send frames. Each begins with 12 bytes:
//
//	type[1] length[3] ack[8]
//
// and ack is what the sender of the frame has consumed: acknowledgement and
// flow control in one, free of charge on every frame. Never more than the
// receiver's buffer lies between the ack a sender knows and its last byte.
//
//	welcome  the answer to a hello and the agent's first frame; 36 bytes:
//	         flags[1] refusal[1] 0[2] buffer[4] step[4] lineage[16] received[8]
//	data     the next 1 to 256 KiB of the stream
//	fin      the end of the stream; counts as one byte, so that it is
//	         acknowledged and resent like one
//	ack      nothing but the header
//	stop     the sender reads no more (Close): the other side drops what it
//	         kept and its writes fail. On resume it travels as a flag.
//	reset    the stream is void at once (Abort)
//	ping     answered by pong; asked when nothing came for a while
//
// Data is not numbered on the wire: a transport keeps order, and hello and
// welcome say where it starts: at the other side's received.
//
// A first hello (flag resume not set) does not wait for the welcome: data
// follows at once, at most initialWindow of it. It is sent again, unchanged,
// when the transport breaks before the welcome came; the agent then resumes
// the stream it has, and remembers ended ones, so that nothing runs twice.
const (
	frameData    byte = 1
	frameFin     byte = 2
	frameAck     byte = 3
	frameStop    byte = 4
	frameReset   byte = 5
	framePing    byte = 6
	framePong    byte = 7
	frameWelcome byte = 8
)

const (
	magic      = "BRL1"
	helloLen   = 100
	headerLen  = 12
	welcomeLen = 36
	maxPayload = 256 << 10

	// initialWindow is what every receiver must be ready to hold, so that a
	// stream can start before the welcome.
	initialWindow = 64 << 10

	flagResume byte = 1 // hello: the welcome was seen, the stream must exist
	flagStop   byte = 2 // hello, welcome: the sender reads no more
)

// hello is what a dialler says first on every transport.
type hello struct {
	flags    byte
	attempt  uint32
	buffer   uint32
	step     uint32
	id       [16]byte
	secret   [32]byte
	lineage  [16]byte
	received uint64
	consumed uint64
}

func (h *hello) encode() []byte {
	b := make([]byte, 0, helloLen)
	b = append(b, magic...)
	b = append(b, h.flags, 0, 0, 0)
	b = binary.BigEndian.AppendUint32(b, h.attempt)
	b = binary.BigEndian.AppendUint32(b, h.buffer)
	b = binary.BigEndian.AppendUint32(b, h.step)
	b = append(b, h.id[:]...)
	b = append(b, h.secret[:]...)
	b = append(b, h.lineage[:]...)
	b = binary.BigEndian.AppendUint64(b, h.received)
	return binary.BigEndian.AppendUint64(b, h.consumed)
}

func parseHello(b []byte) (h hello, err error) {
	if len(b) != helloLen || string(b[:4]) != magic {
		return h, fmt.Errorf("%w: not a hello", errProtocol)
	}
	h.flags = b[4]
	h.attempt = binary.BigEndian.Uint32(b[8:])
	h.buffer = binary.BigEndian.Uint32(b[12:])
	h.step = binary.BigEndian.Uint32(b[16:])
	copy(h.id[:], b[20:])
	copy(h.secret[:], b[36:])
	copy(h.lineage[:], b[68:])
	h.received = binary.BigEndian.Uint64(b[84:])
	h.consumed = binary.BigEndian.Uint64(b[92:])
	if h.consumed > h.received {
		return h, fmt.Errorf("%w: consumed more than received", errProtocol)
	}
	return h, nil
}

// welcome is the body of a welcome frame.
type welcome struct {
	flags    byte
	refusal  byte
	buffer   uint32
	step     uint32
	lineage  [16]byte
	received uint64
}

// encode gives the whole frame, header included.
func (w *welcome) encode(consumed uint64) []byte {
	b := make([]byte, headerLen, headerLen+welcomeLen)
	putHeader(b, frameWelcome, welcomeLen, consumed)
	b = append(b, w.flags, w.refusal, 0, 0)
	b = binary.BigEndian.AppendUint32(b, w.buffer)
	b = binary.BigEndian.AppendUint32(b, w.step)
	b = append(b, w.lineage[:]...)
	return binary.BigEndian.AppendUint64(b, w.received)
}

func parseWelcome(b []byte) (w welcome) {
	w.flags, w.refusal = b[0], b[1]
	w.buffer = binary.BigEndian.Uint32(b[4:])
	w.step = binary.BigEndian.Uint32(b[8:])
	copy(w.lineage[:], b[12:])
	w.received = binary.BigEndian.Uint64(b[28:])
	return w
}

type header struct {
	typ byte
	n   int // payload length
	ack uint64
}

func putHeader(b []byte, typ byte, n int, ack uint64) {
	binary.BigEndian.PutUint32(b, uint32(typ)<<24|uint32(n))
	binary.BigEndian.PutUint64(b[4:], ack)
}

// recordLen reads the payload length of a header that we wrote.
func recordLen(b []byte) int { return int(binary.BigEndian.Uint32(b) & 0xffffff) }

func parseHeader(b []byte) (header, error) {
	w := binary.BigEndian.Uint32(b)
	h := header{typ: byte(w >> 24), n: int(w & 0xffffff), ack: binary.BigEndian.Uint64(b[4:])}
	ok := false
	switch h.typ {
	case frameData:
		ok = h.n > 0 && h.n <= maxPayload
	case frameWelcome:
		ok = h.n == welcomeLen
	case frameFin, frameAck, frameStop, frameReset, framePing, framePong:
		ok = h.n == 0
	}
	if !ok {
		return h, fmt.Errorf("%w: frame type %d with length %d", errProtocol, h.typ, h.n)
	}
	return h, nil
}

// parser cuts the bytes of one transport into frames, however they are split.
// It keeps at most one header and a welcome; payload passes through.
type parser struct {
	part [headerLen + welcomeLen]byte // an incomplete header or welcome frame
	have int                          // bytes in part
	rest int                          // payload bytes of the current data frame still to come
}

// next consumes n > 0 bytes of b, which is not empty. payload says that they
// are stream bytes; else h.typ is 0 when no frame is complete yet, or the
// frame that just began (data) or is complete (all others, body for welcome).
func (p *parser) next(b []byte) (n int, payload bool, h header, body []byte, err error) {
	if p.rest > 0 {
		n = min(p.rest, len(b))
		p.rest -= n
		return n, true, h, nil, nil
	}
	src := b[:min(headerLen, len(b))]
	if p.have > 0 || len(b) < headerLen { // collect
		want := headerLen
		if p.have >= headerLen {
			want += welcomeLen
		}
		n = copy(p.part[p.have:want], b)
		p.have += n
		if p.have < want {
			return n, false, h, nil, nil
		}
		src = p.part[:want]
	} else {
		n = headerLen
	}
	if h, err = parseHeader(src); err != nil {
		return n, false, header{}, nil, err
	}
	if h.typ == frameWelcome && len(src) == headerLen {
		p.have = copy(p.part[:], src) // its body is collected next
		return n, false, header{}, nil, nil
	}
	p.have = 0
	if h.typ == frameData {
		p.rest = h.n
	} else if h.typ == frameWelcome {
		body = src[headerLen:]
	}
	return n, false, h, body, nil
}
