package sessions

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"sync"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// DialAgent opens a stream to a session's agent; a paused session is resumed
// first, also one that is paused while this dials.
func (s *Service) DialAgent(ctx context.Context, found session.Session) (net.Conn, error) {
	found, err := s.Awake(ctx, found)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer s.keepAwake(ctx, cancel, found, newDelivery())()
	conn, err := s.hosts.DialAgent(ctx, found)
	if cause := context.Cause(ctx); err != nil && cause != nil {
		err = cause
	}
	return conn, err
}

// AgentRoundTrip sends a request to a session's agent; a paused session is
// resumed first, also one that is paused before its agent has got the request.
// One whose agent has it already stands still with its session.
func (s *Service) AgentRoundTrip(found session.Session, req *http.Request) (*http.Response, error) {
	found, err := s.Awake(req.Context(), found)
	if err != nil {
		return nil, err
	}
	d := newDelivery()
	ctx, cancel := context.WithCancelCause(req.Context()) // not at the return: the answer's body needs it
	defer s.keepAwake(ctx, cancel, found, d)()
	resp, err := s.hosts.RoundTrip(found, req.WithContext(d.trace(ctx)))
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
		cancel(nil)
		return nil, err
	}
	resp.Body = &heldOpen{resp.Body, cancel}
	return resp, nil
}

// heldOpen is an answer's body that lets go of its request's context.
type heldOpen struct {
	io.ReadCloser
	cancel context.CancelCauseFunc
}

func (h *heldOpen) Close() error { defer h.cancel(nil); return h.ReadCloser.Close() }

// keepAwake resumes the session if it is paused before d has arrived, until stop
// is called. Where that fails the work is cancelled with the reason.
func (s *Service) keepAwake(ctx context.Context, cancel context.CancelCauseFunc, found session.Session, d *delivery) (stop func()) {
	ctx, end := context.WithCancel(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			now, ok, changed := s.Watch(found.ID)
			missing, went := d.state()
			if ok && missing && now.Op == nil && now.Status == session.Paused {
				if _, err := s.awake(ctx, now, true); err != nil && ctx.Err() == nil && !apierr.Is(err, apierr.SessionNotRunning) {
					cancel(err)
					return
				}
			}
			select {
			case <-ctx.Done():
				return
			case <-changed:
			case <-went:
			}
		}
	}()
	return func() { end(); <-done }
}

// delivery is how far a request has come on its way to an agent.
type delivery struct {
	mu    sync.Mutex    // guards what follows
	conn  unread        // nil: it has no stream yet
	wrote bool          // all of it is in the stream
	went  chan struct{} // closed when it has come further
}

// unread is a stream that knows how much the other side has not read yet.
type unread interface{ Unread() int }

func newDelivery() *delivery { return &delivery{went: make(chan struct{})} }

// state says whether the agent is without the request, for all that is known
// here, and gives a channel that closes when it has come further. One that is
// being written is under way.
func (d *delivery) state() (missing bool, went <-chan struct{}) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.conn == nil || d.wrote && d.conn.Unread() > 0, d.went
}

func (d *delivery) set(change func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	change()
	close(d.went)
	d.went = make(chan struct{})
}

// trace has a request's way followed.
func (d *delivery) trace(ctx context.Context) context.Context {
	return httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GetConn: func(string) { d.set(func() { d.conn, d.wrote = nil, false }) }, // the first, or again
		GotConn: func(info httptrace.GotConnInfo) {
			d.set(func() {
				var ok bool
				if d.conn, ok = info.Conn.(unread); !ok {
					d.conn = silent{}
				}
			})
		},
		WroteRequest: func(httptrace.WroteRequestInfo) { d.set(func() { d.wrote = true }) },
	})
}

// silent is a connection of which nobody knows what was read.
type silent struct{}

func (silent) Unread() int { return 0 }
