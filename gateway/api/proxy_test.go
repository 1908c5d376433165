package api

import (
	"context"
	"encoding/json"
	"strings"
	"testing"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
)

func (f *fakeService) RotateProxy(_ context.Context, _ accounts.Caller, id string) (sessions.View, error) {
	_, err := f.check(id)
	return f.view, err
}

// creates makes the fake show what it was asked to make.
func (f *fakeService) creates() *sessions.CreateRequest {
	var got sessions.CreateRequest
	f.create = func(_ context.Context, req sessions.CreateRequest) (sessions.View, bool, error) {
		got = req
		v := f.view
		v.Session.Proxy = req.Proxy
		return v, false, f.fail
	}
	return &got
}

// shownProxy is the proxy of an answer.
func shownProxy(t *testing.T, a answer) string {
	t.Helper()
	var s struct{ Proxy json.RawMessage }
	if err := json.Unmarshal(a.body, &s); err != nil {
		t.Fatalf("%d %s: %v", a.status, a.body, err)
	}
	return string(s.Proxy)
}

func TestCreateWithAProxy(t *testing.T) {
	r := newRig(t)
	got := r.fake.creates()
	for given, shown := range map[string]string{
		`true`: `{"type":"residential","country":"US","ip":"sticky","scope":"browser"}`,
		`{"type":"residential","state":"New York","city":"New York"}`:                                                    `{"type":"residential","country":"US","state":"us_new_york","city":"new_york","ip":"sticky","scope":"browser"}`,
		`{"type":"datacenter","country":"de","scope":"all"}`:                                                             `{"type":"datacenter","country":"DE","ip":"sticky","scope":"all"}`,
		`{"type":"custom","server":"http://proxy.example:3128","username":"u","password":"hunter2"}`:                     `{"type":"custom","ip":"sticky","scope":"browser","server":"http://proxy.example:3128","username":"u"}`,
		`{"type":"residential","domainPattern":"<é>&"}`:                                                                  `{"type":"residential","ip":"sticky","scope":"browser","domainPattern":"<é>&"}`,
		`[{"type":"none","domainPattern":"^a\\."},{"type":"custom","server":"http://[2606:4700::1]:1","ip":"rotating"}]`: `[{"type":"none","ip":"sticky","domainPattern":"^a\\."},{"type":"custom","ip":"rotating","server":"http://[2606:4700::1]:1"}]`,
	} {
		a := r.do("POST", "/v1/sessions", `{"proxy":`+given+`}`)
		if a.status != 201 || shownProxy(t, a) != shown {
			t.Errorf("%s: %d %s, want %s", given, a.status, a.body, shown)
		}
		if strings.Contains(string(a.body), "hunter2") {
			t.Errorf("a password is shown: %s", a.body)
		}
		if strings.Contains(given, "hunter2") && got.Proxy.Rules[0].Password != "hunter2" {
			t.Errorf("the password did not arrive: %+v", got.Proxy)
		}
	}
	if a := r.do("POST", "/v1/sessions", `{"browser":false,"shell":true,"proxy":true}`); a.status != 201 {
		t.Errorf("a shell alone with scope browser: %d %s", a.status, a.body)
	}
	if a := r.do("POST", "/v1/sessions", `{}`); a.status != 201 || got.Proxy != nil || shownProxy(t, a) != "null" {
		t.Errorf("without a proxy: %d %s", a.status, a.body)
	}
}

