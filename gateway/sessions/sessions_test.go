package sessions

import (
	"context"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/token"
)

func wantCode(t *testing.T, err error, code apierr.Code) {
	t.Helper()
	if !apierr.Is(err, code) {
		t.Errorf("got %v, want %s", err, code)
	}
}

func TestCreateAndRelease(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	v, existing, err := r.use.Create(t.Context(), r.caller, request())
	if err != nil || existing {
		t.Fatal(existing, err)
	}
	s := v.Session
	if s.Status != session.Running || s.Region != "local" || !r.host.has(s.ID) || !strings.HasPrefix(v.URLs.Connect, "wss://berth.example.com/v1/connect?sessionId="+s.ID+"&token=") ||
		v.URLs.Terminal != "" || !strings.HasPrefix(v.URLs.Live, "https://berth.example.com/live/"+s.ID+"?token=") {
		t.Errorf("created %+v", v)
	}
	if again, err := r.use.Get(t.Context(), r.caller, s.ID); err != nil || again.URLs.Connect != v.URLs.Connect {
		t.Errorf("the connect URL changed from %s to %s, %v", v.URLs.Connect, again.URLs.Connect, err)
	}
	if _, err := r.use.Get(t.Context(), accounts.Caller{ProjectID: "other"}, s.ID); !apierr.Is(err, apierr.NotFound) {
		t.Errorf("another project's Get: %v", err)
	}
	ended, err := r.use.Release(t.Context(), r.caller, s.ID)
	if err != nil || ended.Session.Status != session.Completed || ended.Session.EndReason != session.Released || r.host.has(s.ID) {
		t.Errorf("released %+v, %v", ended.Session, err)
	}
	_, err = r.use.Release(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.SessionNotRunning)
	_, err = r.use.Release(t.Context(), r.caller, "no-such")
	wantCode(t, err, apierr.NotFound)
}

func TestNothingStaysOfAFailedCreate(t *testing.T) {
	t.Parallel()
	cases := []struct {
		name string
		prep func(r *rig)
		req  func(*CreateRequest)
		code apierr.Code
	}{
		{"limit", func(r *rig) { r.create(); r.create(); r.create() }, nil, apierr.ConcurrencyLimit},
		{"timeout of the plan", nil, func(c *CreateRequest) { c.Timeout = 901 }, apierr.PlanLimit},
		{"host full", func(r *rig) { r.host.refuseWith(apierr.New(apierr.NoCapacity, "full")) }, nil, apierr.NoCapacity},
		{"host full, with a key", func(r *rig) { r.host.refuseWith(apierr.New(apierr.NoCapacity, "full")) }, func(c *CreateRequest) { c.IdempotencyKey = "k" }, apierr.NoCapacity},
		{"host broken", func(r *rig) { r.host.breakDown() }, nil, apierr.Unavailable},
		{"no host", func(r *rig) { r.hosts.setAway("h1", true) }, nil, apierr.NoCapacity},
		{"unknown region", nil, func(c *CreateRequest) { c.Region, c.StrictRegion = "moon", true }, apierr.InvalidRequest},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			r := newRig(t)
			if c.prep != nil {
				c.prep(r)
			}
			before := r.record.View().Running("p")
			req := request()
			if c.req != nil {
				c.req(&req)
			}
			_, _, err := r.use.Create(t.Context(), r.caller, req)
			wantCode(t, err, c.code)
			if n := r.record.View().Running("p"); n != before {
				t.Errorf("%d sessions count, %d before", n, before)
			}
			if n := len(r.host.inventory().Sessions); n != before {
				t.Errorf("the host runs %d, %d before", n, before)
			}
		})
	}
}

func TestFullHostPassesToTheNext(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	second := newFakeHost(t, "h")
	r.hosts.add(second) // fewer warm machines: the second choice
	r.host.refuseWith(apierr.New(apierr.NoCapacity, "full"))
	s := r.create()
	if s.Host != "h" || !second.has(s.ID) || r.record.View().Running("p") != 1 {
		t.Errorf("placed on %s", s.Host)
	}
}

func TestClientThatLeavesTakesItsCreateAlong(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.host.with(func() { r.host.hold = make(chan struct{}) })
	ctx, leave := context.WithCancelCause(t.Context())
	left := apierr.New(apierr.Canceled, "gone")
	done := make(chan error)
	go func() {
		_, _, err := r.use.Create(ctx, r.caller, request())
		done <- err
	}()
	until(t, "acquire begins", func() bool { return r.host.acquired() == 1 })
	leave(left)
	wantCode(t, <-done, apierr.Canceled)
	if n := r.record.View().Running("p"); n != 0 {
		t.Errorf("%d sessions count", n)
	}
}

