package api

import (
	"encoding/json"
	"time"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/session"
)

// sessionOf gives a session the shape of the specification.
func sessionOf(v sessions.View) api.Session {
	s := v.Session
	out := api.Session{
		Id: s.ID, Status: api.Status(s.Status), ProjectId: s.ProjectID, Region: s.Region,
		Browser: s.Kind.HasBrowser(), Shell: s.Kind.HasShell(), KeepAlive: s.KeepAlive, Timeout: s.Timeout,
		CreatedAt: stamp(s.CreatedAt), StartedAt: stamp(s.StartedAt), ExpiresAt: stamp(s.ExpiresAt),
		EndReason: optional(string(s.EndReason)), Error: optional(s.Error),
		ConnectUrl: optional(v.URLs.Connect), LiveUrl: v.URLs.Live, TerminalUrl: optional(v.URLs.Terminal),
		WorkspacePath: agentlink.Workspace, UserMetadata: s.UserMetadata, Moves: s.Moves,
		Captcha: api.SessionCaptcha(s.Captcha),
	}
	if len(out.UserMetadata) == 0 {
		out.UserMetadata = json.RawMessage("{}")
	}
	if s.Proxy != nil {
		shown := s.Proxy.Shown()
		out.Proxy = &shown
	}
	if !s.EndedAt.IsZero() {
		ended := stamp(s.EndedAt)
		out.EndedAt = &ended
	}
	if s.SetupStatus != "" {
		status := api.SessionSetupStatus(s.SetupStatus)
		out.SetupStatus, out.SetupError = &status, optional(s.SetupError)
	}
	out.Usage.Seconds = float64(v.Used.Milliseconds()) / 1000
	out.Usage.CostUsd = float64(v.Cost) / float64(session.Dollar)
	return out
}

func sessionsOf(views []sessions.View) []api.Session {
	out := make([]api.Session, len(views)) // never nil: an empty list is []
	for i, v := range views {
		out[i] = sessionOf(v)
	}
	return out
}

// stamp cuts a time to what the API shows: UTC and milliseconds.
func stamp(t time.Time) time.Time { return t.UTC().Truncate(time.Millisecond) }

// optional makes the empty text null.
func optional(s string) *string {
	if s == "" {
		return nil
	}
	return &s
}

// or gives the pointed-to value, or the zero value.
func or[T any](p *T) (v T) {
	if p != nil {
		v = *p
	}
	return v
}
