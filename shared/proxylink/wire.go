package proxylink

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
)

const (
	magic    = "BPX2"
	maxHello = 4096       // bytes of JSON; a Hello has about 250
	maxPass  = 64<<10 - 1 // bytes; ten rules with all fields take about 12 KiB
)

// ErrNotHello says that a connection does not begin as this contract wants.
var ErrNotHello = errors.New("not a proxy link hello")

// Dial connects to proxyd at addr (host:port) and writes h. The result is a
// bare TCP connection, so that a copy to or from it can splice.
func Dial(ctx context.Context, addr string, h Hello) (*net.TCPConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("dial proxyd: %w", err)
	}
	if err := WriteHello(conn, h); err != nil {
		conn.Close()
		return nil, fmt.Errorf("dial proxyd: %w", err)
	}
	return conn.(*net.TCPConn), nil
}

// WriteHello writes h in one write.
func WriteHello(w io.Writer, h Hello) error {
	frame, err := AppendHello(nil, h)
	if err != nil {
		return err
	}
	_, err = w.Write(frame)
	return err
}

// AppendHello appends the bytes of h: who dials often keeps them.
func AppendHello(b []byte, h Hello) ([]byte, error) {
	body, err := json.Marshal(h)
	if err != nil {
		return b, fmt.Errorf("write hello: %w", err)
	}
	if len(body) > maxHello || len(h.Pass) > maxPass {
		return b, fmt.Errorf("write hello: %d bytes and a pass of %d, at most %d and %d", len(body), len(h.Pass), maxHello, maxPass)
	}
	b = append(b, magic...)
	b = binary.BigEndian.AppendUint16(b, uint16(len(body)))
	b = binary.BigEndian.AppendUint16(b, uint16(len(h.Pass)))
	return append(append(b, body...), h.Pass...), nil
}

// ReadHello reads a Hello and not one byte more. The caller sets a deadline,
// checks Proof and refuses an error by closing.
func ReadHello(r io.Reader) (Hello, error) {
	body, pass, err := ReadFrame(r)
	if err != nil {
		return Hello{}, err
	}
	h, err := ParseHello(body)
	h.Pass = pass
	return h, err
}

// ReadFrame is ReadHello without looking inside: body is the JSON, the same for
// each connection of a session from one host.
func ReadFrame(r io.Reader) (body, pass []byte, err error) {
	var head [headSize]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, nil, fmt.Errorf("read hello: %w", err)
	}
	size, sealed, err := frameSizes(head[:])
	if err != nil {
		return nil, nil, err
	}
	b := make([]byte, size+sealed)
	if _, err := io.ReadFull(r, b); err != nil {
		return nil, nil, fmt.Errorf("read hello: %w", err)
	}
	return b[:size:size], b[size:], nil
}

// CutFrame is ReadFrame of bytes that are here, which body, pass and rest are
// parts of. whole is false where some are missing.
func CutFrame(b []byte) (body, pass, rest []byte, whole bool, err error) {
	if len(b) < headSize {
		return nil, nil, nil, false, nil
	}
	size, sealed, err := frameSizes(b)
	if b = b[headSize:]; err != nil || len(b) < size+sealed {
		return nil, nil, nil, false, err
	}
	return b[:size:size], b[size : size+sealed : size+sealed], b[size+sealed:], true, nil
}

// headSize is how long what stands before the JSON is, bytes.
const headSize = len(magic) + 4

func frameSizes(head []byte) (size, sealed int, err error) {
	size = int(binary.BigEndian.Uint16(head[len(magic):]))
	sealed = int(binary.BigEndian.Uint16(head[len(magic)+2:]))
	if string(head[:len(magic)]) != magic || size > maxHello {
		return 0, 0, fmt.Errorf("read hello: %w", ErrNotHello)
	}
	return size, sealed, nil
}

// ParseHello reads the JSON of a Hello, which has no pass then.
func ParseHello(body []byte) (h Hello, err error) {
	if err := json.Unmarshal(body, &h); err != nil || h.SessionID == "" {
		return Hello{}, fmt.Errorf("read hello: %w", ErrNotHello)
	}
	return h, nil
}
