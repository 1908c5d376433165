package sessions

import (
	"bytes"
	"encoding/json"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

// onPlan puts the rig's project on a plan.
func (r *rig) onPlan(name string) {
	r.t.Helper()
	if _, err := r.record.PutKey(r.t.Context(), placement.Project{ID: "p", Plan: name}, placement.Key{Hash: "p"}); err != nil {
		r.t.Fatal(err)
	}
	r.caller.Plan, _ = r.record.View().Plan(name)
}

// patientHosts are twoHosts for tests in which nothing goes wrong, on a
// computer that may stand still for seconds.
func patientHosts(t *testing.T) *rig {
	r := twoHosts(t)
	r.use.cfg.OperationDeadline = time.Minute
	r.use.pace.host, r.use.pace.tell = time.Minute, time.Minute
	return r
}

// used books this month's proxy data of a project, bytes.
func (r *rig) used(project string, n int64) {
	r.t.Helper()
	err := r.record.RecordUsage(r.t.Context(), []proxylink.Row{{SessionID: "of " + project, ProjectID: project, Type: egress.Datacenter,
		Hour: time.Now().Unix() / 3600, Incarnation: "i", Down: n}})
	if err != nil {
		r.t.Fatal(err)
	}
}

func setting(t *testing.T, text string) *egress.Setting {
	t.Helper()
	s, err := egress.ParseSetting(json.RawMessage(text), egress.Sticky)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func (r *rig) createWith(proxy string) (session.Session, error) {
	r.t.Helper()
	req := request()
	req.Proxy = setting(r.t, proxy)
	v, _, err := r.use.Create(r.t.Context(), r.caller, req)
	return v.Session, err
}

func patchTo(t *testing.T, proxy string) PatchRequest {
	return PatchRequest{Proxy: &session.ProxyPatch{To: setting(t, proxy)}}
}

// pass is what a host has of a session, and the pass in it.
func (r *rig) pass(h *fakeHost, id string) (hostlink.Settings, proxylink.Pass) {
	r.t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	set := h.settings[id]
	p, err := proxylink.OpenPass(r.hosts.secret, time.Now(), id, set.Pass)
	if err != nil {
		r.t.Fatalf("pass of %s: %v", id, err)
	}
	return set, p
}

func stickyIDs(p proxylink.Pass) (ids []string) {
	for _, route := range p.Routes {
		ids = append(ids, route.StickyID)
	}
	return ids
}

func TestASessionWithoutAProxyHasAPassToo(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := r.create()
	set, p := r.pass(r.host, s.ID)
	if p.SessionID != s.ID || p.ProjectID != "p" || p.Epoch != 1 || p.Version != 1 || len(p.Routes) != 0 || !p.Expires.Equal(set.PassExpires) {
		t.Errorf("%+v", p)
	}
	if life := time.Until(set.PassExpires); life > proxylink.PassLife || life < proxylink.PassLife-time.Minute {
		t.Errorf("good for %s", life)
	}
	if set.PassEpoch != 1 || set.ShellProxy || set.Proxy != nil || len(s.ProxySeed) != 16 {
		t.Errorf("%+v", set)
	}
}

// A password is in the clear in the pass alone: not in the record, not in its
// files, not in what is shown.
func TestPasswordsAreSealed(t *testing.T) {
	t.Parallel()
	const password = "hunter2-äß\"<&>"
	r := newRig(t)
	text, _ := json.Marshal(map[string]string{"type": "custom", "server": "http://proxy.example:3128", "username": "u", "password": password})
	s, err := r.createWith(string(text))
	if err != nil {
		t.Fatal(err)
	}
	_, p := r.pass(r.host, s.ID)
	if len(p.Routes) != 1 || p.Routes[0].Password != password || p.Routes[0].Username != "u" || p.Routes[0].Sealed != nil || p.Routes[0].StickyID == "" {
		t.Errorf("the pass leads %+v", p.Routes)
	}
	second := strings.Replace(string(text), "u\"", "v\"", 1)
	if _, err := r.use.Patch(t.Context(), r.caller, s.ID, patchTo(t, second)); err != nil {
		t.Fatal(err)
	}
	if _, p := r.pass(r.host, s.ID); p.Routes[0].Password != password || p.Version != 2 {
		t.Errorf("after PATCH: %+v", p)
	}
	now := r.session(s.ID)
	inRecord, _ := json.Marshal(now)
	if len(now.Proxy.Rules[0].Sealed) == 0 || now.Proxy.Rules[0].Password != "" || strings.Contains(string(inRecord), "hunter2") {
		t.Errorf("the record has %s", inRecord)
	}
	set, _ := r.pass(r.host, s.ID)
	onTheWay, _ := json.Marshal(set)
	if strings.Contains(string(onTheWay), "hunter2") || string(set.Proxy) != string(now.Proxy.Shown()) {
		t.Errorf("the host hears %s", onTheWay)
	}
	err = filepath.WalkDir(r.home, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		b, err := os.ReadFile(path)
		if bytes.Contains(b, []byte("hunter2")) {
			t.Errorf("%s has the password", path)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
	ended, err := r.use.Release(t.Context(), r.caller, s.ID)
	if err != nil || ended.Session.Proxy == nil || ended.Session.Proxy.Rules[0].Sealed != nil || r.session(s.ID).Proxy.Rules[0].Sealed != nil {
		t.Errorf("after the end %+v, %v", ended.Session, err)
	}
}

// The clear password of one session opens no other's.
func TestASealedPasswordIsItsSessions(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	custom := setting(t, `{"type":"custom","server":"http://a:1","password":"p"}`)
	kept, err := r.use.sealed("one", custom)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.use.settings(session.Session{ID: "other", Proxy: kept}, 1); err == nil {
		t.Error("another session's pass was made of it")
	}
	r.use.cfg.Secret = trust.New()
	if _, err := r.use.settings(session.Session{ID: "one", Proxy: kept}, 1); err == nil {
		t.Error("another cluster's pass was made of it")
	}
}

// The largest setting there can be fits into a pass.
func TestTheLargestSettingFits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	long := strings.Repeat("<", 256)
	rule := map[string]string{"type": "custom", "server": "https://" + strings.Repeat("a.", 126) + "b:65535", "username": long, "password": long,
		"domainPattern": long, "ip": "rotating", "scope": "browser"}
	text, _ := json.Marshal(slices.Repeat([]map[string]string{rule}, 10))
	s, err := r.createWith(string(text))
	if err != nil {
		t.Fatal(err)
	}
	if _, p := r.pass(r.host, s.ID); len(p.Routes) != 10 || p.Routes[9].Password != long || p.Routes[0].StickyID != "" {
		t.Errorf("%d routes", len(p.Routes))
	}
}

func TestPatchAndRotateReachTheHostAtOnce(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.onPlan("Hobby")
	req := request()
	req.Kind = session.Both
	req.Proxy = setting(t, `[{"type":"datacenter","domainPattern":"a"},{"type":"residential","country":"DE"},{"type":"residential","ip":"rotating"},{"type":"none"}]`)
	v, _, err := r.use.Create(t.Context(), r.caller, req)
	if err != nil {
		t.Fatal(err)
	}
	id := v.Session.ID
	_, first := r.pass(r.host, id)
	ids := stickyIDs(first)
	if len(ids) != 4 || ids[0] == "" || ids[1] == "" || ids[0] == ids[1] || ids[2] != "" || ids[3] != "" {
		t.Errorf("sticky ids %q", ids)
	}

	if _, err = r.use.Patch(t.Context(), r.caller, id, patchTo(t, `[{"type":"residential","country":"DE","scope":"all"},{"type":"residential","country":"FR"}]`)); err != nil {
		t.Fatal(err)
	}
	set, second := r.pass(r.host, id)
	if now := stickyIDs(second); second.Version != 2 || len(now) != 2 || now[0] != ids[1] || now[1] == "" || !set.ShellProxy {
		t.Errorf("after PATCH %+v: an unchanged rule keeps its address", second)
	}

	if v, err = r.use.RotateProxy(t.Context(), r.caller, id); err != nil || v.Session.ProxyTurn != 1 {
		t.Fatal(v.Session, err)
	}
	set, third := r.pass(r.host, id)
	for i, now := range stickyIDs(third) {
		if now == "" || now == stickyIDs(second)[i] {
			t.Errorf("after the rotation rule %d has %q, before %q", i, now, stickyIDs(second)[i])
		}
	}
	if third.Version != 3 || set.ProxyTurn != 1 || !bytes.Equal(set.Proxy, v.Session.Proxy.Shown()) {
		t.Errorf("rotated: %+v", set)
	}

	if v, err = r.use.Patch(t.Context(), r.caller, id, PatchRequest{Proxy: &session.ProxyPatch{}}); err != nil || v.Session.Proxy != nil {
		t.Fatal(v.Session, err)
	}
	set, fourth := r.pass(r.host, id)
	if len(fourth.Routes) != 0 || set.ShellProxy || set.Proxy != nil || fourth.Version != 4 {
		t.Errorf("removed: %+v", fourth)
	}
	_, err = r.use.RotateProxy(t.Context(), r.caller, id)
	wantCode(t, err, apierr.InvalidRequest)
	_, err = r.use.RotateProxy(t.Context(), accounts.Caller{ProjectID: "other"}, id)
	wantCode(t, err, apierr.NotFound)
	if _, err = r.use.Release(t.Context(), r.caller, id); err != nil {
		t.Fatal(err)
	}
	_, err = r.use.RotateProxy(t.Context(), r.caller, id)
	wantCode(t, err, apierr.SessionNotRunning)
	_, err = r.use.Patch(t.Context(), r.caller, id, patchTo(t, `true`))
	wantCode(t, err, apierr.SessionNotRunning)
}

func TestPlanAndAllowance(t *testing.T) {
	t.Parallel()
	const custom, list = `{"type":"custom","server":"http://a:1"}`, `[{"type":"custom","server":"http://a:1"},{"type":"datacenter","domainPattern":"x"}]`
	r := newRig(t)
	want := func(what string, err error, code apierr.Code) {
		t.Helper()
		if !apierr.Is(err, code) || apierr.From(err).Status() != 402 {
			t.Errorf("%s: %v, want 402 %s", what, err, code)
		}
	}
	tooLong := request()
	tooLong.Timeout, tooLong.Proxy = 1_000_000, setting(t, `true`)
	_, err := r.createWith(`true`)
	want("create on Free", err, apierr.PlanLimit)
	_, err = r.createWith(list)
	want("a list with one of the platform's", err, apierr.PlanLimit)
	_, _, err = r.use.Create(t.Context(), r.caller, tooLong)
	want("402 comes before 403", err, apierr.PlanLimit)
	s, err := r.createWith(custom)
	if err != nil {
		t.Fatal(err)
	}
	_, err = r.use.Patch(t.Context(), r.caller, s.ID, patchTo(t, `true`))
	want("PATCH on Free", err, apierr.PlanLimit)
	if now := r.session(s.ID); now.SettingsVersion != 1 || now.Proxy.Rules[0].Type != egress.Custom {
		t.Errorf("a refused PATCH changed %+v", now)
	}

	r.onPlan("Hobby")
	r.used("other", 1e14)
	r.used("p", 4_999_999_999)
	platform, err := r.createWith(list)
	if err != nil {
		t.Fatal(err)
	}
	r.used("p", 5_000_000_000)
	_, err = r.createWith(`true`)
	want("create", err, apierr.SpendLimit)
	_, err = r.use.Patch(t.Context(), r.caller, s.ID, patchTo(t, list))
	want("PATCH", err, apierr.SpendLimit)
	if _, err = r.use.RotateProxy(t.Context(), r.caller, platform.ID); err != nil {
		t.Errorf("a session that has its proxy goes on: %v", err)
	}
	if _, err = r.use.Patch(t.Context(), r.caller, s.ID, patchTo(t, `[`+custom+`,{"type":"none"}]`)); err != nil {
		t.Errorf("a custom proxy does not count: %v", err)
	}
	if n := r.record.View().Running("p"); n != 2 {
		t.Errorf("%d sessions run", n)
	}
}

// A key that made a session gives it again, also when what it has would not be
// allowed any more.
func TestIdempotencyKeyOutlivesTheAllowance(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	r.onPlan("Hobby")
	req := request()
	req.Proxy, req.IdempotencyKey = setting(t, `true`), "once"
	v, existing, err := r.use.Create(t.Context(), r.caller, req)
	if err != nil || existing {
		t.Fatal(existing, err)
	}
	r.used("p", 5e9)
	again, existing, err := r.use.Create(t.Context(), r.caller, req)
	if err != nil || !existing || again.Session.ID != v.Session.ID {
		t.Errorf("%v, %v", existing, err)
	}
	req.IdempotencyKey = "twice"
	_, _, err = r.use.Create(t.Context(), r.caller, req)
	wantCode(t, err, apierr.SpendLimit)
}

func TestProxyThroughPauseResumeAndMove(t *testing.T) {
	t.Parallel()
	r := patientHosts(t)
	r.onPlan("Hobby")
	s, err := r.createWith(`[{"type":"residential","city":"Berlin","country":"de"},{"type":"custom","server":"http://a:1","password":"p"}]`)
	if err != nil {
		t.Fatal(err)
	}
	_, first := r.pass(r.host, s.ID)
	moved, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{})
	if err != nil {
		t.Fatal(err)
	}
	check := func(what string, h *fakeHost, epoch uint64, now session.Session) {
		t.Helper()
		_, p := r.pass(h, s.ID)
		if p.Epoch != epoch || !slices.Equal(stickyIDs(p), stickyIDs(first)) || p.Routes[1].Password != "p" || string(now.Proxy.Shown()) != string(s.Proxy.Shown()) {
			t.Errorf("%s: %+v", what, p)
		}
	}
	check("moved", r.second(), 2, moved.Session)
	if _, err = r.use.Pause(t.Context(), r.caller, s.ID); err != nil {
		t.Fatal(err)
	}
	r.hosts.setAway("h1", true) // back where it was
	resumed, err := r.use.Resume(t.Context(), r.caller, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	check("resumed", r.second(), 3, resumed.Session)
}

// Every way back from a pause asks plan and allowance again; PATCH is the way out.
func TestResumeAsksTheAllowance(t *testing.T) {
	t.Parallel()
	r := patientHosts(t)
	r.onPlan("Hobby")
	s, err := r.createWith(`true`)
	if err != nil {
		t.Fatal(err)
	}
	v, err := r.use.Pause(t.Context(), r.caller, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	r.used("p", 5e9)
	_, err = r.use.Resume(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.SpendLimit)
	_, err = r.use.Awake(t.Context(), v.Session)
	wantCode(t, err, apierr.SpendLimit)
	r.onPlan("Free")
	_, err = r.use.Awake(t.Context(), v.Session)
	wantCode(t, err, apierr.PlanLimit)
	if now := r.session(s.ID); now.Status != session.Paused || now.Op != nil {
		t.Errorf("a refused resume left %+v", now)
	}
	if v, err = r.use.Patch(t.Context(), r.caller, s.ID, patchTo(t, `{"type":"custom","server":"http://a:1"}`)); err != nil {
		t.Fatal(err)
	}
	if v, err = r.use.Resume(t.Context(), r.caller, s.ID); err != nil || v.Session.Status != session.Running {
		t.Fatal(v.Session, err)
	}
	if _, p := r.pass(r.hosts.hosts[v.Session.Host], s.ID); p.Routes[0].Type != egress.Custom || p.Epoch != 2 {
		t.Errorf("resumed with %+v", p)
	}
}

// A proxy that changes while a session moves or comes back is in place before
// the machine goes on.
func TestPatchDuringAnOperation(t *testing.T) {
	t.Parallel()
	for _, kind := range []session.OpKind{session.Move, session.Resume} {
		for _, step := range []string{"opened", "restored", "commit"} {
			t.Run(string(kind)+" "+step, func(t *testing.T) {
				t.Parallel()
				r := patientHosts(t)
				s := r.create()
				if kind == session.Resume {
					if _, err := r.use.Pause(t.Context(), r.caller, s.ID); err != nil {
						t.Fatal(err)
					}
				}
				patched := false
				r.use.onStep = func(name string) error {
					if name == step && !patched {
						patched = true
						if _, err := r.use.Patch(t.Context(), r.caller, s.ID, patchTo(t, `{"type":"custom","server":"http://a:1"}`)); err != nil {
							t.Error(err)
						}
					}
					return nil
				}
				late := make(chan string, 10)
				for _, h := range r.hosts.hosts {
					r.setFault(h, func(step string) *fault {
						h.mu.Lock()
						_, target := h.targets[s.ID]
						h.mu.Unlock()
						if step == "verdict" && target {
							if _, p := r.pass(h, s.ID); len(p.Routes) != 1 {
								late <- h.name
							}
						}
						return nil
					})
				}
				var err error
				if kind == session.Resume {
					_, err = r.use.Resume(t.Context(), r.caller, s.ID)
				} else {
					_, _, err = r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{})
				}
				if err != nil || !patched {
					t.Fatal(patched, err)
				}
				select {
				case h := <-late:
					t.Errorf("%s let the machine go on by the proxy of before", h)
				default:
				}
			})
		}
	}
}

func TestPassesAreRenewed(t *testing.T) {
	t.Parallel()
	r := patientHosts(t)
	old, young := r.create(), r.create()
	r.host.mu.Lock()
	st := r.host.running[old.ID]
	st.PassExpires = time.Now().Add(proxylink.PassLife/2 - time.Minute)
	r.host.running[old.ID] = st
	set := r.host.settings[young.ID]
	before := r.host.patches
	r.host.mu.Unlock()
	r.run()
	until(t, "the old pass is renewed", func() bool {
		r.host.mu.Lock()
		defer r.host.mu.Unlock()
		return time.Until(r.host.running[old.ID].PassExpires) > proxylink.PassLife-time.Minute
	})
	if got, p := r.pass(r.host, old.ID); p.Version != 1 || p.Epoch != 1 || got.Version != 1 {
		t.Errorf("renewed: %+v", p)
	}
	looks := func() int { r.host.mu.Lock(); defer r.host.mu.Unlock(); return r.host.inventories }
	from := looks()
	until(t, "some more looks at the host", func() bool { return looks() >= from+3 })
	r.host.mu.Lock()
	defer r.host.mu.Unlock()
	if !bytes.Equal(r.host.settings[young.ID].Pass, set.Pass) || r.host.patches != before+1 {
		t.Errorf("%d orders, one pass was due", r.host.patches-before)
	}
}

func TestPassDue(t *testing.T) {
	now := time.Now()
	for left, want := range map[time.Duration]bool{
		proxylink.PassLife: false, proxylink.PassLife / 2: false, proxylink.PassLife/2 - 1: true, 0: true, -time.Hour: true,
	} {
		if passDue(now.Add(left), now) != want {
			t.Errorf("%s before its end: %v", left, !want)
		}
	}
	if !passDue(time.Time{}, now) {
		t.Error("a machine without a pass needs none")
	}
}
