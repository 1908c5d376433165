package api

import (
	"errors"
	"io"
	"mime"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/berth-dev/berth/shared/apierr"
)

// How much of an unread body is swallowed, and for how long, so that the
// client reads our answer instead of a reset (RFC 9112 section 9.6).
const (
	drainBytes = 4 << 20
	drainTime  = time.Second
)

var errBodyReleased = errors.New("request body: the answer is already out")

// requestBody reads the request's body from the connection. The transport that
// carries an upload to the agent may still be inside Read when the handler is
// done; detach then takes the connection back.
type requestBody struct {
	conn   net.Conn
	length int64         // -1: chunked
	idle   time.Duration // how long one Read may wait; 0: a deadline set before holds

	leaving atomic.Bool
	mu      sync.Mutex // guards what follows
	src     io.Reader
	read    int64
	ended   bool
}

// newRequestBody gives nil when the request has no body.
func newRequestBody(rc *fasthttp.RequestCtx) *requestBody {
	length, src := rc.Request.Header.ContentLength(), rc.RequestBodyStream()
	if src == nil || length == 0 || length < -1 {
		return nil
	}
	return &requestBody{conn: rc.Conn(), length: int64(length), src: src}
}

// Read implements io.Reader. A body that stops early is io.ErrUnexpectedEOF.
func (b *requestBody) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.ended {
		return 0, io.EOF
	}
	if b.idle > 0 {
		_ = b.conn.SetReadDeadline(time.Now().Add(b.idle))
	}
	if b.leaving.Load() { // after the deadline is set, so that detach's is the last
		return 0, errBodyReleased
	}
	return b.readLocked(p)
}

func (b *requestBody) readLocked(p []byte) (int, error) {
	n, err := b.src.Read(p)
	b.read += int64(n)
	if b.length >= 0 && b.read == b.length {
		err = io.EOF
	} else if err == io.EOF && (b.length >= 0 || !b.lastChunkSeen()) {
		err = io.ErrUnexpectedEOF // fasthttp says EOF here too
	}
	b.ended = err == io.EOF
	return n, err
}

// lastChunkSeen tells the end of a chunked body from a client that left
// between two chunks: after the end fasthttp's stream says EOF again without
// asking the connection, otherwise the connection says that it is too late.
func (b *requestBody) lastChunkSeen() bool {
	_ = b.conn.SetReadDeadline(time.Unix(1, 0))
	defer func() { _ = b.conn.SetReadDeadline(time.Time{}) }()
	_, err := b.src.Read(make([]byte, 1))
	return err == io.EOF
}

// detach ends reading, waits for a Read under way, swallows a little of what
// is left and says whether the connection stands at the next request.
func (b *requestBody) detach() bool {
	b.leaving.Store(true)
	_ = b.conn.SetReadDeadline(time.Unix(1, 0))
	b.mu.Lock()
	defer b.mu.Unlock()
	defer func() { _ = b.conn.SetReadDeadline(time.Time{}) }()
	if b.ended {
		return true
	}
	_ = b.conn.SetReadDeadline(time.Now().Add(drainTime))
	buf := buffers.Get().(*[]byte)
	defer buffers.Put(buf)
	for left := drainBytes; left > 0 && !b.ended; {
		n, err := b.readLocked(*buf)
		if err != nil {
			break
		}
		left -= n
	}
	return b.ended
}

// decode reads a JSON body and checks it into v, the generated type. It gives
// the body's bytes too, integers in digits alone.
func (c *call) decode(v any) ([]byte, error) {
	raw, err := c.readJSON()
	if err != nil {
		return nil, err
	}
	return c.op.DecodeBody(raw, v)
}

func (c *call) readJSON() ([]byte, error) {
	if c.body == nil {
		return nil, nil
	}
	media, _, err := mime.ParseMediaType(string(c.rc.Request.Header.ContentType()))
	if err != nil || media != jsonType {
		return nil, apierr.New(apierr.UnsupportedMediaType, "content-type: must be %s", jsonType)
	}
	tooLarge := apierr.New(apierr.TooLarge, "body: must be at most %d bytes", maxJSONBytes)
	if c.body.length > maxJSONBytes {
		return nil, tooLarge
	}
	_ = c.body.conn.SetReadDeadline(time.Now().Add(headerTime))
	raw, err := io.ReadAll(io.LimitReader(c.body, maxJSONBytes+1))
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return nil, apierr.Wrap(err, apierr.InvalidRequest, "body: must arrive within %s", headerTime)
	case err != nil:
		return nil, apierr.Wrap(err, apierr.InvalidRequest, "body: ended early")
	case len(raw) > maxJSONBytes:
		return nil, tooLarge
	}
	return raw, nil
}