func TestIdempotencyKeyGivesTheFirstAnswer(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	req := request()
	req.IdempotencyKey = "once"
	ids := make(chan string)
	for range 8 {
		go func() {
			v, _, err := r.use.Create(t.Context(), r.caller, req)
			if err != nil {
				t.Error(err)
			}
			ids <- v.Session.ID
		}()
	}
	first := <-ids
	for range 7 {
		if id := <-ids; id != first {
			t.Errorf("two sessions %s and %s", first, id)
		}
	}
	if n := r.host.acquired(); n != 1 {
		t.Errorf("%d machines were acquired", n)
	}
}

func TestPatchReachesTheHostNowOrLater(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := r.create()
	yes, longer, tooLong := true, 600, 901
	v, err := r.use.Patch(t.Context(), r.caller, s.ID, PatchRequest{KeepAlive: &yes, Timeout: &longer})
	if err != nil || !v.Session.KeepAlive || v.Session.Timeout != 600 || !v.Session.ExpiresAt.Equal(s.StartedAt.Add(600*time.Second)) {
		t.Fatalf("%+v %v", v.Session, err)
	}
	if got, _ := r.pass(r.host, s.ID); !got.KeepAlive || !got.ExpiresAt.Equal(v.Session.ExpiresAt) {
		t.Errorf("the host has %+v", got)
	}
	_, err = r.use.Patch(t.Context(), r.caller, s.ID, PatchRequest{Timeout: &tooLong})
	wantCode(t, err, apierr.PlanLimit)
	r.hosts.setAway("h1", true)
	no := false
	if _, err = r.use.Patch(t.Context(), r.caller, s.ID, PatchRequest{KeepAlive: &no}); err != nil {
		t.Fatal(err)
	}
	r.hosts.setAway("h1", false)
	r.run()
	until(t, "the host hears of it", func() bool { return !r.host.told(s.ID).KeepAlive })
}

func TestReleaseWithoutTheHost(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := r.create()
	r.hosts.setAway("h1", true)
	v, err := r.use.Release(t.Context(), r.caller, s.ID)
	if err != nil || v.Session.Status != session.Completed {
		t.Fatal(v.Session, err)
	}
	r.hosts.setAway("h1", false)
	r.run()
	until(t, "the machine ends when the host is back", func() bool { return !r.host.has(s.ID) })
}

func TestReconcileTakesTombstonesIn(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	early, late := r.create(), r.create()
	bury := func(id, text string) hostlink.Tombstone {
		tomb := hostlink.Tombstone{SessionID: id, Epoch: 1, EndedAt: time.Now().UTC(), Error: text}
		if text == "" {
			tomb.Reason = session.TimedOut
		}
		r.host.bury(tomb)
		return tomb
	}
	bury(early.ID, "")
	r.run()
	ended := func(id string, want session.Status) func() bool {
		return func() bool { s, _ := r.record.View().Session(id); return s.Status == want }
	}
	until(t, "the first is in the record", ended(early.ID, session.Completed))
	tomb := bury(late.ID, "The machine broke.")
	until(t, "the gateway watches", r.host.watched)
	r.host.tell(hostlink.Notice{Ended: &tomb})
	until(t, "the second is in the record", ended(late.ID, session.Error))
	until(t, "both are acknowledged", func() bool { return len(r.host.inventory().Tombstones) == 0 })
}

func TestReconcileEndsStrays(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	kept := r.create()
	r.use.cfg.CreateDeadline = -undoTime // nothing is too young
	r.host.run(hostlink.Status{SessionID: "stray", Epoch: 1, Since: time.Now().Add(-time.Hour)})
	lost := session.Session{ID: "lost", ProjectID: "p", Kind: session.Shell, Status: session.Running, Host: "h1", Epoch: 1,
		CreatedAt: time.Now().Add(-time.Hour), StartedAt: time.Now().Add(-time.Hour), ExpiresAt: time.Now().Add(time.Hour)}
	if _, _, err := r.record.CreateSession(t.Context(), lost, ""); err != nil {
		t.Fatal(err)
	}
	r.run()
	until(t, "the stray ends", func() bool { return !r.host.has("stray") })
	until(t, "the lost one is an error", func() bool {
		s, _ := r.record.View().Session("lost")
		return s.Status == session.Error && s.Error != ""
	})
	if s, _ := r.record.View().Session(kept.ID); s.Status != session.Running || !r.host.has(kept.ID) {
		t.Errorf("the good one is %+v", s)
	}
}

