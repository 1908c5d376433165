package session

import (
	"encoding/json"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
)

var t0 = time.Date(2026, 9, 1, 12, 0, 0, 0, time.UTC)

func running() Session {
	return Session{ID: "s", Kind: Both, Status: Running, Timeout: 300, CreatedAt: t0, StartedAt: t0, ExpiresAt: Expiry(t0, 300), URLKeyVersion: 1}
}

func TestEnd(t *testing.T) {
	for _, c := range []struct {
		name   string
		from   Status
		reason EndReason
		err    string
		want   Status
		code   apierr.Code
	}{
		{"released", Running, Released, "", Completed, ""},
		{"released while paused", Paused, Released, "", Completed, ""},
		{"lost", Running, "", "The machine was lost.", Error, ""},
		{"completed before", Completed, Released, "", Completed, apierr.SessionNotRunning},
		{"failed before", Error, TimedOut, "", Error, apierr.SessionNotRunning},
		{"neither reason nor error", Running, "", "", Running, apierr.Internal},
		{"both", Running, Released, "Lost.", Running, apierr.Internal},
	} {
		s := running()
		s.Status = c.from
		got, err := End(s, t0.Add(time.Minute), c.reason, c.err)
		if got.Status != c.want || (err != nil) != (c.code != "") || err != nil && !apierr.Is(err, c.code) {
			t.Errorf("%s: %s, %v", c.name, got.Status, err)
		}
		if err == nil && (got.EndReason != c.reason || got.Error != c.err || !got.EndedAt.Equal(t0.Add(time.Minute))) {
			t.Errorf("%s: %+v", c.name, got)
		}
	}
}

func TestEndSettlesWhatWasOpen(t *testing.T) {
	s := running()
	s.SetupStatus = SetupRunning
	got, err := End(s, t0.Add(-time.Hour), TimedOut, "") // a host whose clock is behind
	if err != nil || got.EndedAt.Before(got.StartedAt) || got.SetupStatus != SetupFailed || got.SetupError == "" {
		t.Errorf("%+v, %v", got, err)
	}
}

func TestPatch(t *testing.T) {
	yes, long, ignore := true, 900, CaptchaIgnore
	s := running()
	got, err := Patch{}.Apply(s)
	if err != nil || got.SettingsVersion != 1 || got.Timeout != 300 || got.KeepAlive {
		t.Errorf("an empty patch: %+v, %v", got, err)
	}
	got, err = Patch{KeepAlive: &yes, Timeout: &long, Captcha: &ignore, UserMetadata: json.RawMessage(`{"a":1}`)}.Apply(got)
	if err != nil || !got.KeepAlive || got.Captcha != ignore || string(got.UserMetadata) != `{"a":1}` ||
		got.Timeout != 900 || !got.ExpiresAt.Equal(t0.Add(15*time.Minute)) || got.SettingsVersion != 2 {
		t.Errorf("a full patch: %+v, %v", got, err)
	}
	s.Status, s.ExpiresAt = Paused, t0.AddDate(0, 0, 30)
	if got, err = (Patch{Timeout: &long}).Apply(s); err != nil || !got.ExpiresAt.Equal(s.ExpiresAt) || got.Timeout != 900 {
		t.Errorf("while paused expiresAt is another day's: %+v, %v", got, err)
	}
	s.Status = Completed
	if _, err = (Patch{KeepAlive: &yes}).Apply(s); !apierr.Is(err, apierr.SessionNotRunning) {
		t.Errorf("an ended session: %v", err)
	}
}

func TestRotateURLs(t *testing.T) {
	got, err := RotateURLs(running(), false)
	if err != nil || got.URLKeyVersion != 2 || got.CutBelow != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = RotateURLs(got, true)
	if err != nil || got.URLKeyVersion != 3 || got.CutBelow != 3 {
		t.Errorf("with disconnect: %+v, %v", got, err)
	}
	got.Status = Error
	if _, err = RotateURLs(got, false); !apierr.Is(err, apierr.SessionNotRunning) {
		t.Errorf("an ended session: %v", err)
	}
}

func TestProxyOfASession(t *testing.T) {
	secret := &egress.Setting{Rules: []egress.Rule{{Type: egress.Custom, Server: "http://a:1", Sealed: []byte("sealed")}}}
	s := running()
	if _, err := RotateProxy(s); !apierr.Is(err, apierr.InvalidRequest) {
		t.Errorf("rotate without a proxy: %v", err)
	}
	s, err := Patch{Proxy: &ProxyPatch{To: secret}}.Apply(s)
	if err != nil || s.Proxy != secret || s.SettingsVersion != 1 {
		t.Errorf("set: %+v, %v", s, err)
	}
	if s, err = (Patch{}).Apply(s); err != nil || s.Proxy != secret {
		t.Errorf("left out: %+v, %v", s, err)
	}
	s, err = RotateProxy(s)
	if err != nil || s.ProxyTurn != 1 || s.SettingsVersion != 3 {
		t.Errorf("rotated: %+v, %v", s, err)
	}
	s.ProxySeed = []byte("seed")
	ended, err := End(s, t0, Released, "")
	if err != nil || ended.Proxy == nil || ended.Proxy.Rules[0].Server != "http://a:1" || ended.Proxy.Rules[0].Sealed != nil || ended.ProxySeed != nil {
		t.Errorf("ended with %+v", ended)
	}
	if string(s.Proxy.Rules[0].Sealed) != "sealed" {
		t.Error("the end changed what another view of the record may read")
	}
	if s, err = (Patch{Proxy: &ProxyPatch{}}).Apply(s); err != nil || s.Proxy != nil {
		t.Errorf("removed: %+v, %v", s, err)
	}
	if _, err := RotateProxy(ended); !apierr.Is(err, apierr.SessionNotRunning) {
		t.Errorf("rotate of an ended session: %v", err)
	}
}

// TestLifeIsOneWay plays random rules on a session: what has ended stays as it
// is, versions only rise, time is never negative.
func TestLifeIsOneWay(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s := running()
		for range rapid.IntRange(1, 20).Draw(rt, "steps") {
			before, at := s, t0.Add(time.Duration(rapid.IntRange(-1000, 100_000).Draw(rt, "ms"))*time.Millisecond)
			var err error
			switch rapid.IntRange(0, 2).Draw(rt, "rule") {
			case 0:
				s, err = End(s, at, Released, "")
			case 1:
				n := rapid.IntRange(MinTimeout, 900).Draw(rt, "timeout")
				s, err = Patch{Timeout: &n}.Apply(s)
			case 2:
				s, err = RotateURLs(s, rapid.Bool().Draw(rt, "cut"))
			}
			if before.Status.Ended() != (err != nil) {
				rt.Fatalf("from %s: %v", before.Status, err)
			}
			if s.URLKeyVersion < before.URLKeyVersion || s.SettingsVersion < before.SettingsVersion || s.CutBelow > s.URLKeyVersion {
				rt.Fatalf("a version fell: %+v after %+v", s, before)
			}
			if s.Status == Running && !s.ExpiresAt.Equal(Expiry(s.StartedAt, s.Timeout)) {
				rt.Fatalf("expires %v with timeout %d", s.ExpiresAt, s.Timeout)
			}
			if Usage(s, at) < 0 {
				rt.Fatal("negative usage")
			}
		}
	})
}
