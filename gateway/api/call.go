package api

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"net/url"
	"runtime/debug"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
)

// call is one request on its way. One goroutine owns it, first the handler,
// then, for a streamed answer, the one that writes the body.
type call struct {
	rc     *fasthttp.RequestCtx
	srv    *Server
	op     *api.Operation // nil when no route matched
	id     string         // request id
	caller accounts.Caller
	began  time.Time

	// ctx is the work's context. It ends with the answer, when the client
	// leaves (watched operations) or when the server gives up.
	ctx    context.Context
	cancel context.CancelCauseFunc

	body   *requestBody // nil: the request has none
	undo   []func()     // run once, in reverse, when the answer is out
	stream bool         // the answer's body is written after the handler returned
}

type handler func(*call) error

// handle wraps a route: authentication, panics, errors, clean-up.
func (s *Server) handle(op *api.Operation, r route) fasthttp.RequestHandler {
	return func(rc *fasthttp.RequestCtx) {
		c := s.newCall(rc, op)
		if err := c.run(r); err != nil {
			c.fail(err)
		}
		c.finish()
	}
}

func (s *Server) newCall(rc *fasthttp.RequestCtx, op *api.Operation) *call {
	s.silent.Delete(rc.Conn())
	c := &call{rc: rc, srv: s, op: op, id: requestID(rc), began: time.Now()}
	c.ctx, c.cancel = context.WithCancelCause(s.base)
	c.body = newRequestBody(rc)
	h := &rc.Response.Header
	h.Set("X-Request-Id", c.id)
	h.Set("X-Content-Type-Options", "nosniff")
	return c
}

func (c *call) run(r route) (err error) {
	defer func() {
		if p := recover(); p != nil {
			c.srv.cfg.Log.Error("a handler panicked", "request", c.id, "panic", p, "stack", string(debug.Stack()))
			err = apierr.From(apierr.New(apierr.Internal, "something went wrong on our side; the request id helps to find it"))
		}
	}()
	if twoLengths(c.rc) {
		c.rc.SetConnectionClose()
		return apierr.New(apierr.InvalidRequest, "content-length: must not come with transfer-encoding")
	}
	if r.watched {
		c.later(watchClient(c.rc.Conn(), func() { c.cancel(errClientGone) }))
	} else {
		timer := time.AfterFunc(ordinaryTime, func() {
			c.cancel(apierr.New(apierr.Timeout, "no answer within %s; try again", ordinaryTime))
		})
		c.later(func() { timer.Stop() })
	}
	if c.op != nil && !c.op.Public {
		if c.caller, err = c.srv.cfg.Accounts.Authenticate(c.ctx, apiKey(c.rc)); err != nil {
			return err
		}
	}
	return r.handler(c)
}

// twoLengths says whether the body's length is given twice, by which a request
// is smuggled past one of two readers (RFC 9112 section 6.1); fasthttp lets
// transfer-encoding win silently.
func twoLengths(rc *fasthttp.RequestCtx) bool {
	return rc.Request.Header.ContentLength() == -1 &&
		strings.Contains(strings.ToLower(string(rc.Request.Header.RawHeaders())), "content-length:")
}

// later adds something to undo once the answer is out.
func (c *call) later(f func()) { c.undo = append(c.undo, f) }

// finish ends the call, unless its answer is yet to be streamed: then the
// body's Close does.
func (c *call) finish() {
	c.settleBody()
	if !c.stream {
		c.release()
	}
}

// release gives back what the call holds and counts it.
func (c *call) release() {
	for i := len(c.undo) - 1; i >= 0; i-- {
		c.undo[i]()
	}
	c.undo = nil
	c.cancel(context.Canceled)
	c.measure()
}

// settleBody makes sure that what is left of the request's body is not taken
// for the next request: fasthttp does not drain it.
func (c *call) settleBody() {
	if c.body != nil && !c.body.detach() {
		c.rc.SetConnectionClose()
	}
}

func (c *call) sessionID() string {
	id, _ := c.rc.UserValue("id").(string)
	return strings.Clone(id) // fasthttp reuses the bytes under it
}

// params checks query and header parameters and fills v, a generated Params type.
func (c *call) params(v any) error {
	args := c.rc.QueryArgs()
	query := make(url.Values, args.Len())
	for k, val := range args.All() {
		query[string(k)] = append(query[string(k)], string(val))
	}
	return c.op.DecodeParams(query, func(name string) string { return string(c.rc.Request.Header.Peek(name)) }, v)
}

// apiKey finds the key where the specification allows it ("Authentication").
func apiKey(rc *fasthttp.RequestCtx) string {
	if key := rc.Request.Header.Peek("X-Api-Key"); len(key) > 0 {
		return string(key)
	}
	scheme, key, _ := strings.Cut(string(rc.Request.Header.Peek("Authorization")), " ")
	if !strings.EqualFold(scheme, "Bearer") {
		return ""
	}
	return strings.TrimSpace(key)
}

// requestID takes over the client's id when it is fit for a log line.
func requestID(rc *fasthttp.RequestCtx) string {
	given := rc.Request.Header.Peek("X-Request-Id")
	if len(given) > 0 && len(given) <= 128 && strings.IndexFunc(string(given), unfitForID) < 0 {
		return string(given)
	}
	var b [12]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return "req_" + hex.EncodeToString(b[:])
}

func unfitForID(r rune) bool {
	return !(r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || strings.ContainsRune("._:-", r))
}
