package sessions

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// pauseNow pauses a session as somebody else does, and fails the test if that
// does not work.
func (r *rig) pauseNow(id string) error {
	_, err := r.use.Pause(context.WithoutCancel(r.t.Context()), r.caller, id)
	return err
}

// runsAgain waits until a paused session has been resumed.
func (r *rig) runsAgain(ctx context.Context, id string) error {
	for {
		s, _, changed := r.use.Watch(id)
		if s.Status == session.Running && s.Op == nil && s.Epoch > 1 {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

func within(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	t.Cleanup(cancel)
	return ctx
}

// A stream that is opened while its session falls asleep wakes it.
func TestPauseBetweenTheLookAndTheDial(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	here, there := net.Pipe()
	defer there.Close()
	r.hosts.setAgent(func(ctx context.Context) (net.Conn, error) {
		if err := r.pauseNow(s.ID); err != nil {
			return nil, err
		}
		return here, r.runsAgain(ctx, s.ID)
	}, nil)
	conn, err := r.use.DialAgent(within(t), s)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}

// stream is a connection of which the other side has read all but unread.
type stream struct {
	net.Conn
	unread atomic.Int64
}

func (s *stream) Unread() int { return int(s.unread.Load()) }

// A request that its agent has not read when the session falls asleep wakes it,
// wherever on its way it is. Its answer can be read to the end.
func TestPauseBeforeARequestArrives(t *testing.T) {
	t.Parallel()
	for name, way := range map[string]func(*httptrace.ClientTrace, *stream){
		"no stream yet": func(tr *httptrace.ClientTrace, _ *stream) { tr.GetConn("") },
		"in the stream": func(tr *httptrace.ClientTrace, c *stream) {
			tr.GetConn("")
			tr.GotConn(httptrace.GotConnInfo{Conn: c})
			c.unread.Store(300)
			tr.WroteRequest(httptrace.WroteRequestInfo{})
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := twoHosts(t)
			s := r.create()
			var inner context.Context
			r.hosts.setAgent(nil, func(req *http.Request) (*http.Response, error) {
				inner = req.Context()
				way(httptrace.ContextClientTrace(inner), &stream{})
				if err := r.pauseNow(s.ID); err != nil {
					return nil, err
				}
				return &http.Response{StatusCode: 200, Body: io.NopCloser(strings.NewReader("done"))}, r.runsAgain(inner, s.ID)
			})
			req, err := http.NewRequestWithContext(within(t), "POST", "/exec", http.NoBody)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := r.use.AgentRoundTrip(s, req)
			if err != nil {
				t.Fatal(err)
			}
			if got, err := io.ReadAll(resp.Body); string(got) != "done" || err != nil || inner.Err() != nil {
				t.Errorf("%q, %v; its context: %v", got, err, inner.Err())
			}
			if err := resp.Body.Close(); err != nil || inner.Err() == nil {
				t.Errorf("closed: %v, its context: %v", err, inner.Err())
			}
		})
	}
}

// What an agent has got stands still with its session, which stays paused.
func TestWhatHasArrivedWakesNobody(t *testing.T) {
	d := newDelivery()
	tr := httptrace.ContextClientTrace(d.trace(t.Context()))
	c := &stream{}
	for _, step := range []struct {
		name    string
		do      func()
		missing bool
	}{
		{"it waits for a stream", func() { tr.GetConn("") }, true},
		{"it is being written", func() { c.unread.Store(9); tr.GotConn(httptrace.GotConnInfo{Conn: c}) }, false},
		{"it is written", func() { tr.WroteRequest(httptrace.WroteRequestInfo{}) }, true},
		{"it is read", func() { c.unread.Store(0) }, false},
		{"it is sent again", func() { tr.GetConn("") }, true},
	} {
		step.do()
		if missing, _ := d.state(); missing != step.missing {
			t.Errorf("%s: missing %v", step.name, missing)
		}
	}
}

// Where the session cannot be resumed the request does not wait for ever.
func TestRequestThatCannotWakeItsSession(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	full := apierr.New(apierr.ConcurrencyLimit, "two run")
	r.setFault(r.host, func(step string) *fault {
		if step == "restore" {
			return &fault{refuse: full}
		}
		return nil
	})
	r.hosts.setAgent(func(ctx context.Context) (net.Conn, error) {
		if err := r.pauseNow(s.ID); err != nil {
			return nil, err
		}
		<-ctx.Done()
		return nil, errors.New("the dial was given up")
	}, nil)
	if _, err := r.use.DialAgent(within(t), s); !apierr.Is(err, apierr.ConcurrencyLimit) {
		t.Error(err)
	}
}
