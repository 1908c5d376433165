package wsframe

import (
	"bytes"
	"encoding/binary"
	"errors"
	"testing"

	"pgregory.net/rapid"
)

// frame builds any frame, valid or not.
func frame(first byte, n uint64, masked bool, payload []byte) []byte {
	b := []byte{first, 0}
	switch {
	case n < 126:
		b[1] = byte(n)
	case n < 1<<16:
		b[1] = 126
		b = binary.BigEndian.AppendUint16(b, uint16(n))
	default:
		b[1] = 127
		b = binary.BigEndian.AppendUint64(b, n)
	}
	if masked {
		b[1] |= 0x80
		b = append(b, 1, 2, 3, 4)
	}
	return append(b, payload...)
}

// reference reads frames from whole input, one by one, the naive way.
func reference(b []byte) (headers []Header, rest int64, open bool, bad bool) {
	for len(b) >= 2 {
		h := Header{Fin: b[0]>>7 == 1, RSV: b[0] >> 4 & 7, Opcode: b[0] & 15, Masked: b[1]>>7 == 1}
		l, size := uint64(b[1]&127), 2
		if l == 126 || l == 127 {
			size += map[uint64]int{126: 2, 127: 8}[l]
		}
		keyAt := size
		if h.Masked {
			size += 4
		}
		if len(b) < size {
			return headers, -1, open, false
		}
		if l == 126 || l == 127 {
			l = 0
			for _, x := range b[2:keyAt] {
				l = l<<8 | uint64(x)
			}
		}
		if h.Masked {
			copy(h.Key[:], b[keyAt:])
		}
		h.Len = int64(l)
		control := h.Opcode >= 8
		if h.Opcode >= 3 && h.Opcode <= 7 || h.Opcode > 10 || l >= 1<<63 ||
			control && (!h.Fin || l > 125) ||
			!control && (h.Opcode == 0) != open {
			return headers, 0, open, true
		}
		if !control {
			open = !h.Fin
		}
		headers = append(headers, h)
		b = b[size:]
		if uint64(len(b)) < l {
			return headers, int64(l) - int64(len(b)), open, false
		}
		b = b[l:]
	}
	if len(b) > 0 {
		return headers, -1, open, false
	}
	return headers, 0, open, false
}

// check compares the parser, fed in pieces, with the reference.
func check(t interface{ Fatalf(string, ...any) }, in []byte, piece func() int) {
	var p Parser
	var got []Header
	bad := false
feed:
	for b := in; len(b) > 0; {
		part := b[:min(max(piece(), 1), len(b))]
		b = b[len(part):]
		for len(part) > 0 {
			n, h, ok, err := p.Next(part)
			if err != nil {
				if !errors.Is(err, ErrFrame) {
					t.Fatalf("error %v", err)
				}
				bad = true
				break feed
			}
			if n <= 0 || n > len(part) {
				t.Fatalf("consumed %d of %d", n, len(part))
			}
			if ok {
				got = append(got, h)
			}
			part = part[n:]
		}
	}
	want, rest, open, wantBad := reference(in)
	if bad != wantBad {
		t.Fatalf("bad %v, reference %v", bad, wantBad)
	}
	if len(got) != len(want) {
		t.Fatalf("%d headers, reference %d", len(got), len(want))
	}
	for i := range got {
		if got[i] != want[i] {
			t.Fatalf("header %d is %+v, reference %+v", i, got[i], want[i])
		}
	}
	if !bad && (p.AtBoundary() != (rest == 0) || p.InMessage() != open || rest > 0 && p.Rest() != rest) {
		t.Fatalf("boundary %v, open %v, rest %d; reference rest %d, open %v", p.AtBoundary(), p.InMessage(), p.Rest(), rest, open)
	}
}

