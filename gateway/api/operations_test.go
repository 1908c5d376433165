package api

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// operator is a fakeService that pauses, resumes and moves.
type operator struct {
	*fakeService
	moved sessions.MoveRequest
}

func (f *operator) Pause(_ context.Context, _ accounts.Caller, id string) (sessions.View, error) {
	_, err := f.check(id)
	v := f.view
	v.Session.Status, v.Session.ExpiresAt, v.Session.Snapshot = session.Paused, t0.Add(session.PausedMax), &session.Snapshot{Memory: true}
	return v, err
}

func (f *operator) Resume(_ context.Context, _ accounts.Caller, id string) (sessions.View, error) {
	_, err := f.check(id)
	return f.view, err
}

func (f *operator) Move(_ context.Context, _ accounts.Caller, id string, req sessions.MoveRequest) (sessions.View, sessions.Timings, error) {
	f.moved = req
	_, err := f.check(id)
	v := f.view
	v.Session.Moves, v.Session.Snapshot = 3, &session.Snapshot{}
	return v, sessions.Timings{Capture: 1999 * time.Microsecond, Acquire: 2 * time.Millisecond, Restore: 3 * time.Millisecond, Total: time.Second}, err
}

func newOperator(t *testing.T) (*rig, *operator) {
	r := newRig(t)
	f := &operator{fakeService: r.fake}
	r.srv.cfg.Service = f
	return r, f
}

func TestOperationRoutes(t *testing.T) {
	r, f := newOperator(t)
	var s api.Session
	a := r.do("POST", sessionPath("/pause"), nil)
	if err := json.Unmarshal(a.body, &s); err != nil || a.status != http.StatusOK || s.Status != "PAUSED" || !s.ExpiresAt.Equal(t0.Add(session.PausedMax).Truncate(time.Millisecond)) {
		t.Errorf("pause: %d %s", a.status, a.body)
	}
	if got := a.header.Get("X-Service-Memory"); got != "kept" {
		t.Errorf("a pause with memory says %q", got)
	}
	if a = r.do("POST", sessionPath("/resume"), nil); a.status != http.StatusOK || !strings.Contains(string(a.body), `"RUNNING"`) {
		t.Errorf("resume: %d %s", a.status, a.body)
	}
	a = r.do("POST", sessionPath("/move"), nil)
	var m api.MoveResult
	if err := json.Unmarshal(a.body, &m); err != nil || a.status != http.StatusOK || m.Session.Moves != 3 ||
		m.Timings.CaptureMs != 1 || m.Timings.AcquireMs != 2 || m.Timings.RestoreMs != 3 || m.Timings.TotalMs != 1000 {
		t.Errorf("move: %d %s", a.status, a.body)
	}
	if got := a.header.Get("X-Service-Memory"); got != "lost" {
		t.Errorf("a move without memory says %q", got)
	}
	if f.moved != (sessions.MoveRequest{}) {
		t.Errorf("moved with %+v", f.moved)
	}
	r.do("POST", sessionPath("/move"), `{"host":"h2","region":"eu"}`)
	if f.moved != (sessions.MoveRequest{Host: "h2", Region: "eu"}) {
		t.Errorf("moved with %+v", f.moved)
	}
}

func TestOperationRefusals(t *testing.T) {
	r, f := newOperator(t)
	for body, field := range map[string]string{`{"to":"h2"}`: "to: unknown field; use host or region", `{"host":""}`: "host: ", `{"region":7}`: "region: ", `[]`: "body: "} {
		if a := r.do("POST", sessionPath("/move"), body); a.status != http.StatusBadRequest || !strings.HasPrefix(a.message(), field) {
			t.Errorf("%s: %d %s", body, a.status, a.body)
		}
	}
	for _, c := range []struct {
		fail   *apierr.Error
		paths  string
		status int
	}{
		{apierr.New(apierr.SessionNotRunning, "over"), "pause resume move", 409},
		{apierr.New(apierr.OperationInProgress, "busy").After(time.Second), "pause resume move", 409},
		{apierr.New(apierr.ConcurrencyLimit, "two run").After(5 * time.Second), "resume", 429},
		{apierr.New(apierr.NoCapacity, "full").After(2 * time.Second), "resume move", 503},
		{apierr.New(apierr.Unavailable, "away").After(time.Second), "pause resume move", 503},
		{apierr.New(apierr.Timeout, "too slow"), "pause resume move", 504},
		{apierr.New(apierr.InvalidRequest, "host: there is none"), "move", 400},
	} {
		f.fail = c.fail
		for path := range strings.FieldsSeq(c.paths) {
			a := r.do("POST", sessionPath("/"+path), nil)
			if a.status != c.status || a.code() != string(c.fail.Code) || (a.header.Get("Retry-After") != "") != (c.fail.RetryAfter > 0) {
				t.Errorf("%s: %d %q %s", path, a.status, a.header.Get("Retry-After"), a.body)
			}
		}
	}
	f.fail = nil
	for _, path := range []string{"/pause", "/resume", "/move"} {
		if a := r.do("POST", "/v1/sessions/none"+path, nil); a.status != http.StatusNotFound {
			t.Errorf("%s of an unknown session: %d", path, a.status)
		}
		if a := r.do("POST", sessionPath(path), nil, "X-Api-Key", "wrong"); a.status != http.StatusUnauthorized {
			t.Errorf("%s without a key: %d", path, a.status)
		}
	}
}
