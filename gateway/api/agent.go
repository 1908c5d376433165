package api

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
)

// toAgent is a checked request on its way to the session's agent.
type toAgent struct {
	method, path string
	query        url.Values
	body         io.Reader
	length       int64  // of body; -1: unknown
	raw          []byte // the whole body, when it is in memory
	header       http.Header
	shell        bool   // needs a session with a shell
	answerType   string // content type of a good answer: never the machine's to choose
	broken       func(err error, last byte) []byte
}

func (c *call) exec() error {
	var body api.Exec
	raw, err := c.decode(&body)
	if err != nil {
		return err
	}
	t := toAgent{method: http.MethodPost, path: agentlink.PathExec, shell: true, answerType: jsonType}
	t.json(raw)
	if or(body.Stream) {
		t.answerType, t.broken = ndjsonType, c.brokenExec
	}
	return c.forward(t)
}

// brokenExec ends an exec stream whose machine was lost or whose session ended
// with an error line, on a line of its own.
func (c *call) brokenExec(err error, last byte) []byte {
	e := c.explain(err)
	line := api.ExecLine{Type: api.ExecLineTypeError}
	line.Error = &struct {
		Code    api.ErrorCode `json:"code"`
		Message string        `json:"message"`
	}{api.ErrorCode(e.Code), e.Message}
	b, _ := jsonLine(line) // strings only: cannot fail
	if last != '\n' {
		b = append([]byte("\n"), b...)
	}
	return b
}

func (c *call) restartShell() error {
	var body api.RestartShell
	raw, err := c.decode(&body)
	if err != nil {
		return err
	}
	t := toAgent{method: http.MethodPost, path: agentlink.PathShellRestart, shell: true, answerType: jsonType}
	t.json(raw)
	return c.forward(t)
}

func (c *call) getFile() error {
	var p api.GetFileParams
	if err := c.params(&p); err != nil {
		return err
	}
	t := toAgent{method: http.MethodGet, path: agentlink.PathFiles, query: url.Values{"path": {p.Path}}, answerType: bytesType}
	for name, on := range map[string]*bool{"list": p.List, "stat": p.Stat} {
		if or(on) {
			t.query.Set(name, "1")
			t.answerType = jsonType
		}
	}
	t.header = http.Header{}
	for _, name := range []string{"Range", "If-Range", "If-None-Match", "If-Modified-Since"} {
		if v := c.rc.Request.Header.Peek(name); len(v) > 0 {
			t.header.Set(name, string(v))
		}
	}
	return c.forward(t)
}

func (c *call) putFile() error {
	var p api.PutFileParams
	if err := c.params(&p); err != nil {
		return err
	}
	t := toAgent{method: http.MethodPut, path: agentlink.PathFiles, query: url.Values{"path": {p.Path}}, answerType: jsonType}
	if c.body != nil {
		c.body.idle = uploadIdleTime
		t.body, t.length = c.body, c.body.length
	}
	return c.forward(t)
}

func (c *call) deleteFile() error {
	var p api.DeleteFileParams
	if err := c.params(&p); err != nil {
		return err
	}
	return c.forward(toAgent{method: http.MethodDelete, path: agentlink.PathFiles, query: url.Values{"path": {p.Path}}, answerType: jsonType})
}

func (c *call) waitForFile() error {
	var p api.WaitForFileParams
	if err := c.params(&p); err != nil {
		return err
	}
	query := url.Values{"pattern": {p.Pattern}, "timeoutMs": {strconv.Itoa(or(p.TimeoutMs))}}
	return c.forward(toAgent{method: http.MethodGet, path: agentlink.PathFilesWait, query: query, answerType: jsonType})
}

func (c *call) makeFolder() error {
	return c.forwardJSON(agentlink.PathFilesMkdir, new(api.MakeFolder))
}

func (c *call) moveFile() error { return c.forwardJSON(agentlink.PathFilesMove, new(api.MoveFile)) }

func (c *call) forwardJSON(path string, body any) error {
	raw, err := c.decode(body)
	if err != nil {
		return err
	}
	t := toAgent{method: http.MethodPost, path: path, answerType: jsonType}
	t.json(raw)
	return c.forward(t)
}

// json sets a checked JSON body, as the client wrote it.
func (t *toAgent) json(raw []byte) {
	if len(bytes.TrimSpace(raw)) == 0 {
		raw = []byte("{}")
	}
	t.body, t.length, t.raw = bytes.NewReader(raw), int64(len(raw)), raw
	t.header = http.Header{"Content-Type": {jsonType}}
}