func FuzzParser(f *testing.F) {
	f.Add([]byte("\x81\x05hello"), uint8(1))
	f.Add(AppendClose(AppendPing(nil, []byte("x"), true), 1001, "bye", true), uint8(3))
	f.Add(frame(0x01, 70000, true, make([]byte, 300)), uint8(100))
	f.Add([]byte{0x82, 127, 0x80, 0, 0, 0, 0, 0, 0, 0}, uint8(9))
	f.Add([]byte{0x82, 127, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0}, uint8(20))
	f.Fuzz(func(t *testing.T, in []byte, piece uint8) {
		check(t, in, func() int { return int(piece) })
	})
}

// genStream is mostly valid: long streams of frames must be met, too.
func genStream(t *rapid.T) []byte {
	var b []byte
	open := false
	for range rapid.IntRange(0, 12).Draw(t, "frames") {
		masked := rapid.Bool().Draw(t, "masked")
		n := rapid.SampledFrom([]int{0, 1, 125, 126, 127, 300, 65535, 65536}).Draw(t, "n")
		first := rapid.SampledFrom([]byte{0x81, 0x02, 0xc1, 0x88, 0x89, 0x8a}).Draw(t, "first")
		if first >= 0x88 && first != 0xc1 {
			n = min(n, 125)
		} else if open {
			first = first & 0x80
			open = first == 0
		} else {
			open = first&0x80 == 0
		}
		b = append(b, frame(first, uint64(n), masked, make([]byte, n))...)
	}
	if rapid.IntRange(0, 5).Draw(t, "spoil") == 0 && len(b) > 0 {
		b[rapid.IntRange(0, len(b)-1).Draw(t, "at")] ^= byte(rapid.IntRange(1, 255).Draw(t, "by"))
	}
	return b[:len(b)-rapid.IntRange(0, min(len(b), 9)).Draw(t, "cut")]
}

func TestParserAgainstReference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		in := genStream(t)
		sizes := rapid.SampledFrom([][]int{{1}, {2, 1, 7}, {4096}, {1 << 20}}).Draw(t, "pieces")
		i := 0
		check(t, in, func() int { i++; return sizes[i%len(sizes)] })
	})
}

func TestBadHeaders(t *testing.T) {
	for name, in := range map[string][]byte{
		"reserved data opcode":    {0x83, 0},
		"reserved control opcode": {0x8b, 0},
		"long control":            frame(0x89, 126, false, nil),
		"fragmented control":      {0x09, 0},
		"top bit":                 {0x82, 127, 0x80, 0, 0, 0, 0, 0, 0, 0},
		"stray continuation":      {0x80, 0},
		"message in message":      {0x01, 0, 0x81, 0},
	} {
		var p Parser
		var err error
		for b := in; len(b) > 0 && err == nil; {
			var n int
			n, _, _, err = p.Next(b)
			b = b[n:]
		}
		if !errors.Is(err, ErrFrame) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEncoders(t *testing.T) {
	long := string(bytes.Repeat([]byte("é"), 100))
	for _, mask := range []bool{false, true} {
		var b []byte
		b = AppendPing(b, []byte("ping"), mask)
		b = AppendPong(b, nil, mask)
		b = AppendClose(b, CloseGoingAway, long, mask)
		var p Parser
		var c controlFrame
		var got []string
		for len(b) > 0 {
			n, h, ok, err := p.Next(b)
			if err != nil || ok && h.Masked != mask {
				t.Fatal(h, err)
			}
			if ok {
				c.begin(h)
			} else {
				c.add(b[:n])
			}
			b = b[n:]
			if p.AtBoundary() {
				op, payload := c.end()
				if op == OpClose {
					code, reason := ParseClose(payload)
					if code != CloseGoingAway || len(reason) != 122 || reason != long[:122] {
						t.Fatalf("close %d %q", code, reason)
					}
					payload = nil
				}
				got = append(got, string(op)+string(payload))
			}
		}
		if len(got) != 3 || got[0] != "\x09ping" || got[1] != "\x0a" || got[2] != "\x08" {
			t.Fatalf("%q", got)
		}
	}
	if a, b := AppendPing(nil, []byte("x"), true), AppendPing(nil, []byte("x"), true); bytes.Equal(a[2:6], b[2:6]) {
		t.Error("the same mask twice")
	}
}
