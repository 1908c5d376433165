package egress

import (
	"fmt"
	"net/http"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/apierr"
)

// Once a month's data is used up, nothing that leads through the platform's
// proxies is set up or goes on after a pause; what runs, and a proxy of one's own,
// does. A plan without any never has it.
func TestAllowance(t *testing.T) {
	tariff := t.TempDir() + "/tariff.json"
	write(t, tariff, `{"plans": [{"name": "Megabyte", "concurrentSessions": 9, "maxTimeoutSeconds": 3600, "proxyGbPerMonth": 0.001},
		{"name": "None", "concurrentSessions": 9, "maxTimeoutSeconds": 3600, "proxyGbPerMonth": 0}]}`)
	env := testenv.Start(t, testenv.Options{Pool: "browser=0,shell=2,both=0", Gateway: []string{"--tariff", tariff}, Proxyd: []string{"--providers", providers.file}})
	c := env.Client(t, "Megabyte")
	web := newSite(t, env)
	providers.residential.leadTo(web.Addr, nil)
	defer providers.residential.leadTo("", nil)
	own := testenv.Fields{"type": "custom", "server": fmt.Sprintf("http://%s:4010", web.Addr)}
	platform := testenv.Fields{"type": "residential", "scope": "all"}
	shell := func(proxy any) testenv.Fields {
		return testenv.Fields{"browser": false, "shell": true, "proxy": proxy}
	}
	refused := func(what string, c *testenv.Client, code apierr.Code, method, path string, body any) {
		t.Helper()
		if a := c.Do(method, path, body); a.Status != http.StatusPaymentRequired || a.Code() != code {
			t.Errorf("%s: got %d %s, want 402 %s", what, a.Status, a.Body, code)
		}
	}
	none := env.Client(t, "None")
	for _, proxy := range []any{true, list{own, platform}} {
		refused("a plan without proxies", none, apierr.PlanLimit, http.MethodPost, "/v1/sessions", shell(proxy))
	}

	runs, sleeps, without := c.Create(shell(platform)), c.Create(shell(platform)), c.Shell()
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+sleeps.Id+"/pause", nil, nil)
	c.Output(runs.Id, "curl -sS -o /dev/null "+web.at("one.test", "/bytes/1100000"))
	testenv.Wait(t, 20*time.Second, "the record has heard of it", func() bool { residential, _ := proxyData(c); return residential > 1_100_000 })
	refused("create", c, apierr.SpendLimit, http.MethodPost, "/v1/sessions", shell(list{own, platform}))
	refused("PATCH", c, apierr.SpendLimit, http.MethodPatch, "/v1/sessions/"+without.Id, testenv.Fields{"proxy": true})
	refused("resume", c, apierr.SpendLimit, http.MethodPost, "/v1/sessions/"+sleeps.Id+"/resume", nil)
	refused("resuming by exec", c, apierr.SpendLimit, http.MethodPost, "/v1/sessions/"+sleeps.Id+"/exec", testenv.Fields{"command": "true"})
	if got := fetch(c, runs.Id, web.at("one.test", "/from")); got == "" {
		t.Error("what runs was cut off")
	}
	setProxy(c, without.Id, own)
	setProxy(c, sleeps.Id, own)
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+sleeps.Id+"/resume", nil, nil)
}
