package hosts

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
)

// idleStream is how long a stream to an agent is kept for the next request.
const idleStream = 90 * time.Second

// gone marks a host's refusal as final, so that the stream over it ends
// instead of dialling again.
type gone struct{ error }

func (gone) Permanent() bool { return true }
func (g gone) Unwrap() error { return g.error }

// dialer opens transports to a session's agent. The host is looked up each
// time: its address may have changed since.
func (h *Hosts) dialer(s session.Session) link.Dialer {
	return func(ctx context.Context) (net.Conn, error) {
		c, err := h.Client(s.Host)
		if err != nil {
			return nil, err
		}
		conn, err := c.Tunnel(ctx, s.ID, s.Epoch)
		if apierr.Is(err, apierr.SessionNotRunning) || apierr.Is(err, apierr.NotFound) {
			return nil, gone{err}
		}
		return conn, err
	}
}

// DialAgent opens a stream of the session link to a session's agent.
func (h *Hosts) DialAgent(ctx context.Context, s session.Session) (net.Conn, error) {
	conn, err := link.Dial(ctx, h.dialer(s), link.Options{})
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", s.ID, err)
	}
	return conn, nil
}

// RoundTrip sends a request to a session's agent over a kept stream. The
// request's URL needs only path and query.
func (h *Hosts) RoundTrip(s session.Session, req *http.Request) (*http.Response, error) {
	req.URL.Scheme, req.URL.Host = "http", "agent"
	resp, err := h.transport(s).RoundTrip(req)
	if err != nil {
		if cause := context.Cause(req.Context()); cause != nil {
			return nil, cause
		}
		return nil, fmt.Errorf("session %s: %w", s.ID, err)
	}
	return resp, nil
}

// agentStreams are the kept streams of a session.
type agentStreams struct {
	*http.Transport
	used time.Time // last
}

// transport gives the kept streams of a session. A request that was under way
// when its session ended may make one after Forget: what nobody has used for
// long goes when the next is made.
func (h *Hosts) transport(s session.Session) *http.Transport {
	h.mu.Lock()
	defer h.mu.Unlock()
	now := time.Now()
	t := h.agents[s.ID]
	if t == nil {
		for id, other := range h.agents {
			if now.Sub(other.used) > 2*idleStream {
				other.CloseIdleConnections()
				delete(h.agents, id)
			}
		}
		t = &agentStreams{Transport: &http.Transport{
			DialContext:            func(ctx context.Context, _, _ string) (net.Conn, error) { return h.DialAgent(ctx, s) },
			DisableCompression:     true, // bodies pass as they are
			MaxIdleConnsPerHost:    4,
			IdleConnTimeout:        idleStream,
			MaxResponseHeaderBytes: 64 << 10,
			ReadBufferSize:         64 << 10,
			WriteBufferSize:        64 << 10,
			ExpectContinueTimeout:  time.Second,
		}}
		h.agents[s.ID] = t
	}
	t.used = now
	return t.Transport
}

// Forget drops the kept streams of a session that has ended.
func (h *Hosts) Forget(sessionID string) {
	h.mu.Lock()
	t := h.agents[sessionID]
	delete(h.agents, sessionID)
	h.mu.Unlock()
	if t != nil {
		t.CloseIdleConnections()
	}
}
