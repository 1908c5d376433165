package hosts

import (
	"context"
	"errors"
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

// dialLimit bounds how long a kept stream's first dial may wait for a machine
// that stands still: net/http goes on dialling when the request has left.
const dialLimit = 10 * time.Minute

// dialer opens transports to a session's agent, wherever it is at that moment.
func (h *Hosts) dialer(p place) link.Dialer {
	return func(ctx context.Context) (net.Conn, error) {
		s, changed := p.now()
		switch {
		case s.Status.Ended():
			return nil, ended(s)
		case still(s): // since the stream asked
			return nil, errPlace
		}
		ctx, stop := p.while(ctx, s, changed)
		defer stop()
		conn, err := h.tunnel(ctx, s)
		if apierr.Is(err, apierr.SessionNotRunning) || apierr.Is(err, apierr.NotFound) {
			return nil, p.judge(ctx, s, err)
		}
		return conn, err
	}
}

func (h *Hosts) tunnel(ctx context.Context, s session.Session) (net.Conn, error) {
	c, err := h.Client(s.Host)
	if err != nil {
		return nil, err
	}
	return c.Tunnel(ctx, s.ID, s.Epoch)
}

// DialAgent opens a stream of the session link to a session's agent. While the
// session is paused or an operation on it is open it waits, for as long as ctx.
func (h *Hosts) DialAgent(ctx context.Context, s session.Session) (net.Conn, error) {
	p := place{h.record, s}
	conn, err := link.Dial(ctx, h.dialer(p), link.Options{Place: p.still})
	if err != nil {
		return nil, fmt.Errorf("session %s: %w", s.ID, err)
	}
	return conn, nil
}

// RoundTrip sends a request to a session's agent over a kept stream. The
// request's URL needs only path and query. When the machine's memory was lost on
// the way, to a portable move say, a request that only looks is sent again to
// the new machine; any other fails with link.ErrLineage.
func (h *Hosts) RoundTrip(s session.Session, req *http.Request) (*http.Response, error) {
	req.URL.Scheme, req.URL.Host = "http", "agent"
	for tries := 0; ; tries++ {
		t := h.transport(s)
		resp, err := t.RoundTrip(req)
		if err == nil {
			return resp, nil
		}
		if cause := context.Cause(req.Context()); cause != nil {
			return nil, cause
		}
		err = fmt.Errorf("session %s: %w", s.ID, err)
		if tries == 2 || !errors.Is(err, link.ErrLineage) {
			return nil, err
		}
		t.CloseIdleConnections() // they lead to the same lost memory
		if !looks(req) {
			return nil, err
		}
	}
}

// looks says whether a request may be sent twice.
func looks(req *http.Request) bool {
	return (req.Method == http.MethodGet || req.Method == http.MethodHead) && (req.Body == nil || req.Body == http.NoBody)
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
			DialContext:            h.dialKept(s),
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

func (h *Hosts) dialKept(s session.Session) func(ctx context.Context, _, _ string) (net.Conn, error) {
	return func(ctx context.Context, _, _ string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, dialLimit)
		defer cancel()
		return h.DialAgent(ctx, s)
	}
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
