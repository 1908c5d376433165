package api

import (
	"net/http"
	"time"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/api"
)

func (c *call) pauseSession() error {
	v, err := c.srv.cfg.Service.Pause(c.ctx, c.caller, c.sessionID())
	c.tellKind(v, err)
	return c.session(v, err)
}

func (c *call) resumeSession() error {
	v, err := c.srv.cfg.Service.Resume(c.ctx, c.caller, c.sessionID())
	c.tellKind(v, err)
	return c.session(v, err)
}

// memoryHeader says of what the session was last captured as: "kept" with its
// memory, "lost" with its tabs, storage and files only.
const memoryHeader = "X-Service-Memory"

func (c *call) tellKind(v sessions.View, err error) {
	switch snap := v.Session.Snapshot; {
	case err != nil || snap == nil:
	case snap.Memory:
		c.rc.Response.Header.Set(memoryHeader, "kept")
	default:
		c.rc.Response.Header.Set(memoryHeader, "lost")
	}
}

func (c *call) moveSession() error {
	var body api.MoveSession
	if _, err := c.decode(&body); err != nil {
		return err
	}
	v, took, err := c.srv.cfg.Service.Move(c.ctx, c.caller, c.sessionID(), sessions.MoveRequest{Host: or(body.Host), Region: or(body.Region)})
	if err != nil {
		return err
	}
	c.tellKind(v, nil)
	out := api.MoveResult{Session: sessionOf(v)}
	out.Timings.CaptureMs, out.Timings.AcquireMs = millis(took.Capture), millis(took.Acquire)
	out.Timings.RestoreMs, out.Timings.TotalMs = millis(took.Restore), millis(took.Total)
	return c.json(http.StatusOK, out)
}

// millis is a duration as the API shows it: whole milliseconds.
func millis(d time.Duration) int64 { return d.Milliseconds() }
