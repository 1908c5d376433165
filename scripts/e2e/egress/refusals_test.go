package egress

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/proxylink"
)

// refusals are the reasons that can be provoked from inside a machine, by the
// site that meets each.
var refusals = map[string]string{
	"https://restricted.test":    "target_restricted",
	"http://mail.test:25":        "port_blocked",
	"http://private.test":        "proxy_not_public",
	"https://stranger.test":      "proxy_auth_failed",
	"http://stranger.test":       "proxy_auth_failed",
	"http://datacenter.test":     "proxy_type_unavailable",
	"https://silent.test":        "upstream_timeout",
	"https://closed.test":        "upstream_unreachable",
	"https://broken.test":        "upstream_error",
	"http://10.255.0.1":          "bad_target",
	"http://[::ffff:10.255.0.1]": "bad_target",
	"https://socks-only.test":    "upstream_error",
}

func TestEveryRefusalTellsItsReason(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid := startSquid(t, web.WebHost)
	providers.residential.leadTo(web.Addr, func(target string) string {
		if strings.HasPrefix(target, "restricted.test") {
			return "HTTP/1.1 403 Forbidden\r\nX-Error: site NOT SERVED here\r\nContent-Length: 0\r\n\r\n"
		}
		return ""
	})
	defer providers.residential.leadTo("", nil)
	answers := map[int]string{4001: "", 4002: "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n", 4003: "\x05\xff"}
	for port, answer := range answers {
		answering(t, web, port, answer)
	}
	custom := func(pattern string, port int) testenv.Fields {
		return testenv.Fields{"type": "custom", "server": fmt.Sprintf("http://%s:%d", web.Addr, port), "domainPattern": pattern}
	}
	wrong := squid.rule(testenv.Fields{"domainPattern": "stranger"})
	wrong["password"] = "not that"
	s := c.Create(testenv.Fields{"browser": false, "shell": true, "proxy": list{
		testenv.Fields{"type": "residential", "scope": "all", "domainPattern": "restricted"},
		squid.rule(testenv.Fields{"domainPattern": "mail"}),
		testenv.Fields{"type": "custom", "server": "http://10.255.0.1:3128", "domainPattern": "private"},
		wrong,
		testenv.Fields{"type": "datacenter", "domainPattern": "datacenter"},
		custom("silent", 4001), custom("broken", 4002), custom("socks-only", 4003), custom("closed", 4004),
	}})
	before := refused(t, env)
	var script strings.Builder // all at once: one of them takes as long as proxyd waits for a proxy
	for url := range refusals {
		fmt.Fprintf(&script, "(curl -sSki --max-time 60 %[1]q 2>&1 | sed \"s|^|%[1]s |\") &\n", url)
	}
	got := c.ExecWith(s.Id, testenv.Fields{"command": script.String() + "wait", "timeoutMs": 80_000}).Stdout
	for url, reason := range refusals {
		if !strings.Contains(strings.ToLower(got), url+" x-service-proxy-error: "+reason) {
			t.Errorf("%s: want %s", url, reason)
		}
	}
	if t.Failed() {
		t.Log(got)
	}
	crowd(t, c, web, s)
	want := append(slices.Collect(maps.Values(refusals)), "too_many_connections")
	tellsOf(t, c, s.Id, before, want...)
}

// tellsOf waits until a session's events have all the reasons, and wants every
// one of them counted by a proxyd and by a host since before.
func tellsOf(t *testing.T, c *testenv.Client, id string, before map[string]float64, reason ...string) {
	t.Helper()
	testenv.Wait(t, 20*time.Second, fmt.Sprintf("the events tell of %s", reason), func() bool {
		told := reasons(t, c, id)
		return !slices.ContainsFunc(reason, func(r string) bool { return !slices.Contains(told, r) })
	})
	now := refused(t, c.Env)
	for _, r := range reason {
		for _, metric := range []string{"berth_proxyd_refusals_total", "berth_hostd_refusals_total"} {
			if name := fmt.Sprintf("%s{reason=%q}", metric, r); now[name] <= before[name] {
				t.Errorf("%s was %v and is %v", name, before[name], now[name])
			}
		}
	}
}

// refused is what all daemons of a stack count as refused, added up.
func refused(t *testing.T, env *testenv.Env) map[string]float64 {
	t.Helper()
	sum := map[string]float64{}
	for _, daemon := range env.Egress() {
		for line := range strings.Lines(env.Metrics(t, daemon)) {
			name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
			if n, err := strconv.ParseFloat(value, 64); err == nil && strings.Contains(name, "_refusals_total{") {
				sum[name] += n
			}
		}
	}
	return sum
}

