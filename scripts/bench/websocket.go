package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"
)

// socket is the least WebSocket client that can talk CDP: one goroutine, one
// buffer, no library, so that what is measured is the other end. Both sides of
// a row use it.
type socket struct {
	conn net.Conn
	in   *bufio.Reader
	out  []byte
	id   int
}

type dialer func(ctx context.Context, network, address string) (net.Conn, error)

// openSocket connects to a ws:// URL.
func openSocket(ctx context.Context, rawURL string, dial dialer) (*socket, error) {
	u, err := url.Parse(rawURL)
	if err != nil {
		return nil, err
	}
	conn, err := dial(ctx, "tcp", u.Host)
	if err != nil {
		return nil, err
	}
	return openOn(conn, u)
}

// openOn upgrades a connection, which it closes when that fails.
func openOn(conn net.Conn, u *url.URL) (*socket, error) {
	_ = conn.SetDeadline(time.Now().Add(time.Minute)) // of the whole use: nothing here lasts longer
	s := &socket{conn: conn, in: bufio.NewReaderSize(conn, 64<<10)}
	fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"+
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n", u.RequestURI(), u.Host)
	resp, err := http.ReadResponse(s.in, nil)
	if err == nil && resp.StatusCode != http.StatusSwitchingProtocols {
		body, _ := io.ReadAll(io.LimitReader(resp.Body, 1000)) // tells more than the status
		err = fmt.Errorf("handshake: %s: %s", resp.Status, body)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return s, nil
}

func (s *socket) close() { s.conn.Close() }

// call makes one CDP call and returns its answer; events on the way are passed
// over. params is JSON.
func (s *socket) call(session, method, params string) ([]byte, error) {
	if err := s.send(session, method, params); err != nil {
		return nil, err
	}
	for {
		msg, err := s.read()
		if err != nil {
			return nil, fmt.Errorf("%s: %w", method, err)
		}
		if bytes.HasPrefix(msg, s.answer()) {
			if bytes.Contains(msg, []byte(`"error":{`)) {
				return nil, fmt.Errorf("%s: %.300s", method, msg)
			}
			return msg, nil
		}
	}
}

// answer is how the answer to the last call begins: Chrome writes the id first.
func (s *socket) answer() []byte { return []byte(`{"id":` + strconv.Itoa(s.id) + ",") }

func (s *socket) send(session, method, params string) error {
	s.id++
	msg := `{"id":` + strconv.Itoa(s.id) + `,"method":"` + method + `"`
	if session != "" {
		msg += `,"sessionId":"` + session + `"`
	}
	if params != "" {
		msg += `,"params":` + params
	}
	return s.write(0x1, []byte(msg+"}"))
}

// write sends one frame masked with zeros, which is as good as any mask to a
// server (RFC 6455 5.3) and leaves the payload readable.
func (s *socket) write(opcode byte, payload []byte) error {
	s.out = append(s.out[:0], 0x80|opcode)
	if n := len(payload); n < 126 {
		s.out = append(s.out, 0x80|byte(n))
	} else {
		s.out = binary.BigEndian.AppendUint16(append(s.out, 0x80|126), uint16(n))
	}
	s.out = append(append(s.out, 0, 0, 0, 0), payload...)
	_, err := s.conn.Write(s.out)
	return err
}

var errClosed = errors.New("the other end closed the WebSocket")

// read gives the next message; pings are answered.
func (s *socket) read() ([]byte, error) {
	var msg []byte
	for {
		var head [10]byte
		if _, err := io.ReadFull(s.in, head[:2]); err != nil {
			return nil, err
		}
		length := uint64(head[1] & 0x7f)
		switch length {
		case 126:
			if _, err := io.ReadFull(s.in, head[2:4]); err != nil {
				return nil, err
			}
			length = uint64(binary.BigEndian.Uint16(head[2:]))
		case 127:
			if _, err := io.ReadFull(s.in, head[2:10]); err != nil {
				return nil, err
			}
			length = binary.BigEndian.Uint64(head[2:])
		}
		payload := make([]byte, length)
		if _, err := io.ReadFull(s.in, payload); err != nil {
			return nil, err
		}
		switch head[0] & 0xf {
		case 0x8:
			return nil, fmt.Errorf("%w: %q", errClosed, payload)
		case 0x9:
			if err := s.write(0xa, payload); err != nil {
				return nil, err
			}
			continue
		case 0xa:
			continue
		}
		msg = append(msg, payload...)
		if head[0]&0x80 != 0 {
			return msg, nil
		}
	}
}
