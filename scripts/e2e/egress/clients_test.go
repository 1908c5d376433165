package egress

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
)

// client is a program in a session's shell that fetches something.
type client struct {
	site    string // which it asks; the proxy's log names it
	command string // %s is where the site is
	want    string // in its output
}

var clients = []client{
	{"curl.test", "curl -sS --max-time 60 %s/bytes/1000 | wc -c", "1000"},
	{"wget.test", "wget -q -T 60 -O - %s/bytes/2000 | wc -c", "2000"},
	{"git.test", "rm -rf cloned; git clone -q %s/repo.git cloned && cat cloned/README", "hello from git"},
	{"pip.test", "rm -rf pipped; pip --disable-pip-version-check --no-cache-dir install -q --no-deps --target pipped --index-url %s/simple --trusted-host pip.test berthtest && cat pipped/berthtest.py", "hello from pip"},
	{"npm.test", "rm -rf npmmed; mkdir npmmed; cd npmmed; npm --silent --no-audit --no-fund --no-update-notifier --registry %s/ install berthtest && node -p 'require(\"berthtest\")'; cd ..", "hello from npm"},
	{"apt.test", "rm -rf apted; mkdir apted; cd apted; echo 'deb [trusted=yes] %s/apt ./' | sudo tee /etc/apt/sources.list >/dev/null; sudo rm -f /etc/apt/sources.list.d/*; " +
		"sudo apt-get -qq update && sudo apt-get -qq download berthtest && cat berthtest*.deb; cd ..", "hello from apt"},
}

// Every client in a session goes through the session's proxy and finds sites by
// names that only the proxy knows.
func TestEveryClientGoesThroughTheProxy(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid, tiny := startSquid(t, web.WebHost), startTinyproxy(t, web.WebHost)
	s := c.Create(testenv.Fields{"shell": true, "proxy": squid.rule(testenv.Fields{"scope": "all"})})
	c.Output(s.Id, "mkdir -p served; echo local > served/index.html; (cd served; python3 -m http.server 8123 >/dev/null 2>&1 &); for i in $(seq 100); do curl -s localhost:8123 >/dev/null && break; sleep 0.1; done")
	for name, p := range map[string]proxy{"squid": squid, "tinyproxy": tiny} {
		s = setProxy(c, s.Id, p.rule(testenv.Fields{"scope": "all"}))
		for _, x := range clients {
			got := c.ExecWith(s.Id, testenv.Fields{"command": fmt.Sprintf(x.command, fmt.Sprintf("http://%s:%d", x.site, web.http)), "timeoutMs": 80_000})
			if got.ExitCode == nil || *got.ExitCode != 0 || !strings.Contains(got.Stdout, x.want) {
				t.Errorf("%s through %s: %+v", x.site, name, got)
			}
			p.serves(t, x.site)
		}
		viaTunnels(t, c, web, p, s)
		for _, local := range []string{"localhost", "127.0.0.1"} {
			if got := fetch(c, s.Id, "http://"+local+":8123/"); got != "local" || p.served(local+":8123") > 0 {
				t.Errorf("%s: %q; %s served %d of it", local, got, name, p.served(local+":8123"))
			}
		}
	}
}

// viaTunnels asks with CONNECT, SOCKS5 and Chrome.
func viaTunnels(t *testing.T, c *testenv.Client, web *site, p proxy, s api.Session) {
	t.Helper()
	if got := fetch(c, s.Id, fmt.Sprintf("https://tls.test:%d/from", web.tls)); !strings.HasPrefix(got, web.Addr+":") {
		t.Errorf("through a tunnel: %q", got)
	}
	got := c.Output(s.Id, fmt.Sprintf("curl -sSk --max-time 60 --proxy socks5h://${HTTP_PROXY#http://} https://socks.test:%d/from", web.tls))
	if !strings.HasPrefix(got, web.Addr+":") {
		t.Errorf("through SOCKS5: %q", got)
	}
	if got := goTo(t, s, web.at("chrome.test", "/from")); !strings.HasPrefix(got, web.Addr+":") {
		t.Errorf("Chrome: %q", got)
	}
	for _, site := range []string{"tls.test", "socks.test"} {
		p.serves(t, site)
	}
	p.serves(t, "chrome.test:8080/from")
}

// What is scope browser's leaves the shell alone; a change is there for the next
// command and the next connection, and what runs goes on as it began.
func TestChangesOfALiveSession(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid, tiny := startSquid(t, web.WebHost), startTinyproxy(t, web.WebHost)
	s := c.Create(testenv.Fields{"shell": true, "proxy": squid.rule(nil)})
	direct, here := web.at(web.Addr, "/from"), "echo ${HTTP_PROXY-none} ${no_proxy-none}"
	if got := c.Output(s.Id, here); got != "none none" {
		t.Errorf("scope browser in the shell: %q", got)
	}
	if got := fetch(c, s.Id, direct); strings.HasPrefix(got, web.Addr+":") {
		t.Errorf("scope browser: the shell came from %s", got)
	}
	if got := goTo(t, s, direct); !strings.HasPrefix(got, web.Addr+":") {
		t.Errorf("scope browser: Chrome came from %s", got)
	}
	tty := openTerminal(t, env, s)
	tty.enter("echo began=${HTTP_PROXY-none}")
	tty.wait("began=none\r\n")

	s = setProxy(c, s.Id, squid.rule(testenv.Fields{"scope": "all"}))
	if got := c.Output(s.Id, here); !strings.HasPrefix(got, "http://169.254.77.1:78 localhost") {
		t.Errorf("scope all in the shell: %q", got)
	}
	if got := c.ExecWith(s.Id, testenv.Fields{"command": here, "shell": "another"}); !strings.HasPrefix(got.Stdout, "http://169.254.77.1:78") {
		t.Errorf("scope all in a new shell: %+v", got)
	}
	tty.enter("echo still=${HTTP_PROXY-none}")
	tty.wait("still=none\r\n")

	// A download under way while the proxy changes, and then goes.
	c.Output(s.Id, fmt.Sprintf("(curl -sS --max-time 120 %s | wc -c > got) >/dev/null 2>&1 &", web.at("one.test", "/gate")))
	arrive(t, web)
	setProxy(c, s.Id, tiny.rule(testenv.Fields{"scope": "all"}))
	if got := fetch(c, s.Id, web.at("two.test", "/from")); !strings.HasPrefix(got, web.Addr+":") {
		t.Errorf("after the change: %q", got)
	}
	tiny.serves(t, "two.test")
	setProxy(c, s.Id, nil)
	if got := c.Output(s.Id, here); got != "none none" {
		t.Errorf("no proxy: %q", got)
	}
	if got := fetch(c, s.Id, direct); strings.HasPrefix(got, web.Addr+":") {
		t.Errorf("no proxy: the shell came from %s", got)
	}
	testenv.Wait(t, 20*time.Second, "Chrome goes straight out", func() bool {
		return !strings.HasPrefix(goTo(t, s, direct+"/again"), web.Addr+":")
	})
	web.gate <- struct{}{}
	testenv.Wait(t, 30*time.Second, "the download that was open ends", func() bool { return c.Output(s.Id, "cat got") != "" })
	if got := c.Output(s.Id, "cat got"); got != fmt.Sprint(2*half) {
		t.Errorf("the download that was open got %s bytes", got)
	}
}

// arrive waits until a request of /gate is half answered.
func arrive(t *testing.T, web *site) {
	t.Helper()
	select {
	case <-web.arrived:
	case <-time.After(30 * time.Second):
		t.Fatal("the site got no request")
	}
}