func TestYoungStraysAreLeftAlone(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.host.run(hostlink.Status{SessionID: "young", Epoch: 1, Since: time.Now()})
	c, err := r.hosts.Client("h1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r.use.compare(t.Context(), "h1", c, r.host.inventory(), time.Now())
	if !r.host.has("young") {
		t.Error("a machine whose create may be under way was ended")
	}
}

func TestLostHostGivesItsSessionsUp(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := r.create()
	r.use.cfg.HostLostAfter = time.Millisecond
	r.hosts.setAway("h1", true)
	r.run()
	until(t, "the session is an error", func() bool { v, _ := r.record.View().Session(s.ID); return v.Status == session.Error })
}

func TestSetupProgressReachesTheRecord(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	req := request()
	req.Kind, req.Setup = session.Shell, []string{"false"}
	v, _, err := r.use.Create(t.Context(), r.caller, req)
	if err != nil || v.Session.SetupStatus != session.SetupRunning {
		t.Fatal(v.Session, err)
	}
	r.run()
	until(t, "the gateway watches", r.host.watched)
	r.host.tell(hostlink.Notice{Status: &hostlink.Status{SessionID: v.Session.ID, Epoch: 1, Setup: session.SetupFailed, SetupErr: "step 1 failed"}})
	until(t, "setup is failed", func() bool {
		s, _ := r.record.View().Session(v.Session.ID)
		return s.SetupStatus == session.SetupFailed && s.SetupError == "step 1 failed"
	})
}

func TestTokensAndRotation(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	v, _, err := r.use.Create(t.Context(), r.caller, request())
	if err != nil {
		t.Fatal(err)
	}
	id := v.Session.ID
	tokenOf := func(u string) string {
		parsed, err := url.Parse(u)
		if err != nil {
			t.Fatal(err)
		}
		return parsed.Query().Get("token")
	}
	old := tokenOf(v.URLs.Connect)
	s, err := r.use.OpenByToken(t.Context(), token.Connect, id, old)
	if err != nil {
		t.Fatal(err)
	}
	for name, bad := range map[string]string{"empty": "", "cut": old[:len(old)-1], "live for connect": tokenOf(v.URLs.Live)} {
		if _, err := r.use.OpenByToken(t.Context(), token.Connect, id, bad); !apierr.Is(err, apierr.Unauthorized) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := r.use.OpenByToken(t.Context(), token.Connect, "no-such", old); !apierr.Is(err, apierr.Unauthorized) {
		t.Errorf("unknown session: %v", err)
	}
	ends := make(chan Ended, 1)
	go func() { ends <- r.use.WatchEnd(t.Context(), s) }()
	if _, err := r.use.RotateURLs(t.Context(), r.caller, id, false); err != nil {
		t.Fatal(err)
	}
	if _, err := r.use.OpenByToken(t.Context(), token.Connect, id, old); !apierr.Is(err, apierr.Unauthorized) {
		t.Errorf("rotated: %v", err)
	}
	select {
	case e := <-ends:
		t.Fatalf("a rotation without disconnect cut a client: %+v", e)
	default:
	}
	u, err := r.use.RotateURLs(t.Context(), r.caller, id, true)
	if err != nil {
		t.Fatal(err)
	}
	if e := <-ends; e.CloseCode != 1008 {
		t.Errorf("cut with %+v", e)
	}
	s, err = r.use.OpenByToken(t.Context(), token.Connect, id, tokenOf(u.Connect))
	if err != nil {
		t.Fatal(err)
	}
	go func() { ends <- r.use.WatchEnd(t.Context(), s) }()
	if _, err := r.use.Release(t.Context(), r.caller, id); err != nil {
		t.Fatal(err)
	}
	if e := <-ends; e.CloseCode != 1000 || e.Reason != "released" {
		t.Errorf("released with %+v", e)
	}
	_, err = r.use.OpenByToken(t.Context(), token.Connect, id, tokenOf(u.Connect))
	wantCode(t, err, apierr.SessionNotRunning)
}

func TestReleaseAll(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for range 3 {
		r.create()
	}
	views, err := r.use.ReleaseAll(t.Context(), r.caller)
	if err != nil || len(views) != 3 || r.record.View().Running("p") != 0 || len(r.host.inventory().Sessions) != 0 {
		t.Errorf("%d released, %v", len(views), err)
	}
}