// forward sends t to the caller's session and answers what the agent answers.
func (c *call) forward(t toAgent) error {
	s, err := c.srv.cfg.Service.Running(c.ctx, c.caller, c.sessionID())
	if err == nil && t.shell {
		err = needShell(s)
	}
	if err != nil {
		return err
	}
	return c.forwardTo(s, t)
}

func (c *call) forwardTo(s session.Session, t toAgent) error {
	// The length is set below: http.NoBody keeps an empty upload from being chunked.
	req, err := http.NewRequestWithContext(c.ctx, t.method, "http://agent"+t.path, http.NoBody)
	if err != nil {
		return err
	}
	req.URL.RawQuery = t.query.Encode()
	if t.header != nil {
		req.Header = t.header
	}
	if t.body != nil {
		req.Body, req.ContentLength = io.NopCloser(t.body), t.length
	}
	if t.raw != nil { // lets the transport begin again when a kept stream was dead before a byte was written
		req.GetBody = func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(t.raw)), nil }
	}
	if s, err = c.srv.cfg.Service.Awake(c.ctx, s); err != nil {
		return err
	}
	c.watchEnd(s)
	c.watchPause(s)
	resp, err := c.srv.cfg.Service.AgentRoundTrip(s, req)
	if err != nil {
		return c.agentError(s, err)
	}
	if broken := t.broken; broken != nil {
		t.broken = func(err error, last byte) []byte { return broken(c.agentError(s, err), last) }
	}
	return c.pass(resp, t)
}

// watchEnd cancels the work when the session ends, so that nobody waits for a
// machine that is gone.
func (c *call) watchEnd(s session.Session) {
	ctx, stop := context.WithCancel(c.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if e := c.srv.cfg.Service.WatchEnd(ctx, s); !e.At.IsZero() && e.CloseCode != closeRotated {
			c.cancel(apierr.New(apierr.SessionNotRunning, "the session ended meanwhile (%s)", e.Reason))
		}
	}()
	c.later(func() { stop(); <-done })
}

// Headers of the agent's answer that a client gets. The rest, the content type
// included, is not the machine's to say.
var passedHeaders = []string{"Accept-Ranges", "Content-Range", "Etag", "Last-Modified"}

const (
	maxPassedHeader = 256
	maxErrorBytes   = 64 << 10
)

// pass answers with the agent's answer. What the machine says is foreign:
// status and headers are checked, an error is rebuilt from its code.
func (c *call) pass(resp *http.Response, t toAgent) error {
	switch resp.StatusCode {
	case http.StatusOK, http.StatusPartialContent, http.StatusNoContent, http.StatusNotModified:
	default:
		defer resp.Body.Close()
		return errorOf(resp)
	}
	c.head(resp.StatusCode, t.answerType)
	for _, name := range passedHeaders {
		if v := resp.Header.Get(name); v != "" && len(v) <= maxPassedHeader {
			c.rc.Response.Header.Set(name, v)
		}
	}
	if resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified {
		c.rc.Response.Header.SetContentType("")
		return resp.Body.Close()
	}
	c.answerStream(&streamBody{src: resp.Body, closer: resp.Body, broken: t.broken}, int(resp.ContentLength))
	return nil
}

// errorOf rebuilds the agent's error.
func errorOf(resp *http.Response) error {
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxErrorBytes))
	if err != nil {
		return apierr.Wrap(err, apierr.Unavailable, "the session's machine cannot be reached now; try again")
	}
	e := apierr.Parse(resp.StatusCode, b)
	if e.Code == apierr.Internal {
		return fmt.Errorf("the agent answered %d: %w", resp.StatusCode, e)
	}
	if e.Message = strings.ToValidUTF8(e.Message, "?"); len(e.Message) > 4096 || e.Message == "" {
		e.Message = string(e.Code)
	}
	return e
}

// agentError dresses a failure on the way to the agent. One that has a code
// keeps it, but for a host that does not know the session: the record does, so
// it is no 404. A session that has ended meanwhile is the better reason.
func (c *call) agentError(s session.Session, err error) error {
	var e *apierr.Error
	if errors.As(err, &e) && e.Code != apierr.NotFound || c.ctx.Err() != nil {
		return err
	}
	if errors.Is(err, link.ErrLineage) {
		return apierr.Wrap(err, apierr.Unavailable, "the session went on with a fresh machine meanwhile; what ran on the old one did not: see what it left, and try again")
	}
	if _, ended := c.srv.cfg.Service.Running(c.ctx, accounts.Caller{ProjectID: s.ProjectID}, s.ID); apierr.Is(ended, apierr.SessionNotRunning) {
		return ended
	}
	return apierr.Wrap(err, apierr.Unavailable, "the session's machine cannot be reached now; try again")
}
