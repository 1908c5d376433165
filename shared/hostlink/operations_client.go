package hostlink

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strings"
)

// Capture orders a session's host to stop its machine and to capture it.
func (c *Client) Capture(ctx context.Context, id string, o Capture) (done Captured, err error) {
	return done, c.do(ctx, http.MethodPost, sessionPath(id, "/capture"), o, &done)
}

// Prepare asks the target of a move to be ready for its Restore.
func (c *Client) Prepare(ctx context.Context, id string, o Prepare) error {
	return c.do(ctx, http.MethodPost, sessionPath(id, "/prepare"), o, nil)
}

// TemplateOf asks the host of a running session for its machine's template.
// Only other hosts ask.
func (c *Client) TemplateOf(ctx context.Context, id string) (t TemplateOf, err error) {
	return t, c.do(ctx, http.MethodGet, sessionPath(id, "/template"), nil, &t)
}

// MadeTemplate asks a host for the template that it made by a recipe. Only other
// hosts ask, so that one build serves all.
func (c *Client) MadeTemplate(ctx context.Context, recipe string) (m MadeTemplate, err error) {
	return m, c.do(ctx, http.MethodGet, "/v1/templates?"+url.Values{"recipe": {recipe}}.Encode(), nil, &m)
}

// Restore orders a host to make a session's machine from a snapshot.
func (c *Client) Restore(ctx context.Context, id string, o Restore) (done Restored, err error) {
	return done, c.do(ctx, http.MethodPost, sessionPath(id, "/restore"), o, &done)
}

// Verdict tells a host what the record decided about an operation. NotFound:
// the host has no machine that waits for it, and never had or not any more.
func (c *Client) Verdict(ctx context.Context, id string, v Verdict) error {
	return c.do(ctx, http.MethodPost, sessionPath(id, "/verdict"), v, nil)
}

// Baggage asks a session's host for what goes with the session beside its
// snapshot and its events. Only other hosts ask, for a snapshot that they were
// told to restore.
func (c *Client) Baggage(ctx context.Context, id, snapshotID string) (b Baggage, err error) {
	return b, c.do(ctx, http.MethodGet, sessionPath(id, "/baggage?")+url.Values{"snapshot": {snapshotID}}.Encode(), nil, &b)
}

// DeleteSnapshot removes a snapshot of a session from a host and from the blob
// store; one that is not there is no error. Without sessionID what only the blob
// store has stays.
func (c *Client) DeleteSnapshot(ctx context.Context, id, sessionID string) error {
	q := url.Values{"session": {sessionID}}
	return c.do(ctx, http.MethodDelete, "/v1/snapshots/"+url.PathEscape(id)+"?"+q.Encode(), nil, nil)
}

// Snapshot opens a host's snapshot as one stream, without the parts that the
// caller has (hostd/snapshot); the caller closes it. A stream that was cut ends
// with an error, never with io.EOF.
func (c *Client) Snapshot(ctx context.Context, id string, have ...string) (io.ReadCloser, error) {
	q := url.Values{"have": {strings.Join(have, ",")}}
	return c.open(ctx, "/v1/snapshots/"+url.PathEscape(id)+"?"+q.Encode())
}

// Parts names what a host has of a session's snapshots: a stream to it may leave
// that out. Only other hosts ask.
func (c *Client) Parts(ctx context.Context, id string) (parts []string, err error) {
	return parts, c.do(ctx, http.MethodGet, sessionPath(id, "/parts"), nil, &parts)
}

// Ahead gives the target of a move, which has been asked to Prepare, what of the
// capture there is before the machine stops (hostd/snapshot). NotFound: the host
// does not expect it, or not any more.
func (c *Client) Ahead(ctx context.Context, id, opID string, in io.Reader) error {
	path := sessionPath(id, "/ahead?") + url.Values{"op": {opID}}.Encode()
	resp, err := c.sendBody(ctx, http.MethodPut, path, io.NopCloser(in)) // the caller's to close
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// Template opens a host's template as one stream, as Snapshot does.
func (c *Client) Template(ctx context.Context, hash string) (io.ReadCloser, error) {
	return c.open(ctx, "/v1/templates/"+url.PathEscape(hash))
}

func (c *Client) open(ctx context.Context, path string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, http.MethodGet, path, nil)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

func sessionPath(id, tail string) string { return "/v1/sessions/" + url.PathEscape(id) + tail }
