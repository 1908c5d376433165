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
	magic    = "BPX1"
	maxHello = 4096 // bytes of JSON; a Hello has about 200
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
	body, err := json.Marshal(h)
	if err != nil {
		return fmt.Errorf("write hello: %w", err)
	}
	if len(body) > maxHello {
		return fmt.Errorf("write hello: %d bytes, at most %d", len(body), maxHello)
	}
	frame := append([]byte(magic), 0, 0)
	binary.BigEndian.PutUint16(frame[len(magic):], uint16(len(body)))
	_, err = w.Write(append(frame, body...))
	return err
}

// ReadHello reads a Hello and not one byte more. The caller sets a deadline,
// checks Proof and refuses an error by closing.
func ReadHello(r io.Reader) (Hello, error) {
	var h Hello
	var head [len(magic) + 2]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return h, fmt.Errorf("read hello: %w", err)
	}
	size := int(binary.BigEndian.Uint16(head[len(magic):]))
	if string(head[:len(magic)]) != magic || size > maxHello {
		return h, fmt.Errorf("read hello: %w", ErrNotHello)
	}
	body := make([]byte, size)
	if _, err := io.ReadFull(r, body); err != nil {
		return h, fmt.Errorf("read hello: %w", err)
	}
	if err := json.Unmarshal(body, &h); err != nil || h.SessionID == "" {
		return h, fmt.Errorf("read hello: %w", ErrNotHello)
	}
	return h, nil
}
