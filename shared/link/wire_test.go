package link

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"testing"
	"time"
)

func control1(typ byte, ack uint64) []byte {
	b := make([]byte, headerLen)
	putHeader(b, typ, 0, ack)
	return b
}

func data(payload []byte) []byte {
	b := make([]byte, headerLen)
	putHeader(b, frameData, len(payload), 0)
	return append(b, payload...)
}

func TestHelloWelcomeRoundTrip(t *testing.T) {
	h := hello{flags: 3, attempt: 7, buffer: 1 << 20, step: 99, id: [16]byte{1}, secret: [32]byte{2}, lineage: [16]byte{3}, received: 1 << 40, consumed: 5}
	if got, err := parseHello(h.encode()); err != nil || got != h {
		t.Fatalf("%+v, %v", got, err)
	}
	w := welcome{flags: 2, refusal: 1, buffer: 1 << 20, step: 99, lineage: [16]byte{3}, received: 1 << 40}
	got, ack, err := readWelcome(bytes.NewReader(w.encode(12)))
	if err != nil || got != w || ack != 12 {
		t.Fatalf("%+v, %d, %v", got, ack, err)
	}
	for _, b := range [][]byte{nil, make([]byte, helloLen), h.encode()[1:], (&hello{consumed: 1}).encode()} {
		if _, err := parseHello(b); !errors.Is(err, errProtocol) {
			t.Fatalf("%x: %v", b, err)
		}
	}
}

// frames feeds a parser in pieces and lists what it saw.
func frames(in []byte, piece int) (out []header, payload []byte, err error) {
	var p parser
	for len(in) > 0 {
		part := in[:min(piece, len(in))]
		in = in[len(part):]
		for len(part) > 0 {
			n, isPayload, h, body, err := p.next(part)
			if err != nil {
				return out, payload, err
			}
			if isPayload {
				payload = append(payload, part[:n]...)
			} else if h.typ != 0 {
				out = append(out, h)
				payload = append(payload, body...)
			}
			part = part[n:]
		}
	}
	return out, payload, nil
}

// FuzzFrames: no input makes the parser panic, and pieces make no difference.
func FuzzFrames(f *testing.F) {
	f.Add(append(data([]byte("hello")), control1(frameFin, 3)...), uint8(1))
	f.Add((&welcome{buffer: 1 << 20}).encode(0), uint8(7))
	f.Add([]byte{1, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 0}, uint8(12))
	f.Fuzz(func(t *testing.T, in []byte, piece uint8) {
		h1, p1, err1 := frames(in, 1<<20)
		h2, p2, err2 := frames(in, max(int(piece), 1))
		if (err1 == nil) != (err2 == nil) || len(h1) != len(h2) || !bytes.Equal(p1, p2) {
			t.Fatalf("%v %v %v\n%v %v %v", h1, len(p1), err1, h2, len(p2), err2)
		}
	})
}

// FuzzHostileAgent: whatever an agent sends after its welcome, the gateway
// neither panics nor holds more than its window.
func FuzzHostileAgent(f *testing.F) {
	f.Add([]byte(nil))
	f.Add(append(control1(frameFin, 0), control1(frameStop, 9)...))
	f.Add(bytes.Repeat(control1(framePing, 0), 100))
	f.Add(append(data(make([]byte, 60000)), data(make([]byte, 60000))...))
	f.Add(control1(frameAck, 1<<63))
	f.Fuzz(func(t *testing.T, in []byte) {
		near, far := net.Pipe()
		first := true
		c, err := dialPipe(near, far, &first, Options{MinWindow: 4096, MaxWindow: initialWindow, Keep: time.Millisecond})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Abort()
		far.SetDeadline(time.Now().Add(time.Second))
		go io.Copy(io.Discard, far)
		c.Write([]byte("request"))
		c.mu.Lock()
		c.ensureReader()
		c.mu.Unlock()
		far.Write((&welcome{buffer: initialWindow, step: 1}).encode(0))
		far.Write(in)
		c.mu.Lock()
		held := 0
		for ch := c.rq.head; ch != nil; ch = ch.next {
			held += len(ch.b)
		}
		c.mu.Unlock()
		if held > 2*initialWindow+2*bigChunk {
			t.Fatalf("%d bytes held", held)
		}
		far.Close()
		c.SetReadDeadline(time.Now().Add(time.Second))
		io.Copy(io.Discard, c)
	})
}

// dialPipe opens a stream whose only transport is near.
func dialPipe(near, far net.Conn, first *bool, o Options) (*Conn, error) {
	go io.ReadFull(far, make([]byte, helloLen))
	return Dial(context.Background(), func(context.Context) (net.Conn, error) {
		if !*first {
			return nil, goneError{}
		}
		*first = false
		return near, nil
	}, o)
}

// TestHostileFrames: what breaks the protocol resets the stream.
func TestHostileFrames(t *testing.T) {
	welcomed := (&welcome{buffer: initialWindow, step: 1}).encode(0)
	for name, in := range map[string][]byte{
		"no welcome":       data([]byte("x")),
		"two welcomes":     append(bytes.Clone(welcomed), welcomed...),
		"tiny buffer":      (&welcome{buffer: 1}).encode(0),
		"unknown type":     append(bytes.Clone(welcomed), control1(99, 0)...),
		"empty data":       append(bytes.Clone(welcomed), control1(frameData, 0)...),
		"ack of nothing":   append(bytes.Clone(welcomed), control1(frameAck, 1)...),
		"data after fin":   append(append(bytes.Clone(welcomed), control1(frameFin, 0)...), data([]byte("x"))...),
		"second fin":       append(append(bytes.Clone(welcomed), control1(frameFin, 0)...), control1(frameFin, 0)...),
		"beyond window":    append(bytes.Clone(welcomed), data(make([]byte, initialWindow+1))...),
		"received too far": (&welcome{buffer: initialWindow, received: 5}).encode(0),
	} {
		t.Run(name, func(t *testing.T) {
			near, far := net.Pipe()
			first := true
			c, err := dialPipe(near, far, &first, Options{MaxWindow: initialWindow, MinWindow: initialWindow})
			if err != nil {
				t.Fatal(err)
			}
			go io.Copy(io.Discard, far)
			go far.Write(in)
			_, err = io.Copy(io.Discard, onlyRead{c})
			eventually(t, "the stream ends", func() bool {
				_, err = c.Write([]byte("x"))
				return err != nil
			})
			if !errors.Is(err, errProtocol) {
				t.Fatalf("ended with %v", err)
			}
			c.Close()
			far.Close()
		})
	}
}

type onlyRead struct{ io.Reader }
