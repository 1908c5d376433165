package egress

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
)

// A list sends each site where its first matching rule says, in the shell and in
// Chrome, and follows a change at once.
func TestRulesDecideForEachSite(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid, tiny := startSquid(t, web.WebHost), startTinyproxy(t, web.WebHost)
	providers.residential.leadTo(web.Addr, nil)
	straight := strings.ReplaceAll(web.Addr, ".", `\.`)
	s := c.Create(testenv.Fields{"shell": true, "proxy": list{
		squid.rule(testenv.Fields{"domainPattern": `^ONE\.`, "scope": "all"}),
		testenv.Fields{"type": "none", "domainPattern": "^" + straight + "$"},
		tiny.rule(testenv.Fields{"domainPattern": "^((one|two)\\.|" + straight + ")"}),
		testenv.Fields{"type": "residential", "country": "de", "domainPattern": "three"},
	}})
	chrome := func(url string) string { return goTo(t, s, url) }
	shell := func(url string) string { return fetch(c, s.Id, url) }
	for name, get := range map[string]func(string) string{"Chrome": chrome, "curl": shell} {
		for site, p := range map[string]proxy{"one.test": squid, "two.test": tiny} {
			if got := get(web.at(site, "/from/"+name)); !strings.HasPrefix(got, web.Addr+":") {
				t.Errorf("%s: %s saw %q", name, site, got)
			}
			p.serves(t, site+":8080/from/"+name)
		}
		if got := get(web.at(web.Addr, "/from/"+name)); strings.HasPrefix(got, web.Addr+":") {
			t.Errorf("%s: the site of a none rule saw %q", name, got)
		}
		if get(web.at("three.test", "/from/"+name)); !strings.HasPrefix(providers.residential.lastLogin(t, "three.test"), "cust-country-de-session-") {
			t.Errorf("%s: the provider saw %v", name, providers.residential.logins(""))
		}
	}
	other := env.AllowedWeb(t) // no rule is for it
	if got := shell("http://" + other.Addr + "/"); !strings.Contains(got, ">"+other.Host+":") {
		t.Errorf("a site without a rule saw %q", got)
	}

	setProxy(c, s.Id, list{tiny.rule(testenv.Fields{"scope": "all", "domainPattern": "one"}), squid.rule(nil)})
	shell(web.at("one.test", "/from/later"))
	tiny.serves(t, "one.test:8080/from/later")
	shell(web.at("two.test", "/from/later"))
	squid.serves(t, "two.test:8080/from/later")
	testenv.Wait(t, 20*time.Second, "Chrome, which keeps connections, follows the change", func() bool {
		chrome(web.at("one.test", "/from/Chrome-later"))
		return tiny.served("one.test:8080/from/Chrome-later") > 0
	})
	chrome(web.at("two.test", "/from/Chrome-later"))
	squid.serves(t, "two.test:8080/from/Chrome-later")
	if tiny.served("two.test:8080/from/later") > 0 || squid.served("one.test:8080/from/later") > 0 {
		t.Error("after the change both proxies served the same site")
	}
	a := c.Do(http.MethodGet, "/v1/sessions/"+s.Id, nil)
	if got := string(a.Body); strings.Contains(got, password) || !strings.Contains(got, `"username":"alice"`) {
		t.Errorf("the session is shown as %s", got)
	}
}

// A sticky address stays through changes of other rules, pause, resume and move,
// and goes with a rotate; a rotating one is new for each connection.
func TestStickyAddresses(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	u := providers.residential
	u.leadTo(web.Addr, nil)
	sticky := testenv.Fields{"type": "residential", "country": "US", "scope": "all", "domainPattern": "one"}
	german := testenv.Fields{"type": "residential", "country": "DE", "domainPattern": "two"}
	rotating := testenv.Fields{"type": "residential", "country": "US", "ip": "rotating", "domainPattern": "three"}
	s := c.Create(testenv.Fields{"browser": false, "shell": true, "proxy": list{sticky, german, rotating}})
	ask := func(site string) string {
		t.Helper()
		if got := fetch(c, s.Id, web.at(site, "/from")); got == "" {
			t.Errorf("%s says nothing", site)
		}
		return u.lastLogin(t, site)
	}
	one, two := ask("one.test"), ask("two.test")
	if one == two || !strings.HasPrefix(one, "cust-country-us-session-") || !strings.HasPrefix(two, "cust-country-de-session-") {
		t.Errorf("logins %q and %q", one, two)
	}
	same := func(when string) {
		t.Helper()
		if a, b := ask("one.test"), ask("two.test"); a != one || b != two {
			t.Errorf("%s: %s became %s, %s became %s", when, one, a, two, b)
		}
	}
	same("the next connections")
	setProxy(c, s.Id, list{rotating, sticky, german})
	same("after a change of the order")
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/pause", nil, nil)
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/resume", nil, nil)
	same("after pause and resume")
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/move", testenv.Fields{}, nil)
	same("after a move")
	var turned api.Session
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/proxy/rotate", nil, &turned)
	if a, b := ask("one.test"), ask("two.test"); a == one || b == two {
		t.Errorf("after rotate: %s, %s as before", a, b)
	} else {
		one, two = a, b
	}
	same("after rotate, the next connections")
	for range 3 {
		ask("three.test")
	}
	if all := u.logins("three.test"); len(distinct(all)) != len(all) || len(all) < 3 || slices.Contains(all, one) {
		t.Errorf("rotating: %v", all)
	}
	if fmt.Sprint(turned.Proxy) == "" {
		t.Error("the answer of rotate shows no proxy")
	}
}

// Pages that a pause or a move opens again are fetched by the session's proxy:
// the site hears of nobody else.
func TestPagesComeBackThroughTheProxy(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid := startSquid(t, web.WebHost)
	s := c.Create(testenv.Fields{"keepAlive": true, "proxy": squid.rule(nil)})
	if got := goTo(t, s, web.at(web.Addr, "/from/here")); !strings.HasPrefix(got, web.Addr+":") {
		t.Fatalf("at first: %q", got)
	}
	again := func(what string) {
		t.Helper()
		before := squid.served("/from/here")
		if what == "resume" {
			c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/pause", nil, nil)
		}
		c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/"+what, testenv.Fields{}, nil)
		testenv.Wait(t, 60*time.Second, "the page is there again after "+what, func() bool { return squid.served("/from/here") > before })
	}
	again("resume")
	again("move")
	if n := web.strangers.Load(); n > 0 {
		t.Errorf("the site got %d requests by another way", n)
	}
}
