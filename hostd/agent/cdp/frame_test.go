package cdp

import (
	"bufio"
	"bytes"
	"testing"

	"pgregory.net/rapid"
)

func TestFramesSurviveWritingAndReading(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		payload := rapid.SliceOfN(rapid.Byte(), 0, 70_000).Draw(t, "payload")
		key := [4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "key"))
		fin, masked := rapid.Bool().Draw(t, "fin"), rapid.Bool().Draw(t, "masked")
		b := appendHeader(nil, fin, opBinary, masked, int64(len(payload)))
		body := bytes.Clone(payload)
		if masked {
			copy(b[len(b)-4:], key[:])
			for i := range body { // RFC 6455 5.3, literally
				body[i] ^= key[i%4]
			}
		}
		in := bufio.NewReaderSize(bytes.NewReader(append(b, body...)), rapid.IntRange(16, 4096).Draw(t, "buffer"))
		f, err := peekFrame(in)
		if err != nil {
			t.Fatal(err)
		}
		if f.fin != fin || f.masked != masked || f.length != int64(len(payload)) || f.size != len(b) {
			t.Fatalf("frame = %+v", f)
		}
		got, err := readPayload(in, f, nil)
		if err != nil || !bytes.Equal(got, payload) {
			t.Fatalf("payload of %d bytes came back as %d, %v", len(payload), len(got), err)
		}
	})
}

func TestUnmaskInParts(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		b := rapid.SliceOfN(rapid.Byte(), 0, 100).Draw(t, "b")
		key := [4]byte{1, 2, 3, 250}
		cut := rapid.IntRange(0, len(b)).Draw(t, "cut")
		whole, parts := bytes.Clone(b), bytes.Clone(b)
		unmask(whole, key, 0)
		unmask(parts[:cut], key, 0)
		unmask(parts[cut:], key, int64(cut))
		if !bytes.Equal(whole, parts) {
			t.Fatalf("cut at %d of %d differs", cut, len(b))
		}
	})
}

func FuzzPeekFrame(f *testing.F) {
	f.Add([]byte{0x81, 0x85, 1, 2, 3, 4, 'h', 'e', 'l', 'l', 'o'})
	f.Add([]byte{0x82, 0x7F, 0, 0, 0, 0, 0, 1, 0, 0})
	f.Fuzz(func(t *testing.T, b []byte) {
		in := bufio.NewReader(bytes.NewReader(b))
		h, err := peekFrame(in)
		if err != nil {
			return
		}
		if h.length < 0 || h.size < 2 || h.size > maxHeader || h.control() && h.length > maxControl {
			t.Fatalf("accepted %+v", h)
		}
		if got, err := readPayload(in, h, nil); err == nil && int64(len(got)) != h.length {
			t.Fatalf("payload of %d bytes for %+v", len(got), h)
		}
	})
}
