package cdp

import (
	"bufio"
	"context"
	"crypto/sha1" //nolint:gosec // RFC 6455 4.2.2 asks for it
	"encoding/base64"
	"fmt"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
)

// The broker does both handshakes itself because it works on frames: a message
// then passes without being taken apart and put together again.

// checkUpgrade gives the client's key (RFC 6455 4.2.1).
func checkUpgrade(r *http.Request) (key string, err error) {
	key = r.Header.Get("Sec-WebSocket-Key")
	switch {
	case r.Method != http.MethodGet || !hasToken(r.Header, "Connection", "upgrade") || !hasToken(r.Header, "Upgrade", "websocket"):
		return "", apierr.Wrap(errNotWebSocket, apierr.InvalidRequest, "this address takes WebSocket connections only")
	case r.Header.Get("Sec-WebSocket-Version") != "13":
		return "", apierr.Wrap(errNotWebSocket, apierr.InvalidRequest, "Sec-WebSocket-Version must be 13")
	}
	if raw, err := base64.StdEncoding.DecodeString(key); err != nil || len(raw) != 16 {
		return "", apierr.Wrap(errNotWebSocket, apierr.InvalidRequest, "Sec-WebSocket-Key must be 16 bytes in base64")
	}
	return key, nil
}

func hasToken(h http.Header, name, token string) bool {
	for _, line := range h.Values(name) {
		for part := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(part), token) {
				return true
			}
		}
	}
	return false
}

func acceptKey(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11")) //nolint:gosec // see import
	return base64.StdEncoding.EncodeToString(sum[:])
}

// upgrade answers 101 and takes the connection over; rest holds what the
// client sent already. Extensions are declined, which RFC 6455 9.1 always
// allows: compression on the path would cost each evaluate more than it saves.
func upgrade(w http.ResponseWriter, key string) (net.Conn, *bufio.Reader, error) {
	conn, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return nil, nil, fmt.Errorf("upgrade: %w", err)
	}
	_ = conn.SetDeadline(time.Time{}) // the HTTP server's; a CDP socket has none
	answer := "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: " + acceptKey(key) + "\r\n\r\n"
	if _, err := conn.Write([]byte(answer)); err != nil {
		_ = conn.Close()
		return nil, nil, fmt.Errorf("upgrade: %w", err)
	}
	return conn, rw.Reader, nil
}

// chromeConn is an upgraded connection to Chrome's browser endpoint.
type chromeConn struct {
	net.Conn
	in *bufio.Reader
}

// chromeBuffer holds what one read takes from Chrome; smaller messages pass
// with one read and one write.
const chromeBuffer = 32 << 10

func dialChrome(ctx context.Context, e Endpoint) (*chromeConn, error) {
	ctx, cancel := context.WithTimeout(ctx, chromeWait)
	defer cancel()
	conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", e.Addr)
	if err != nil {
		return nil, fmt.Errorf("dial chrome: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	in := bufio.NewReaderSize(conn, chromeBuffer)
	err = handshake(conn, in, e)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("dial chrome: %w", err)
	}
	return &chromeConn{Conn: conn, in: in}, nil
}

func handshake(conn net.Conn, in *bufio.Reader, e Endpoint) error {
	// A fixed key does: it proves nothing to Chrome, and caches are not on the way.
	const key = "YmVydGgtYWdlbnQtY2RwIQ=="
	ask := "GET " + e.Path + " HTTP/1.1\r\nHost: " + e.Addr + "\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n" +
		"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: " + key + "\r\n\r\n"
	if _, err := conn.Write([]byte(ask)); err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	res, err := http.ReadResponse(in, nil)
	if err != nil {
		return fmt.Errorf("handshake: %w", err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusSwitchingProtocols || res.Header.Get("Sec-WebSocket-Accept") != acceptKey(key) {
		return fmt.Errorf("handshake: chrome answered %s", res.Status)
	}
	return nil
}
