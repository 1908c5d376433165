package egress

import (
	"fmt"
	"math"
	"net/http"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
)

// What a project is shown as proxy data is what the proxies saw, to the byte,
// while proxyds are killed and the session is paused.
func TestUsageIsWhatTheProxiesSaw(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	own := startUpstream(web.Listen(t, 4010))
	t.Cleanup(own.stop)
	homes := providers.residential
	own.leadTo(web.Addr, nil)
	homes.leadTo(web.Addr, nil)
	s := c.Create(testenv.Fields{"browser": false, "shell": true, "timeout": 1800, "proxy": list{
		testenv.Fields{"type": "residential", "scope": "all", "domainPattern": "one"},
		testenv.Fields{"type": "custom", "server": fmt.Sprintf("http://%s:4010", web.Addr), "username": user, "password": password, "domainPattern": "two"},
	}})
	saw := func(u *upstream) int64 { return u.up.Load() + u.down.Load() }
	at := saw(homes) // of other tests
	var late int64   // what the site said to a connection whose proxyd was dead
	agrees := func(when string) {
		t.Helper()
		for deadline := time.Now().Add(30 * time.Second); ; time.Sleep(100 * time.Millisecond) {
			residential, custom := proxyData(c)
			if residential == saw(homes)-at && custom == saw(own)-late {
				return
			}
			if time.Now().After(deadline) {
				t.Fatalf("%s: usage has %d and %d bytes, the proxies saw %d and %d", when, residential, custom, saw(homes)-at, saw(own)-late)
			}
		}
	}
	traffic := func() {
		t.Helper()
		for _, site := range []string{"one.test", "two.test", web.Addr} {
			c.Output(s.Id, fmt.Sprintf(`set -e; for p in http://%[1]s:%[2]d https://%[1]s:%[3]d; do
curl -sSk -o a $p/bytes/700001 -o b $p/bytes/13; curl -sSk -o /dev/null --data-binary @a $p/upload; curl -sSk -o /dev/null $p/missing; done
test $(curl -sSk --data-binary @a $p/upload) = 700001`, site, web.http, web.tls))
		}
	}
	traffic()
	agrees("at first")
	if residential, custom := proxyData(c); residential < 2*700_000 || custom < 2*700_000 {
		t.Fatalf("only %d and %d bytes", residential, custom)
	}
	for _, p := range both {
		env.Kill9(t, p)
	}
	env.Restart(t, both...)
	agrees("after kill -9 of both")
	traffic()
	agrees("after their restart")

	// What an open download has carried is told while it is open.
	c.Output(s.Id, fmt.Sprintf("(curl -sSk --max-time 120 https://two.test:%d/gate | wc -c > got) >/dev/null 2>&1 &", web.tls))
	arrive(t, web)
	testenv.Wait(t, 30*time.Second, "half of it went through the proxy", func() bool { _, custom := proxyData(c); return custom > 3*half })
	agrees("in an open download")
	_, before := proxyData(c)
	for _, p := range both {
		env.Kill9(t, p)
	}
	testenv.Wait(t, 10*time.Second, "the download is cut", own.idle)
	late = saw(own) - before
	env.Restart(t, both...)
	agrees("after kill -9 in a download")

	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/pause", nil, nil)
	agrees("paused")
	if use, shown := usage(c), c.Get(s.Id); math.Abs(use.CostUsd-shown.Usage.CostUsd) > 1e-12 || use.CostUsd <= use.Proxy.CostUsd {
		t.Errorf("the project cost %v (%v of it proxy data), its session %v", use.CostUsd, use.Proxy.CostUsd, shown.Usage.CostUsd)
	}
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/resume", nil, nil)
	traffic()
	agrees("resumed")
	c.Release(s.Id)
	agrees("at the end")
	if use, shown := usage(c), c.Get(s.Id); math.Abs(use.CostUsd-shown.Usage.CostUsd) > 1e-12 {
		t.Errorf("at the end the project cost %v, its session %v", use.CostUsd, shown.Usage.CostUsd)
	}
}

func usage(c *testenv.Client) (u api.Usage) {
	c.Want(http.StatusOK, http.MethodGet, "/v1/usage", nil, &u)
	return u
}

// proxyData is the project's, in bytes.
func proxyData(c *testenv.Client) (residential, custom int64) {
	u := usage(c).Proxy
	return int64(math.Round(u.ResidentialGb * 1e9)), int64(math.Round(u.CustomGb * 1e9))
}
