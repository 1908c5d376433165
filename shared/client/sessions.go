package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"

	"github.com/berth-dev/berth/shared/api"
)

// P gives a pointer to v, for the optional fields of requests.
func P[T any](v T) *T { return &v }

// CreateSession makes a session. A non-empty idempotencyKey makes a repeated
// call within a day answer with the first one's session.
func (c *Client) CreateSession(ctx context.Context, in api.CreateSession, idempotencyKey string) (s api.Session, err error) {
	var opts []option
	if idempotencyKey != "" {
		opts = append(opts, header("Idempotency-Key", idempotencyKey))
	}
	return s, c.call(ctx, http.MethodPost, "/v1/sessions", in, &s, opts...)
}

// Session gives one session.
func (c *Client) Session(ctx context.Context, id string) (s api.Session, err error) {
	return s, c.call(ctx, http.MethodGet, path(id, ""), nil, &s)
}

// Sessions lists a page of sessions, newest first. query may hold status,
// region, limit, cursor and metadata[key].
func (c *Client) Sessions(ctx context.Context, query url.Values) (l api.SessionList, err error) {
	return l, c.call(ctx, http.MethodGet, "/v1/sessions?"+query.Encode(), nil, &l)
}

// PatchSession changes a session.
func (c *Client) PatchSession(ctx context.Context, id string, in api.PatchSession) (s api.Session, err error) {
	return s, c.call(ctx, http.MethodPatch, path(id, ""), in, &s)
}

// Release ends a session.
func (c *Client) Release(ctx context.Context, id string) (s api.Session, err error) {
	return s, c.call(ctx, http.MethodPost, path(id, "/release"), nil, &s)
}

// Pause captures a session and frees its machine.
func (c *Client) Pause(ctx context.Context, id string) (s api.Session, err error) {
	return s, c.call(ctx, http.MethodPost, path(id, "/pause"), nil, &s)
}

// Resume brings a paused session back.
func (c *Client) Resume(ctx context.Context, id string) (s api.Session, err error) {
	return s, c.call(ctx, http.MethodPost, path(id, "/resume"), nil, &s)
}

// Move takes a running session to another machine; in may name the host or the
// region.
func (c *Client) Move(ctx context.Context, id string, in api.MoveSession) (m api.MoveResult, err error) {
	return m, c.call(ctx, http.MethodPost, path(id, "/move"), in, &m)
}

// ReleaseAll ends every running or paused session of the project.
func (c *Client) ReleaseAll(ctx context.Context) (l api.ReleasedList, err error) {
	return l, c.call(ctx, http.MethodPost, "/v1/sessions/release-all", nil, &l)
}

// Live gives fresh live view and terminal URLs.
func (c *Client) Live(ctx context.Context, id string) (u api.LiveUrls, err error) {
	return u, c.call(ctx, http.MethodGet, path(id, "/live"), nil, &u)
}

// RotateURLs makes older signed URLs fail, and cuts their clients if asked to.
func (c *Client) RotateURLs(ctx context.Context, id string, disconnect bool) (u api.SessionUrls, err error) {
	return u, c.call(ctx, http.MethodPost, path(id, "/rotate-urls"), api.RotateUrls{Disconnect: &disconnect}, &u)
}

// RotateProxy gives every proxy of a session a new address.
func (c *Client) RotateProxy(ctx context.Context, id string) (s api.Session, err error) {
	return s, c.call(ctx, http.MethodPost, path(id, "/proxy/rotate"), nil, &s)
}

// Me describes the caller's project.
func (c *Client) Me(ctx context.Context) (m api.Me, err error) {
	return m, c.call(ctx, http.MethodGet, "/v1/auth/me", nil, &m)
}

// Events gives a page of a session's log after a seq.
func (c *Client) Events(ctx context.Context, id string, after uint64, types string, limit int) (p api.EventPage, err error) {
	q := url.Values{"after": {strconv.FormatUint(after, 10)}, "limit": {strconv.Itoa(limit)}}
	if types != "" {
		q.Set("types", types)
	}
	return p, c.call(ctx, http.MethodGet, path(id, "/events?"+q.Encode()), nil, &p)
}

func path(id, tail string) string { return "/v1/sessions/" + url.PathEscape(id) + tail }
