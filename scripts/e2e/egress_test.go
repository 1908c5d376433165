package e2e

import (
	"net"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
)

func TestChromeGoesThroughProxydOnly(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	open, closed := env.AllowedWeb(t), env.ClosedWeb(t)
	s, neighbour := c.Create(testenv.Fields{"shell": true}), c.Shell()
	cdp, p := testenv.FirstPage(t, *s.ConnectUrl)

	before := env.ProxydCounts(t, s.Id)
	if err := p.Goto(within(t, 20*time.Second), "http://"+open.Addr+"/"); err != nil {
		t.Fatal(err)
	}
	var from string
	if err := p.Evaluate(within(t, 10*time.Second), `document.querySelector("#from").textContent`, &from); err != nil || !strings.HasPrefix(from, open.Host+":") {
		t.Errorf("the web host saw %q (%v), want the host, where proxyd is, %s", from, err, open.Host)
	}
	if after := env.ProxydCounts(t, s.Id); after.Up <= before.Up || after.Down <= before.Down {
		t.Errorf("proxyd counted %+v, then %+v", before, after)
	}

	c.Output(neighbour.Id, "echo secret > index.html; (python3 -m http.server 8000 >/dev/null 2>&1 &); sleep 0.5")
	slot := env.FindProcess(t, "python3", "-m", "http.server", "8000").Slot
	own := c.Output(s.Id, "hostname -I | awk '{print $1}'")
	for _, target := range []string{
		closed.Addr, // a private network
		strings.TrimPrefix(env.BaseURL, "http://"),                    // the gateway: from inside, loopback is the machine's own
		open.Host + ":22", closed.Host, "169.254.169.254", "10.0.0.1", // the host, metadata, private
		env.SlotAddr(t, slot) + ":8000", // another session
		own + ":1",                      // itself from outside
		"[::1]:7101", "0.0.0.0:8080",
	} {
		requests, began := closed.Requests.Load(), time.Now()
		err := p.Goto(within(t, 20*time.Second), "http://"+target+"/")
		var text string
		_ = p.Evaluate(within(t, 10*time.Second), `document.body.innerText`, &text) // an error page has a body too
		if err == nil && !refusal(text) {
			t.Errorf("Chrome reached %s: %.200s", target, text)
		}
		if closed.Requests.Load() != requests {
			t.Errorf("%s: a private web host got a request", target)
		}
		if took := time.Since(began); took > 3*time.Second {
			t.Errorf("%s: refused only after %s", target, took)
		}
	}

	for _, server := range []string{"direct://", "http://" + open.Addr + ":80", ""} {
		params := map[string]any{"proxyServer": server}
		if err := cdp.Call(within(t, 10*time.Second), "", "Target.createBrowserContext", params, nil); err == nil && server != "" {
			t.Errorf("a browser context with proxyServer %q was made", server)
		}
	}
	var other struct{ BrowserContextID string }
	if err := cdp.Call(within(t, 10*time.Second), "", "Target.createBrowserContext", nil, &other); err != nil || other.BrowserContextID == "" {
		t.Errorf("a browser context without a proxy: %v", err)
	}
}

// refusal recognises proxyd's own answer on a page.
func refusal(text string) bool {
	return strings.Contains(text, "is not a public address") || strings.Contains(text, "ERR_")
}

func TestShellGoesOutDirectly(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	open, closed := env.AllowedWeb(t), env.ClosedWeb(t)
	s := c.Shell()
	before := env.ProxydCounts(t, s.Id)
	if got := c.Output(s.Id, "curl -sS -m 10 http://"+open.Addr+"/"); !strings.Contains(got, "web host") {
		t.Errorf("curl: %q", got)
	}
	if after := env.ProxydCounts(t, s.Id); after != before {
		t.Errorf("the shell's traffic was counted by proxyd: %+v", after)
	}
	neighbour := c.Shell()
	c.Output(neighbour.Id, "(python3 -m http.server 8001 >/dev/null 2>&1 &); sleep 0.5")
	other := env.SlotAddr(t, env.FindProcess(t, "python3", "-m", "http.server", "8001").Slot)
	gateway := strings.TrimPrefix(env.BaseURL, "http://127.0.0.1")
	for _, target := range []string{closed.Addr, closed.Host, open.Host + gateway, "169.254.169.254", "192.168.0.1", "100.64.0.1",
		other + ":8001", "169.254.77.1" + gateway, "127.0.0.1" + gateway} {
		began := time.Now()
		if r := c.Exec(s.Id, "curl -sS -m 5 -o /dev/null http://"+target+"/"); r.ExitCode == nil || *r.ExitCode == 0 {
			t.Errorf("the shell reached %s: %+v", target, r)
		} else if time.Since(began) > 4*time.Second {
			t.Errorf("%s hung instead of being refused", target)
		}
	}
	if closed.Requests.Load() != 0 {
		t.Error("a private web host got a request")
	}
	if r := c.Exec(s.Id, "nc -h >/dev/null 2>&1; python3 - <<'E'\nimport socket\nsocket.create_connection(('"+open.Addr+"', 25), 5)\nE"); *r.ExitCode == 0 || !strings.Contains(r.Stderr, "refused") {
		t.Errorf("port 25: %+v", r)
	}
}

func TestDNSInTheSlot(t *testing.T) {
	dns := fakeDNS(t, "answer.test.", [4]byte{192, 0, 2, 53})
	env := testenv.Start(t, testenv.Options{Pool: "shell=1", Hostd: []string{"--resolvers", dns}})
	c := env.Client(t, "Scale")
	s := c.Shell()
	got := c.Output(s.Id, "grep nameserver /etc/resolv.conf; getent ahostsv4 answer.test | head -1; getent hosts nothere.test || echo none; hostname; getent ahostsv4 localhost | head -1")
	for _, want := range []string{"nameserver 169.254.77.1", "192.0.2.53", "none", "127.0.0.1"} {
		if !strings.Contains(got, want) {
			t.Errorf("got %q, want %q in it", got, want)
		}
	}
}

// fakeDNS answers queries for one name with an address and all others with
// NXDOMAIN (RFC 1035).
func fakeDNS(t *testing.T, name string, addr [4]byte) string {
	t.Helper()
	conn, err := net.ListenPacket("udp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	var wanted []byte
	for label := range strings.SplitSeq(strings.TrimSuffix(name, "."), ".") {
		wanted = append(append(wanted, byte(len(label))), label...)
	}
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			end := 12
			for end < n && buf[end] != 0 {
				end += int(buf[end]) + 1
			}
			end += 5 // root label, type, class
			if end > n {
				continue
			}
			q := buf[:end]
			reply := append([]byte{q[0], q[1], 0x81, 0x83, 0, 1, 0, 0, 0, 0, 0, 0}, q[12:]...)
			if strings.HasPrefix(string(q[12:]), string(wanted)) {
				reply[3] = 0x80
				if q[end-3] == 1 { // A
					reply[7] = 1
					reply = append(reply, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, addr[0], addr[1], addr[2], addr[3])
				}
			}
			_, _ = conn.WriteTo(reply, from)
		}
	}()
	return conn.LocalAddr().String()
}
