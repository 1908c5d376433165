package egress

import (
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/apierr"
)

var both = []string{testenv.ProxydName(0), testenv.ProxydName(1)}

// Without any proxyd no browser is created and nothing goes out unproxied; shells
// alone work, and all does again when one is back.
func TestNoProxyd(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid := startSquid(t, web.WebHost)
	s := c.Create(testenv.Fields{"browser": false, "shell": true, "proxy": squid.rule(testenv.Fields{"scope": "all"})})
	for _, p := range both {
		env.Kill9(t, p)
	}
	for what, fields := range map[string]testenv.Fields{
		"a browser":              {},
		"a browser and a shell":  {"shell": true},
		"a browser with a proxy": {"proxy": squid.rule(nil)},
		"a shell of scope all":   {"browser": false, "shell": true, "proxy": squid.rule(testenv.Fields{"scope": "all"})},
	} {
		testenv.Wait(t, 20*time.Second, what+" is refused", func() bool {
			a := c.Do(http.MethodPost, "/v1/sessions", fields)
			return a.Status == http.StatusServiceUnavailable && a.Code() == apierr.ProxyUnavailable && a.Header.Get("Retry-After") != ""
		})
	}
	if got := c.Output(c.Shell().Id, "echo works"); got != "works" {
		t.Errorf("a shell alone: %q", got)
	}
	before := web.requests.Load()
	if got := c.Exec(s.Id, fmt.Sprintf("curl -sS --max-time 3 %s", web.at("one.test", "/from"))); *got.ExitCode == 0 || web.requests.Load() != before {
		t.Errorf("with no proxyd curl got %+v", got)
	}
	c.Output(s.Id, fmt.Sprintf("(curl -sS --retry 30 --retry-all-errors --retry-delay 1 %s > waited) >/dev/null 2>&1 &", web.at("two.test", "/from")))
	env.Restart(t, both...)
	testenv.Wait(t, 40*time.Second, "what waited gets through", func() bool {
		return strings.HasPrefix(c.Output(s.Id, "cat waited"), web.Addr+":")
	})
	again := c.Create(testenv.Fields{"proxy": squid.rule(nil)})
	if got := goTo(t, again, web.at("three.test", "/from")); !strings.HasPrefix(got, web.Addr+":") {
		t.Errorf("a browser afterwards: %q", got)
	}
}

// With one of two proxyds dead new connections go through the other at once.
func TestOneProxydOfTwoDies(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid := startSquid(t, web.WebHost)
	s := c.Create(testenv.Fields{"shell": true, "proxy": squid.rule(testenv.Fields{"scope": "all"})})
	for i, p := range both {
		env.Kill9(t, p)
		for k := range 3 {
			for _, url := range []string{web.at("one.test", "/from"), fmt.Sprintf("https://one.test:%d/from", web.tls)} {
				if got := fetch(c, s.Id, url); !strings.HasPrefix(got, web.Addr+":") {
					t.Errorf("without %s, %s: %q", p, url, got)
				}
			}
			if got := goTo(t, s, web.at("two.test", fmt.Sprintf("/from?%d-%d", i, k))); !strings.HasPrefix(got, web.Addr+":") {
				t.Errorf("without %s, Chrome: %q", p, got)
			}
		}
		testenv.Wait(t, 20*time.Second, "squid served all of it", func() bool { return squid.served("one.test") == 6*(i+1) })
		env.Restart(t, p)
	}
}

// A proxyd that is told to stop lets what is open end, and takes nothing new.
func TestDrainLetsADownloadEnd(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid := startSquid(t, web.WebHost)
	s := c.Create(testenv.Fields{"browser": false, "shell": true, "proxy": squid.rule(testenv.Fields{"scope": "all"})})
	c.Output(s.Id, fmt.Sprintf("(curl -sSk --max-time 120 https://one.test:%d/gate | wc -c > got) >/dev/null 2>&1 &", web.tls))
	arrive(t, web)
	carrier := both[1]
	if env.ProxydCounts(t, s.Id).Open > 0 {
		carrier = both[0]
	}
	env.Signal(t, carrier, syscall.SIGTERM)
	for range 5 {
		if got := fetch(c, s.Id, web.at("two.test", "/from")); !strings.HasPrefix(got, web.Addr+":") {
			t.Errorf("while %s drains: %q", carrier, got)
		}
	}
	web.gate <- struct{}{}
	env.AwaitEnd(t, carrier)
	testenv.Wait(t, 30*time.Second, "the download ends", func() bool { return c.Output(s.Id, "cat got") != "" })
	if got := c.Output(s.Id, "cat got"); got != fmt.Sprint(2*half) {
		t.Errorf("the download got %s bytes", got)
	}
	env.Restart(t, carrier)
}