// A gateway that knows more kinds of proxies than a proxyd does, as in the middle
// of an upgrade, makes rules that this proxyd cannot follow. No rule that the API
// takes is one of those, so that gateway is played here: it seals its pass with
// the cluster's secret and orders the host to show it.
func TestRuleOfANewerGateway(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	s := c.Create(testenv.Fields{"shell": true, "proxy": list{testenv.Fields{"type": "none", "scope": "all"}}})
	before := refused(t, env)
	order(t, env, s, proxylink.Route{Rule: egress.Rule{Type: "satellite", DomainPattern: `one\.test`}})
	for _, url := range []string{web.at("one.test", "/from"), "https://one.test/"} {
		if got := c.Output(s.Id, "curl -ski --max-time 60 "+url+" || true"); !strings.Contains(got, "X-Service-Proxy-Error: bad_route") {
			t.Errorf("%s: %q", url, got)
		}
	}
	if got := goTo(t, s, web.at("one.test", "/from")); !strings.Contains(got, "satellite") {
		t.Errorf("Chrome shows %q", got)
	}
	if got := fetch(c, s.Id, web.at(web.Addr, "/from")); got == "" {
		t.Error("a site that the rule is not for is not served either")
	}
	tellsOf(t, c, s.Id, before, "bad_route")
}

// order gives a session's host a pass with other routes, as a gateway does.
func order(t *testing.T, env *testenv.Env, s api.Session, routes ...proxylink.Route) {
	t.Helper()
	ctx := within(t, time.Minute)
	for _, link := range env.HostLinks(t) {
		inventory, err := link.Inventory(ctx)
		if err != nil {
			t.Fatal(err)
		}
		i := slices.IndexFunc(inventory.Sessions, func(st hostlink.Status) bool { return st.SessionID == s.Id })
		if i < 0 {
			continue
		}
		st := inventory.Sessions[i]
		set := hostlink.Settings{Version: st.Version + 1, KeepAlive: s.KeepAlive, ExpiresAt: s.ExpiresAt, PassEpoch: st.Epoch,
			PassExpires: time.Now().Add(time.Hour), ShellProxy: true}
		set.Pass, err = proxylink.SealPass(env.Secret(t), proxylink.Pass{SessionID: s.Id, ProjectID: s.ProjectId, Epoch: st.Epoch,
			Version: set.Version, Expires: set.PassExpires, Routes: routes})
		if err == nil {
			st, err = link.Patch(ctx, s.Id, set)
		}
		if err != nil || st.Version != set.Version {
			t.Fatalf("the host has version %d: %v", st.Version, err)
		}
		return
	}
	t.Fatalf("no host has session %s", s.Id)
}

// An operator who replaces the cluster's secret makes all passes void, until the
// next change of each session gives it one that holds.
func TestPassOfAnOlderSecret(t *testing.T) {
	env := testenv.Start(t, testenv.Options{Pool: "browser=0,shell=0,both=1"})
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	s := c.Create(testenv.Fields{"shell": true, "proxy": list{testenv.Fields{"type": "none", "scope": "all"}}})
	direct := web.at(web.Addr, "/from")
	if got := fetch(c, s.Id, direct); got == "" {
		t.Fatal("nothing goes out at first")
	}
	daemons := []string{testenv.Gateway, testenv.Hostd, testenv.Proxyd}
	for _, daemon := range daemons {
		env.Kill9(t, daemon)
	}
	env.NewSecret(t)
	env.Restart(t, daemons...)
	before, asked := refused(t, env), web.requests.Load()
	for _, url := range []string{direct, fmt.Sprintf("https://%s:%d/from", web.Addr, web.tls)} {
		if got := c.Output(s.Id, "curl -ski --max-time 60 "+url+" || true"); !strings.Contains(got, "X-Service-Proxy-Error: token_invalid") {
			t.Errorf("%s: %q", url, got)
		}
	}
	if got := goTo(t, s, direct); !strings.Contains(got, "pass") {
		t.Errorf("Chrome shows %q", got)
	}
	if web.requests.Load() != asked {
		t.Error("the site got a request all the same")
	}
	tellsOf(t, c, s.Id, before, "token_invalid")
	setProxy(c, s.Id, list{testenv.Fields{"type": "none", "scope": "all", "domainPattern": "x"}})
	if got := fetch(c, s.Id, direct); got == "" {
		t.Error("after a change nothing goes out")
	}
	if got := goTo(t, c.Get(s.Id), direct+"/again"); got == "" {
		t.Error("after a change Chrome gets nothing")
	}
}

// crowd opens as many connections as a session may have, and one more.
func crowd(t *testing.T, c *testenv.Client, web *site, s api.Session) {
	t.Helper()
	got := c.ExecWith(s.Id, testenv.Fields{"timeoutMs": 80_000, "command": fmt.Sprintf(`cat > crowd.py <<'END'
import socket, time
def connect():
    s = socket.create_connection(("169.254.77.1", 78), 60)
    s.sendall(b"CONNECT %s:7 HTTP/1.1\r\n\r\n")
    return s, s.recv(4096)
kept = [connect() for _ in range(512)]
print(sum(a.startswith(b"HTTP/1.1 200") for _, a in kept))
print(connect()[1].decode())
kept[0][0].close()
until = time.time() + 20
while time.time() < until:
    if connect()[1].startswith(b"HTTP/1.1 200"):
        print("room again")
        break
    time.sleep(0.05)
END
python3 crowd.py`, web.Addr)})
	if !strings.HasPrefix(got.Stdout, "512\n") || !strings.Contains(got.Stdout, "X-Service-Proxy-Error: too_many_connections") || !strings.Contains(got.Stdout, "room again") {
		t.Errorf("a crowd: %+v", got)
	}
}
