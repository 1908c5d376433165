package cdp

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// maxMessage is the largest message either way (decisions "CDP"; Chrome's own bound).
	maxMessage = 256 << 20
	// maxLooked is the largest client message that is kept whole to look at its
	// method. Larger ones stream through: no method the broker acts on is near
	// that size, and the wall around Chrome is nftables, not this look.
	maxLooked = 1 << 20
	// keepBuffer is the largest message buffer a client keeps between messages.
	keepBuffer = 64 << 10
	// closeWait bounds how long a client may take to take and answer a Close.
	closeWait = 2 * time.Second
)

var (
	errLeft   = errors.New("client left")
	errTooBig = fmt.Errorf("%w: message above %d bytes", errFrame, maxMessage)
)

// relay copies between one client and its own connection to Chrome.
//
//	client ──fromClient──▶ look ──▶ chrome
//	client ◀── out ◀──fromChrome──── chrome     (naming downloads if asked to)
type relay struct {
	client net.Conn
	in     *bufio.Reader
	chrome *chromeConn
	log    *slog.Logger
	names  *names

	ctx   context.Context // ends when the relay does
	end   context.CancelFunc
	await func() error                // before a message goes to Chrome
	page  func(context.Context) error // before one that is not pageless; nil: it has returned. fromClient's alone

	naming atomic.Bool // Chrome's messages are looked at for downloads

	out     sync.Mutex // held while a frame is written to the client
	closing bool       // guarded by out: a Close was written, nothing may follow
	broken  bool       // guarded by out: a frame was cut short, nothing may follow

	code int // of the client's Close; fromClient's until it has returned
}

func newRelay(client net.Conn, in *bufio.Reader, chrome *chromeConn, page func(context.Context) error, cfg Config, log *slog.Logger) *relay {
	r := &relay{client: client, in: in, chrome: chrome, page: page, log: log, names: newNames(cfg.Downloads)}
	r.ctx, r.end = context.WithCancel(context.Background())
	r.await = func() error { return cfg.Await(r.ctx) }
	return r
}

// run relays until either side ends, Chrome dies or ctx ends, and returns the
// code of the client's Close, 0 when it went without one. Before it sends a
// client away itself it calls dismissing.
func (r *relay) run(ctx context.Context, chromeGone <-chan struct{}, dismissing func()) int {
	defer r.end()
	fromClient, fromChrome := make(chan error, 1), make(chan error, 1)
	go func() { fromClient <- r.fromClient() }()
	go func() { fromChrome <- r.fromChrome() }()
	var clientErr error
	select {
	case clientErr = <-fromClient:
		_ = r.chrome.Close()
		_ = r.client.SetWriteDeadline(time.Now().Add(closeWait)) // frees fromChrome
		<-fromChrome
		r.answerClose(clientErr)
	case err := <-fromChrome:
		dismissing()
		clientErr = r.dismiss(closeRestart, "chrome restarted", fromClient)
		r.log.Debug("chrome left a cdp client", "err", err)
	case <-chromeGone:
		_ = r.chrome.Close()
		dismissing()
		clientErr = r.dismiss(closeRestart, "chrome restarted", fromClient)
		<-fromChrome
	case <-ctx.Done():
		_ = r.chrome.Close()
		dismissing()
		clientErr = r.dismiss(1001, "agent ends", fromClient)
		<-fromChrome
	}
	_ = r.client.Close()
	r.log.Debug("cdp client ended", "code", r.code, "err", clientErr)
	return r.code
}

// dismiss tells the client to go and waits for it, within bounds.
func (r *relay) dismiss(code int, reason string, fromClient <-chan error) error {
	_ = r.client.SetWriteDeadline(time.Now().Add(closeWait))
	if !r.sendClose(code, reason) {
		_ = r.client.Close() // cut inside a frame: dropping the connection is all that is left
	}
	_ = r.client.SetReadDeadline(time.Now().Add(closeWait))
	_ = r.chrome.Close()
	r.end()
	return <-fromClient
}

// answerClose ends the client's socket as the protocol asks, whatever ended it.
func (r *relay) answerClose(err error) {
	switch {
	case errors.Is(err, errTooBig):
		r.sendClose(closeTooBig, "message too big")
	case errors.Is(err, errFrame):
		r.sendClose(closeProtocol, "protocol error")
	case errors.Is(err, errLeft):
		r.sendClose(closeNormal, "")
	}
}

// sendClose writes a Close, the last frame; false when the frame before it was
// cut short or the client does not take it.
func (r *relay) sendClose(code int, reason string) bool {
	r.out.Lock()
	defer r.out.Unlock()
	if r.closing || r.broken {
		return false
	}
	r.closing = true
	_, err := r.client.Write(closeFrame(code, reason))
	return err == nil
}

// send writes whole frames to the client.
func (r *relay) send(frames []byte) error {
	r.out.Lock()
	defer r.out.Unlock()
	if r.closing || r.broken {
		return errLeft
	}
	if _, err := r.client.Write(frames); err != nil {
		r.broken = true
		return err
	}
	return nil
}

// sendText writes one text message to the client.
func (r *relay) sendText(msg []byte) error {
	return r.send(append(appendHeader(make([]byte, 0, len(msg)+maxHeader), true, opText, false, int64(len(msg))), msg...))
}

// clientClose reads the code of a Close payload; 1005 is "none given".
func clientClose(payload []byte) int {
	if len(payload) < 2 {
		return 1005
	}
	return int(binary.BigEndian.Uint16(payload))
}

// readPayload consumes a frame's header and its payload, unmasked, onto buf.
// It grows by what arrived, never by what a header claims.
func readPayload(in *bufio.Reader, f frame, buf []byte) ([]byte, error) {
	if _, err := in.Discard(f.size); err != nil {
		return buf, err
	}
	for offset := int64(0); offset < f.length; {
		start := len(buf)
		part := int(min(f.length-offset, 64<<10))
		if cap(buf)-start < part {
			buf = append(buf, make([]byte, part)...)[:start]
		}
		buf = buf[:start+part]
		if _, err := io.ReadFull(in, buf[start:]); err != nil {
			return buf[:start], err
		}
		if f.masked {
			unmask(buf[start:], f.mask, offset)
		}
		offset += int64(part)
	}
	return buf, nil
}
