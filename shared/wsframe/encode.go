package wsframe

import (
	"encoding/binary"
	"math/rand/v2"
	"unicode/utf8"
)

// Close codes of RFC 6455 section 7.4.1 and the registry (1012).
const (
	CloseNormal        = 1000
	CloseGoingAway     = 1001
	CloseProtocolError = 1002
	CloseNoStatus      = 1005 // never on the wire: a close frame without a code
	ClosePolicy        = 1008
	CloseInternalError = 1011
	CloseRestart       = 1012
)

// AppendClose appends a close frame with a code and a reason, which is cut at
// 123 bytes. mask is for the direction from client to server.
func AppendClose(dst []byte, code uint16, reason string, mask bool) []byte {
	for len(reason) > MaxControl-2 {
		_, n := utf8.DecodeLastRuneInString(reason)
		reason = reason[:len(reason)-n]
	}
	dst, key := appendHeader(dst, OpClose, 2+len(reason), mask)
	start := len(dst)
	dst = binary.BigEndian.AppendUint16(dst, code)
	dst = append(dst, reason...)
	xor(dst[start:], key, 0)
	return dst
}

// AppendPing appends a ping; payload is at most 125 bytes.
func AppendPing(dst, payload []byte, mask bool) []byte {
	return appendControl(dst, OpPing, payload, mask)
}

// AppendPong appends a pong; payload, at most 125 bytes, is that of the ping.
func AppendPong(dst, payload []byte, mask bool) []byte {
	return appendControl(dst, OpPong, payload, mask)
}

func appendControl(dst []byte, op byte, payload []byte, mask bool) []byte {
	payload = payload[:min(len(payload), MaxControl)]
	dst, key := appendHeader(dst, op, len(payload), mask)
	start := len(dst)
	dst = append(dst, payload...)
	xor(dst[start:], key, 0)
	return dst
}

// appendHeader appends the header of a control frame. Keys come from a ChaCha8
// generator that the runtime seeds: no one can foresee them (section 5.3).
func appendHeader(dst []byte, op byte, n int, mask bool) ([]byte, [4]byte) {
	var key [4]byte
	dst = append(dst, 0x80|op, byte(n))
	if mask {
		dst[len(dst)-1] |= 0x80
		binary.NativeEndian.PutUint32(key[:], rand.Uint32())
		dst = append(dst, key[:]...)
	}
	return dst, key
}

// ParseClose reads the unmasked payload of a close frame. Without a code it is
// CloseNoStatus.
func ParseClose(payload []byte) (code uint16, reason string) {
	if len(payload) < 2 {
		return CloseNoStatus, ""
	}
	return binary.BigEndian.Uint16(payload), string(payload[2:])
}

// xor masks or unmasks b, which begins at offset off of the payload.
func xor(b []byte, key [4]byte, off int) {
	for i := range b {
		b[i] ^= key[(off+i)&3]
	}
}
