package accounts

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
)

func TestCheckProxy(t *testing.T) {
	plans := map[string]placement.Plan{}
	for _, p := range DefaultPlans() {
		plans[p.Name] = p
	}
	half := 0.5
	plans["Half"] = placement.Plan{Name: "Half", ProxyGBPerMonth: &half}
	for _, c := range []struct {
		plan    string
		used    int64
		setting string
		code    apierr.Code
	}{
		{"Free", 0, `true`, apierr.PlanLimit},
		{"Free", 0, `{"type":"datacenter"}`, apierr.PlanLimit},
		{"Free", 0, `[{"type":"custom","server":"http://a:1"},{"type":"residential"}]`, apierr.PlanLimit},
		{"Free", 0, `[{"type":"custom","server":"http://a:1"},{"type":"none"}]`, ""},
		{"Free", 9e18, `{"type":"custom","server":"http://a:1"}`, ""},
		{"Free", 9e18, `null`, ""},
		{"Hobby", 0, `true`, ""},
		{"Hobby", 4_999_999_999, `true`, ""},
		{"Hobby", 5_000_000_000, `true`, apierr.SpendLimit},
		{"Hobby", 9e18, `[{"type":"none"},{"type":"datacenter"}]`, apierr.SpendLimit},
		{"Hobby", 9e18, `[{"type":"none"}]`, ""},
		{"Hobby", 9e18, `{"type":"custom","server":"http://a:1"}`, ""},
		{"Half", 499_999_999, `true`, ""},
		{"Half", 500_000_000, `true`, apierr.SpendLimit},
		{"Scale", 9e18, `true`, ""},
	} {
		s, err := egress.ParseSetting(json.RawMessage(c.setting), egress.Sticky)
		if err != nil {
			t.Fatal(err)
		}
		err = CheckProxy(plans[c.plan], c.used, s)
		if (err != nil) != (c.code != "") || err != nil && (!apierr.Is(err, c.code) || apierr.From(err).Status() != 402 || !strings.HasPrefix(apierr.From(err).Message, "proxy: ")) {
			t.Errorf("%s with %d bytes, %s: %v, want %q", c.plan, c.used, c.setting, err, c.code)
		}
	}
}
