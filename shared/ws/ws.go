// Package ws is both ends of a WebSocket; it owns coder/websocket, so that the
// agent and Berth's own clients agree on limits and compression.
package ws

import (
	"context"
	"net/http"

	"github.com/coder/websocket"
)

// MaxMessage bounds one message in bytes (decisions "CDP").
const MaxMessage = 256 << 20

// Conn is an accepted connection; its methods may be called at once, but only
// one Read at a time.
type Conn = websocket.Conn

// Message types and close codes under this package's name.
type (
	// MessageType is Text or Binary.
	MessageType = websocket.MessageType
	// StatusCode is a close code (RFC 6455 7.4).
	StatusCode = websocket.StatusCode
)

// The values the agent uses.
const (
	Text   = websocket.MessageText
	Binary = websocket.MessageBinary

	StatusNormal      StatusCode = websocket.StatusNormalClosure
	StatusGoingAway   StatusCode = websocket.StatusGoingAway
	StatusUnsupported StatusCode = websocket.StatusUnsupportedData
	StatusPolicy      StatusCode = websocket.StatusPolicyViolation
	StatusInternal    StatusCode = websocket.StatusInternalError
	StatusTryAgain    StatusCode = websocket.StatusTryAgainLater
)

// Accept upgrades the request. It has answered when it fails. Origins are not
// checked: the gateway has authenticated the client by its token. Compression
// is used only when the client offers it, without a window kept per
// connection.
func Accept(w http.ResponseWriter, r *http.Request) (*Conn, error) {
	c, err := websocket.Accept(w, r, &websocket.AcceptOptions{
		InsecureSkipVerify: true,
		CompressionMode:    websocket.CompressionNoContextTakeover,
	})
	if err != nil {
		return nil, err
	}
	c.SetReadLimit(MaxMessage)
	return c, nil
}

// Dial connects to url (ws or wss): Chrome's own endpoint, and tests.
func Dial(ctx context.Context, url string) (*Conn, error) {
	c, _, err := websocket.Dial(ctx, url, nil)
	if err != nil {
		return nil, err
	}
	c.SetReadLimit(MaxMessage)
	return c, nil
}

// CloseStatus is the close code in err's chain, -1 when there is none.
func CloseStatus(err error) StatusCode { return websocket.CloseStatus(err) }
