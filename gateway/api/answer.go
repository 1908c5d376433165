package api

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"net"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/berth-dev/berth/shared/apierr"
)

const (
	jsonType   = "application/json"
	ndjsonType = "application/x-ndjson"
	bytesType  = "application/octet-stream"
)

// strictCSP is for answers that no browser should ever render or frame.
const strictCSP = "default-src 'none'; frame-ancestors 'none'; sandbox"

// json answers with v.
func (c *call) json(status int, v any) error {
	b, err := jsonLine(v)
	if err != nil {
		return err
	}
	c.head(status, jsonType)
	c.rc.SetBody(b)
	return nil
}

// jsonLine gives v as one line of JSON in which URLs stay readable.
func jsonLine(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return b.Bytes(), err
}

func (c *call) head(status int, contentType string) {
	c.rc.SetStatusCode(status)
	h := &c.rc.Response.Header
	h.SetContentType(contentType)
	h.Set("Cache-Control", "no-store")
	h.Set("Content-Security-Policy", strictCSP)
}

// fail answers with the error's envelope; whatever a handler had begun to
// answer is dropped.
func (c *call) fail(err error) {
	e := c.explain(err)
	if e.Code == apierr.Internal {
		c.srv.cfg.Log.Error("request failed", "request", c.id, "operation", c.opID(), "error", err)
	}
	allow, closes := string(c.rc.Response.Header.Peek("Allow")), c.rc.Response.ConnectionClose()
	c.rc.Response.Reset()
	if closes {
		c.rc.SetConnectionClose()
	}
	h := &c.rc.Response.Header
	h.Set("X-Request-Id", c.id)
	h.Set("X-Content-Type-Options", "nosniff")
	if allow != "" {
		h.Set("Allow", allow)
	}
	if after := retryAfter(e); after > 0 {
		h.Set("Retry-After", strconv.Itoa(after))
	}
	if e.Code == apierr.Unauthorized {
		h.Set("WWW-Authenticate", "Bearer") // RFC 9110 section 11.6.1
	}
	if e.Code == apierr.Canceled {
		c.rc.SetConnectionClose()
	}
	if err := c.json(e.Status(), e); err != nil {
		c.srv.cfg.Log.Error("an error could not be written", "request", c.id, "error", err)
	}
}

// explain finds the error that a client should see: why the work was cut
// short, when it was, else the error's own.
func (c *call) explain(err error) *apierr.Error {
	if cause := context.Cause(c.ctx); cause != nil && !errors.Is(cause, context.Canceled) {
		return apierr.From(cause)
	}
	return apierr.From(err)
}

// retryAfter gives whole seconds; 429 and 503 always carry some.
func retryAfter(e *apierr.Error) int {
	after := int((e.RetryAfter + time.Second - 1) / time.Second)
	if after == 0 && (e.Status() == fasthttp.StatusTooManyRequests || e.Status() == fasthttp.StatusServiceUnavailable) {
		return 1
	}
	return after
}

// malformed answers what fasthttp could not read as a request.
func (s *Server) malformed(rc *fasthttp.RequestCtx, err error) {
	c := s.newCall(rc, nil)
	c.body = nil // unreadable, and the connection closes
	var small *fasthttp.ErrSmallBuffer
	var netErr net.Error
	switch {
	case errors.As(err, &small):
		err = apierr.New(apierr.TooLarge, "request line and headers: must be at most %d bytes", maxHeaderBytes)
	case errors.As(err, &netErr) && netErr.Timeout():
		err = apierr.New(apierr.InvalidRequest, "request: must arrive within %s", headerTime)
	default:
		err = apierr.Wrap(err, apierr.InvalidRequest, "request: is not valid HTTP")
	}
	c.fail(err)
	c.finish()
}

func (s *Server) notFound(rc *fasthttp.RequestCtx) {
	c := s.newCall(rc, nil)
	c.fail(apierr.New(apierr.NotFound, "there is nothing at this path"))
	c.finish()
}

func (s *Server) methodNotAllowed(rc *fasthttp.RequestCtx) {
	c := s.newCall(rc, nil)
	allow := strings.Split(string(rc.Response.Header.Peek("Allow")), ", ")
	allow = slices.DeleteFunc(allow, func(m string) bool { return m == fasthttp.MethodOptions }) // the router adds it
	rc.Response.Header.Set("Allow", strings.Join(allow, ", "))
	c.fail(apierr.New(apierr.MethodNotAllowed, "method: this path takes %s", strings.Join(allow, ", ")))
	c.finish()
}
