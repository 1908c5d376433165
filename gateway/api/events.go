package api

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"time"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/event"
)

// sseComment keeps proxies and clients sure that the stream lives (decisions
// "Streams").
const sseComment = 15 * time.Second

func (c *call) listEvents() error {
	var p api.ListSessionEventsParams
	if err := c.params(&p); err != nil {
		return err
	}
	page, err := c.srv.cfg.Service.Events(c.ctx, c.caller, c.sessionID(), or(p.After), eventTypes(p.Types), or(p.Limit))
	if err != nil {
		return err
	}
	if page.Data == nil {
		page.Data = []event.Event{}
	}
	return c.json(http.StatusOK, page)
}

func eventTypes(p *api.EventTypes) []event.Type {
	var types []event.Type
	for _, t := range or(p) {
		types = append(types, event.Type(t))
	}
	return types
}

func (c *call) streamEvents() error {
	var p api.StreamSessionEventsParams
	if err := c.params(&p); err != nil {
		return err
	}
	after := p.After
	if p.LastEventID != nil {
		after = p.LastEventID
	}
	// A gateway that leaves ends event streams at once: clients come back to
	// another with Last-Event-ID.
	c.later(asStop(context.AfterFunc(c.srv.leaving, func() { c.cancel(errLeaving) })))
	follow, err := c.srv.cfg.Service.FollowEvents(c.ctx, c.caller, c.sessionID(), after, eventTypes(p.Types))
	if err != nil {
		return err
	}
	c.head(http.StatusOK, "text/event-stream")
	c.rc.Response.Header.Set("X-Accel-Buffering", "no") // nginx in front would hold events back
	r, w := io.Pipe()
	c.answerStream(&streamBody{src: r, closer: r}, -1)
	go func() { w.CloseWithError(c.writeEvents(w, follow)) }()
	return nil
}

func asStop(stop func() bool) func() { return func() { stop() } }

// writeEvents turns events into lines until they end. It is the pipe's only
// writer; the pipe's other end closes when the client has left.
func (c *call) writeEvents(w io.Writer, follow func(func(event.Event, error) bool)) error {
	if _, err := io.WriteString(w, "retry: 1000\n\n"); err != nil {
		return err
	}
	events := make(chan event.Event)
	failed := make(chan error, 1)
	go func() {
		defer close(events)
		for e, err := range follow {
			if err != nil {
				failed <- err
				return
			}
			select {
			case events <- e:
			case <-c.ctx.Done():
				return
			}
		}
	}()
	defer func() {
		for range events { // until the follower has seen the end of ctx
		}
	}()
	defer c.cancel(context.Canceled)
	return c.pumpEvents(w, events, failed)
}

func (c *call) pumpEvents(w io.Writer, events <-chan event.Event, failed <-chan error) error {
	comment := time.NewTicker(sseComment)
	defer comment.Stop()
	for {
		select {
		case e, more := <-events:
			if !more {
				select {
				case err := <-failed:
					return err
				default:
					return nil
				}
			}
			if err := writeSSE(w, e); err != nil {
				return err
			}
		case <-comment.C:
			if _, err := io.WriteString(w, ": still here\n\n"); err != nil {
				return err
			}
		case <-c.ctx.Done():
			return nil // a clean end: the client resumes elsewhere
		}
	}
}

func writeSSE(w io.Writer, e event.Event) error {
	data, err := json.Marshal(e) // one line: JSON text has no raw line breaks
	if err != nil {
		return fmt.Errorf("event %d: %w", e.Seq, err)
	}
	b := make([]byte, 0, len(data)+40)
	b = append(b, "id: "...)
	b = strconv.AppendUint(b, e.Seq, 10)
	b = append(b, "\ndata: "...)
	b = append(b, data...)
	_, err = w.Write(append(b, "\n\n"...))
	return err
}

func (c *call) writeMetrics() error {
	c.head(http.StatusOK, "text/plain; version=0.0.4; charset=utf-8")
	daemon.WriteMetrics(c.rc.Response.BodyWriter())
	return nil
}
