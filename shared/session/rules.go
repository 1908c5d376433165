package session

import (
	"encoding/json"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
)

// Bounds and defaults of a session's fields (spec "Limits").
const (
	DefaultTimeout = 300 // seconds
	MinTimeout     = 60  // seconds; the maximum is the plan's

	MinViewportWidth  = 200
	MinViewportHeight = 200
	MaxViewportWidth  = 3840
	MaxViewportHeight = 2160

	// DisconnectGrace is the time between the last CDP client's leave and the
	// end of a browser-only session without keepAlive.
	DisconnectGrace = 5 * time.Second

	CaptchaAsk    = "ask"
	CaptchaIgnore = "ignore"

	// WorkspacePath is where every machine has its shared disk.
	WorkspacePath = "/workspace"
)

// DefaultViewport is what a session without one gets (decisions "One-shots").
var DefaultViewport = Viewport{Width: 1280, Height: 720}

// Expiry is when a session started at started ends by its timeout, given in
// seconds of running time, if it never pauses.
func Expiry(started time.Time, timeout int) time.Time {
	return started.Add(time.Duration(timeout) * time.Second)
}

// Remaining is the running time that a paused session has left. It is not
// kept but computed, so that a new timeout changes it at once.
func Remaining(s Session) time.Duration {
	return max(0, time.Duration(s.Timeout)*time.Second-s.Before)
}

// expiry is when a running session ends by its timeout.
func expiry(s Session) time.Time {
	since, _ := span(s)
	return Expiry(since, s.Timeout).Add(-s.Before)
}

// End moves a session to its final state. A reason makes it COMPLETED; an
// errText, a sentence for people, makes it ERROR; exactly one is given. Its
// operation, if one is open, is over without a verdict; snapshot, key and the
// proxy's passwords go. A session that has ended already is refused with session_not_running.
func End(s Session, at time.Time, reason EndReason, errText string) (Session, error) {
	if s.Status.Ended() {
		return s, ended(s)
	}
	if (reason == "") == (errText == "") {
		return s, apierr.New(apierr.Internal, "an end needs a reason or an error, and not both")
	}
	s.Status, s.EndReason, s.Error = Completed, reason, errText
	if errText != "" {
		s.Status = Error
	}
	s.EndedAt = stamp(at)
	for _, began := range []time.Time{s.StartedAt, s.RunningSince, s.PausedAt} {
		if s.EndedAt.Before(began) {
			s.EndedAt = began // two clocks disagree: never a negative bill
		}
	}
	s.Op, s.Snapshot, s.Key = nil, nil, nil
	s.Proxy, s.ProxySeed = s.Proxy.Bare(), nil
	if s.SetupStatus == SetupRunning {
		s.SetupStatus, s.SetupError = SetupFailed, "the session ended before setup was done"
	}
	return s, nil
}

// Patch is a change of settings; a nil field stays as it is.
type Patch struct {
	KeepAlive    *bool           `json:"keepAlive,omitempty"`
	UserMetadata json.RawMessage `json:"userMetadata,omitempty"` // replaces the whole object
	Timeout      *int            `json:"timeout,omitempty"`      // the new total of running seconds
	Captcha      *string         `json:"captcha,omitempty"`
	Proxy        *ProxyPatch     `json:"proxy,omitempty"`
}

// ProxyPatch is the new proxy setting; To is nil for "no proxy any more".
type ProxyPatch struct {
	To *egress.Setting `json:"to"`
}

// Apply gives the session with the patch in force and SettingsVersion raised.
// A new timeout counts all running time since the start, so one that has passed
// already ends the session at once. Bounds are the caller's: they depend on the plan. An
// ended session is refused with session_not_running.
func (p Patch) Apply(s Session) (Session, error) {
	if s.Status.Ended() {
		return s, ended(s)
	}
	if p.KeepAlive != nil {
		s.KeepAlive = *p.KeepAlive
	}
	if p.UserMetadata != nil {
		s.UserMetadata = p.UserMetadata
	}
	if p.Captcha != nil {
		s.Captcha = *p.Captcha
	}
	if p.Proxy != nil {
		s.Proxy = p.Proxy.To
	}
	if p.Timeout != nil {
		s.Timeout = *p.Timeout
		if s.Status == Running { // while paused, ExpiresAt is the day of paused_expired
			s.ExpiresAt = expiry(s)
		}
	}
	s.SettingsVersion++
	return s, nil
}

// RotateURLs makes every signed URL handed out so far fail; with disconnect the
// sockets that they opened have to close too.
func RotateURLs(s Session, disconnect bool) (Session, error) {
	if s.Status.Ended() {
		return s, ended(s)
	}
	s.URLKeyVersion++
	if disconnect {
		s.CutBelow = s.URLKeyVersion
	}
	return s, nil
}

// RotateProxy gives every proxy of the session a new address. A session without
// a proxy is refused with invalid_request.
func RotateProxy(s Session) (Session, error) {
	if s.Status.Ended() {
		return s, ended(s)
	}
	if s.Proxy == nil {
		return s, apierr.New(apierr.InvalidRequest, "proxy: session %s has none: set one with PATCH first", s.ID)
	}
	s.ProxyTurn++
	s.SettingsVersion++
	return s, nil
}

func ended(s Session) error {
	why := string(s.EndReason)
	if s.Status == Error {
		why = "error"
	}
	return apierr.New(apierr.SessionNotRunning, "session %s has ended (%s)", s.ID, why)
}

// stamp cuts a time to what the record and the API show: UTC milliseconds.
func stamp(t time.Time) time.Time { return t.UTC().Truncate(time.Millisecond) }
