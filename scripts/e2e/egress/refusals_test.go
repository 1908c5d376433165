package egress

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
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
	testenv.Wait(t, 20*time.Second, "the events tell of all refusals", func() bool {
		told := reasons(t, c, s.Id)
		return !slices.ContainsFunc(want, func(r string) bool { return !slices.Contains(told, r) })
	})
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
