package sessions

import (
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

// Without a proxyd nothing with a browser begins, nor a shell that is to go
// through proxies; what needs none does.
func TestCreatesWithoutAProxyd(t *testing.T) {
	r := newRig(t)
	everywhere := &egress.Setting{Rules: []egress.Rule{{Type: egress.Custom, Server: "http://192.0.2.1:3128", Scope: egress.ScopeAll}}}
	made := request()
	made.IdempotencyKey = "k"
	before, _, err := r.use.Create(t.Context(), r.caller, made)
	if err != nil {
		t.Fatal(err)
	}
	region := before.Session.Region
	r.proxyds.away.Store(region, true)
	for name, c := range map[string]struct {
		kind  session.Kind
		proxy *egress.Setting
		away  bool
	}{
		"browser":           {session.Browser, nil, true},
		"both":              {session.Both, nil, true},
		"shell":             {session.Shell, nil, false},
		"shell, scope all":  {session.Shell, everywhere, true},
		"shell, other sope": {session.Shell, &egress.Setting{Rules: []egress.Rule{{Type: egress.Custom, Server: "http://192.0.2.1:3128"}}}, false},
	} {
		req := request()
		req.Kind, req.Proxy = c.kind, c.proxy
		v, _, err := r.use.Create(t.Context(), r.caller, req)
		if c.away != apierr.Is(err, apierr.ProxyUnavailable) || !c.away && err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if e := apierr.From(err); c.away && (e.Status() != 503 || e.RetryAfter <= 0) {
			t.Errorf("%s: %d, retry after %s", name, e.Status(), e.RetryAfter)
		}
		if err == nil {
			if _, err := r.use.Release(t.Context(), r.caller, v.Session.ID); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := r.record.View().Running("p"); n != 1 {
		t.Errorf("%d sessions are left of refused creates", n-1)
	}
	if again, existing, err := r.use.Create(t.Context(), r.caller, made); err != nil || !existing || again.Session.ID != before.Session.ID {
		t.Errorf("what was made with an idempotency key: %v", err)
	}
	r.proxyds.away.Delete(region)
	if _, _, err := r.use.Create(t.Context(), r.caller, request()); err != nil {
		t.Errorf("once it is back: %v", err)
	}
}

// A host in a region without a proxyd is passed over.
func TestCreatesGoWhereAProxydIs(t *testing.T) {
	r := newRig(t)
	second := newFakeHost(t, "h2")
	r.hosts.mu.Lock()
	r.hosts.hosts["h2"], r.hosts.region["h2"] = second, "there"
	r.hosts.mu.Unlock()
	const first = "local" // h1's; a list of fake hosts has no order
	r.proxyds.away.Store(first, true)
	v, _, err := r.use.Create(t.Context(), r.caller, request())
	if err != nil || v.Session.Host != "h2" {
		t.Fatalf("%+v, %v", v.Session, err)
	}
	strict := request()
	strict.Region, strict.StrictRegion = first, true
	if _, _, err := r.use.Create(t.Context(), r.caller, strict); !apierr.Is(err, apierr.ProxyUnavailable) {
		t.Errorf("in that region alone: %v", err)
	}
}

// What a session shows to have cost includes its proxy data.
func TestSessionsShowTheCostOfProxyData(t *testing.T) {
	r := newRig(t)
	price := session.Nanos(2_000_000_000)
	r.use.cfg.Rates.Prices.DatacenterPerGB = &price
	v, _, err := r.use.Create(t.Context(), r.caller, request())
	if err != nil {
		t.Fatal(err)
	}
	row := proxylink.Row{SessionID: v.Session.ID, ProjectID: "p", Type: egress.Datacenter, Hour: time.Now().Unix() / 3600, Incarnation: "i", Up: 1e9, Down: 5e8}
	if err := r.record.RecordUsage(t.Context(), []proxylink.Row{row}); err != nil {
		t.Fatal(err)
	}
	shown, err := r.use.Release(t.Context(), r.caller, v.Session.ID)
	if err != nil {
		t.Fatal(err)
	}
	if running := session.Cost(session.Browser, shown.Used, session.DefaultSizes, session.DefaultPrices); shown.Cost != running+3_000_000_000 {
		t.Errorf("it cost %s, of which %s are for its time", shown.Cost, running)
	}
}