// Every case that the specification names under 400, and that nothing of what
// was sent comes back.
func TestProxyRefusals(t *testing.T) {
	r := newRig(t)
	r.fake.create = func(context.Context, sessions.CreateRequest) (sessions.View, bool, error) {
		t.Error("a refused setting was used")
		return r.fake.view, false, nil
	}
	rules := strings.Repeat(`{"type":"none"},`, 10) + `{"type":"none"}`
	for given, want := range map[string]string{
		`{"type":"residential","city":"berlin"}`:                  "proxy.city: ",
		`{"type":"residential","country":"DE","state":"us_ohio"}`: "proxy.state: ",
		`{"type":"datacenter","state":"us_ohio"}`:                 "proxy.state: ",
		`{"type":"datacenter","country":"US","city":"boston"}`:    "proxy.city: ",
		`{"type":"custom","server":"http://a:1","country":"US"}`:  "proxy.country: ",
		`{"type":"custom","server":"http://proxy.example"}`:       "proxy.server: ",
		`{"type":"custom"}`: "proxy.server: ",
		`{"type":"custom","server":"http://u:hunter2@proxy.example:1"}`:                 "proxy.server: ",
		`{"type":"custom","server":"http://a:1","password":["hunter2"]}`:                "proxy.password: ",
		`{"type":"custom","server":"http://a:1","password":"hunter2\n"}`:                "proxy.password: ",
		`{"type":"custom","server":"http://a:1","password":"hunter2","pass":"hunter2"}`: "proxy.pass: unknown field",
		`[` + rules + `]`: "proxy: must hold at most 10 rules",
		`{"type":"residential","domainPattern":"("}`:                                     "proxy.domainPattern: ",
		`{"type":"residential","domainPattern":"` + strings.Repeat("a", 257) + `"}`:      "proxy.domainPattern: must be at most 256",
		`[{"type":"residential","scope":"all"},{"type":"datacenter","scope":"browser"}]`: "proxy[1].scope: ",
		`[{"type":"residential"},{"type":"none","domainPattern":"["}]`:                   "proxy[1].domainPattern: ",
		`{"type":"none"}`:  "proxy.type: ",
		`{"type":"socks"}`: "proxy.type: ",
		`"true"`:           "proxy: must be true, an object or a list",
		`[]`:               "proxy: must hold at least one rule",
	} {
		for _, method := range []string{"POST", "PATCH"} {
			path := "/v1/sessions"
			if method == "PATCH" {
				path = sessionPath("")
			}
			a := r.do(method, path, `{"proxy":`+given+`}`)
			if a.status != 400 || a.code() != "invalid_request" || !strings.HasPrefix(a.message(), want) || strings.Contains(string(a.body), "hunter2") {
				t.Errorf("%s %.100s: %d %s, want %q", method, given, a.status, a.body, want)
			}
		}
	}
	if a := r.do("POST", "/v1/sessions", `{"proxy":null}`); a.status != 400 || !strings.HasPrefix(a.message(), "proxy: ") {
		t.Errorf("null at create: %d %s", a.status, a.body)
	}
}

func TestPatchProxy(t *testing.T) {
	r := newRig(t)
	if a := r.do("PATCH", sessionPath(""), `{"keepAlive":true}`); a.status != 200 || r.fake.patch.Proxy != nil {
		t.Errorf("left out: %d %+v", a.status, r.fake.patch.Proxy)
	}
	if a := r.do("PATCH", sessionPath(""), `{"proxy":null}`); a.status != 200 || r.fake.patch.Proxy == nil || r.fake.patch.Proxy.To != nil {
		t.Errorf("null: %d %+v", a.status, r.fake.patch.Proxy)
	}
	a := r.do("PATCH", sessionPath(""), `{"proxy":[{"type":"custom","server":"https://a:1","password":"p"},{"type":"datacenter"}],"timeout":6e1}`)
	p := r.fake.patch.Proxy
	if a.status != 200 || p == nil || p.To == nil || !p.To.List || len(p.To.Rules) != 2 || p.To.Rules[0].Password != "p" || *r.fake.patch.Timeout != 60 {
		t.Errorf("a list: %d %+v", a.status, p)
	}
}

func TestRotateProxy(t *testing.T) {
	r := newRig(t)
	r.fake.view.Session.Proxy = &egress.Setting{Rules: []egress.Rule{{Type: egress.Custom, IP: egress.Sticky, Scope: egress.ScopeAll, Server: "http://a:1", Sealed: []byte("hunter2")}}}
	a := r.do("POST", sessionPath("/proxy/rotate"), nil)
	if a.status != 200 || shownProxy(t, a) != `{"type":"custom","ip":"sticky","scope":"all","server":"http://a:1"}` {
		t.Errorf("%d %s", a.status, a.body)
	}
	if a := r.do("POST", "/v1/sessions/none/proxy/rotate", nil); a.status != 404 {
		t.Errorf("of none: %d %s", a.status, a.body)
	}
	for code, status := range map[apierr.Code]int{apierr.InvalidRequest: 400, apierr.SessionNotRunning: 409, apierr.Unavailable: 503} {
		r.fake.fail = apierr.New(code, "no")
		if a := r.do("POST", sessionPath("/proxy/rotate"), nil); a.status != status || a.code() != string(code) {
			t.Errorf("%s: %d %s", code, a.status, a.body)
		}
	}
}

// The two 402s are answers that the operations declare.
func TestPaymentRequired(t *testing.T) {
	r := newRig(t)
	r.fake.creates()
	for _, fail := range []*apierr.Error{apierr.New(apierr.PlanLimit, "no").PaymentRequired(), apierr.New(apierr.SpendLimit, "no")} {
		r.fake.fail = fail
		for _, c := range [][3]string{{"POST", "/v1/sessions", `{"proxy":true}`}, {"PATCH", sessionPath(""), `{"proxy":true}`}, {"POST", sessionPath("/exec"), `{"command":"x"}`}} {
			if a := r.do(c[0], c[1], c[2]); a.status != 402 || a.code() != string(fail.Code) {
				t.Errorf("%s %s: %d %s", c[0], c[1], a.status, a.body)
			}
		}
	}
	r.fake.fail = apierr.New(apierr.PlanLimit, "timeout")
	if a := r.do("PATCH", sessionPath(""), `{"timeout":900}`); a.status != 403 {
		t.Errorf("a limit of the plan: %d %s", a.status, a.body)
	}
}
