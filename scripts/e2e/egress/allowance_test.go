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
	none := env.Client(t, "None")
	for _, proxy := range []any{true, list{own, platform}} {
		if a := none.Refused(apierr.PlanLimit, "", http.MethodPost, "/v1/sessions", shell(proxy)); a.Status != http.StatusPaymentRequired {
			t.Errorf("a plan without proxies answered %d", a.Status)
		}
	}

	runs, sleeps, without := c.Create(shell(platform)), c.Create(shell(platform)), c.Shell()
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+sleeps.Id+"/pause", nil, nil)
	c.Output(runs.Id, "curl -sS -o /dev/null "+web.at("one.test", "/bytes/1100000"))
	testenv.Wait(t, 20*time.Second, "the record has heard of it", func() bool { residential, _ := proxyData(c); return residential > 1_100_000 })
	for what, try := range map[string]func() testenv.Answer{
		"create": func() testenv.Answer {
			return c.Refused(apierr.SpendLimit, "", http.MethodPost, "/v1/sessions", shell(list{own, platform}))
		},
		"PATCH": func() testenv.Answer {
			return c.Refused(apierr.SpendLimit, "", http.MethodPatch, "/v1/sessions/"+without.Id, testenv.Fields{"proxy": true})
		},
		"resume": func() testenv.Answer {
			return c.Refused(apierr.SpendLimit, "", http.MethodPost, "/v1/sessions/"+sleeps.Id+"/resume", nil)
		},
		"resuming by exec": func() testenv.Answer {
			return c.Refused(apierr.SpendLimit, "", http.MethodPost, "/v1/sessions/"+sleeps.Id+"/exec", testenv.Fields{"command": "true"})
		},
	} {
		if a := try(); a.Status != http.StatusPaymentRequired {
			t.Errorf("%s answered %d", what, a.Status)
		}
	}
	if got := fetch(c, runs.Id, web.at("one.test", "/from")); got == "" {
		t.Error("what runs was cut off")
	}
	setProxy(c, without.Id, own)
	setProxy(c, sleeps.Id, own)
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+sleeps.Id+"/resume", nil, nil)
}
