package proxylink

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"reflect"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"
)

func TestHelloRoundTripProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		want := Hello{
			Proof:     rapid.StringMatching(`[0-9a-f]{0,64}`).Draw(t, "proof"),
			SessionID: rapid.StringMatching(`[0-9a-f-]{1,36}`).Draw(t, "session"),
			Host:      rapid.StringMatching(`[a-z]{0,9}`).Draw(t, "host"),
			Epoch:     rapid.Uint64().Draw(t, "epoch"),
			Pass:      rapid.SliceOfN(rapid.Byte(), 0, 9000).Draw(t, "pass"),
		}
		rest := rapid.SliceOf(rapid.Byte()).Draw(t, "rest")
		var wire bytes.Buffer
		if err := WriteHello(&wire, want); err != nil {
			t.Fatal(err)
		}
		wire.Write(rest)
		got, err := ReadHello(iotest.OneByteReader(&wire))
		if err != nil || !reflect.DeepEqual(got, want) {
			t.Fatalf("got %+v %v, want %+v", got, err, want)
		}
		if !bytes.Equal(wire.Bytes(), rest) {
			t.Fatalf("%d bytes left, want %d: ReadHello read on", wire.Len(), len(rest))
		}
	})
}

func TestReadHelloRefuses(t *testing.T) {
	for name, wire := range map[string]string{
		"magic":      "BPX1\x00\x02\x00\x00{}",
		"http":       "GET / HTTP/1.1\r\n\r\n",
		"too long":   "BPX2\xff\xff\x00\x00" + strings.Repeat(" ", 70000),
		"not json":   "BPX2\x00\x03\x00\x00abc",
		"no session": "BPX2\x00\x02\x00\x00{}",
	} {
		if _, err := ReadHello(strings.NewReader(wire)); !errors.Is(err, ErrNotHello) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := ReadHello(strings.NewReader("BPX2\x00\x09\x00\x00{}")); !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("cut: %v", err)
	}
	if err := WriteHello(io.Discard, Hello{SessionID: strings.Repeat("x", maxHello)}); err == nil {
		t.Error("an oversize hello was written")
	}
}

func FuzzReadHello(f *testing.F) {
	var good bytes.Buffer
	_ = WriteHello(&good, Hello{Proof: "p", SessionID: "s", Epoch: 7})
	f.Add(good.Bytes())
	f.Add([]byte("BPX2\x00\x02\x00\x00{}"))
	f.Fuzz(func(t *testing.T, wire []byte) {
		h, err := ReadHello(bytes.NewReader(wire))
		if err == nil && h.SessionID == "" {
			t.Fatal("a hello without a session was taken")
		}
	})
}

func TestDial(t *testing.T) {
	ln, err := net.Listen("tcp", "127.71.3.7:0") // where nobody else listens, so that the port stays free
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	want := Hello{Proof: "proof", SessionID: "id", Epoch: 3, Pass: []byte("sealed")}
	conn, err := Dial(context.Background(), ln.Addr().String(), want)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	server, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer server.Close()
	if got, err := ReadHello(server); err != nil || !reflect.DeepEqual(got, want) {
		t.Fatalf("%+v %v", got, err)
	}
	ln.Close()
	if _, err := Dial(context.Background(), ln.Addr().String(), want); err == nil {
		t.Error("a dial to nobody succeeded")
	}
}
