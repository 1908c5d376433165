package front

import (
	"bufio"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"
	"weak"

	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// fakeProxy is an upstream proxy. Each connection's first request is recorded,
// raw, and handled.
type fakeProxy struct {
	addr string
	mu   sync.Mutex
	got  []string
}

func newProxy(t *testing.T, handle func(c *net.TCPConn, in *bufio.Reader, head string)) *fakeProxy {
	p := &fakeProxy{}
	p.addr = serveTCP(t, func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		head := readHead(in)
		p.mu.Lock()
		p.got = append(p.got, head)
		p.mu.Unlock()
		handle(c, in, head)
	})
	return p
}

func (p *fakeProxy) heads() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.got...)
}

// readHead reads up to an empty line.
func readHead(in *bufio.Reader) string {
	var head strings.Builder
	for {
		line, err := in.ReadString('\n')
		head.WriteString(line)
		if err != nil || line == "\r\n" {
			return head.String()
		}
	}
}

// says is a proxy that answers so, whatever it is asked.
func says(t *testing.T, answer string) *fakeProxy {
	return newProxy(t, func(c *net.TCPConn, in *bufio.Reader, _ string) {
		_, _ = io.WriteString(c, answer)
		_, _ = io.Copy(io.Discard, in) // until the other side has read it
	})
}

// tunnels is a proxy that opens a tunnel to an echo, whatever the target, and
// sends early with its answer.
func tunnels(t *testing.T, early string) *fakeProxy {
	return newProxy(t, func(c *net.TCPConn, in *bufio.Reader, _ string) {
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-Proxy: yes\r\n\r\n"+early)
		_, _ = io.Copy(c, in)
	})
}

// route is a catch-all rule for a custom proxy.
func route(addr string) proxylink.Route {
	return proxylink.Route{Rule: egress.Rule{Type: egress.Custom, Server: "http://" + addr}}
}

// dialBy opens a connection of a session with these rules.
func (r *rig) dialBy(session string, routes ...proxylink.Route) *net.TCPConn {
	r.t.Helper()
	return r.dialWith(session, r.pass(proxylink.Pass{SessionID: session, Routes: routes}))
}

// asks are the three ways to ask for a target: what a client sees of a refusal.
var asks = map[string]func(t *testing.T, conn net.Conn, target string) (code int, reason string){
	"CONNECT": func(t *testing.T, conn net.Conn, target string) (int, string) {
		resp := send(t, conn, "CONNECT "+target+" HTTP/1.1\r\nHost: x\r\n\r\n")
		return resp.StatusCode, resp.Header.Get(egress.ReasonHeader)
	},
	"GET": func(t *testing.T, conn net.Conn, target string) (int, string) {
		resp := send(t, conn, "GET http://"+target+"/ HTTP/1.1\r\nHost: x\r\n\r\n")
		return resp.StatusCode, resp.Header.Get(egress.ReasonHeader)
	},
	"SOCKS5": func(t *testing.T, conn net.Conn, target string) (int, string) {
		host, _, _ := net.SplitHostPort(target)
		return int(socksConnect(t, conn, socksName(host, portOf(t, target)))), ""
	},
}

// Every reason reaches clients of all three kinds, and the session's host.
func TestEveryReason(t *testing.T) {
	site := "site.test:80"
	quick := newRigWith(t, 512, time.Second, upstream.Config{Timeouts: upstream.Timeouts{Answer: 50 * time.Millisecond, Plain: 50 * time.Millisecond}})
	full := newRig(t, 1, time.Second)
	fullConn := full.dial("s")
	full.until("s", func(c counts) bool { return c.Open == 1 })
	defer fullConn.Close()
	picky := says(t, "HTTP/1.1 403 Forbidden\r\nX-Error: Site is BLOCKED here\r\nContent-Length: 0\r\n\r\n")
	r := newRigWith(t, 512, time.Second, upstream.Config{Providers: []upstream.ProviderConfig{{
		Name: "picky", Types: []egress.Type{egress.Residential}, Server: "http://" + picky.addr,
		Restricted: []upstream.Pattern{{Status: 403, Header: "x-error", Contains: "blocked"}},
	}}})
	login := says(t, "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic realm=x\r\nContent-Length: 0\r\n\r\n")
	never := newProxy(t, func(c *net.TCPConn, in *bufio.Reader, _ string) { _, _ = io.Copy(io.Discard, in) })
	works := tunnels(t, "")
	rule := func(rule egress.Rule) []proxylink.Route { return []proxylink.Route{{Rule: rule}} }
	for _, c := range []struct {
		reason egress.Reason
		rig    *rig
		routes []proxylink.Route
		sealed []byte
		target string
		status int
		socks  int
	}{
		{egress.TargetRestricted, r, rule(egress.Rule{Type: egress.Residential}), nil, site, 403, 2},
		{egress.PortBlocked, r, []proxylink.Route{route(works.addr)}, nil, "site.test:587", 403, 2},
		{egress.PortBlocked, r, nil, nil, "site.test:465", 403, 2},
		{egress.ProxyNotPublic, r, []proxylink.Route{route("127.0.0.2:8080")}, nil, site, 403, 2},
		{egress.ProxyAuthFailed, r, []proxylink.Route{route(login.addr)}, nil, site, 502, 1},
		{egress.ProxyTypeUnavailable, r, rule(egress.Rule{Type: egress.Datacenter}), nil, site, 503, 1},
		{egress.ProxyTypeUnavailable, r, rule(egress.Rule{Type: egress.Residential, Country: "DE"}), nil, site, 503, 1},
		{egress.UpstreamTimeout, quick, []proxylink.Route{route(never.addr)}, nil, site, 504, 6},
		{egress.UpstreamUnreachable, r, []proxylink.Route{route(nobody(t))}, nil, site, 502, 5},
		{egress.UpstreamUnreachable, r, []proxylink.Route{route("proxy.invalid:3128")}, nil, site, 502, 4},
		{egress.UpstreamError, r, []proxylink.Route{route(says(t, "SSH-2.0-OpenSSH_9.2\r\n").addr)}, nil, site, 502, 1},
		{egress.UpstreamError, r, []proxylink.Route{route(says(t, "HTTP/1.1 200 OK\r\nX: "+strings.Repeat("y", 2<<20)).addr)}, nil, site, 502, 1},
		{egress.TooManyConnections, full, nil, nil, site, 503, 1},
		{egress.BadTarget, r, []proxylink.Route{route(works.addr)}, nil, "10.0.0.1:80", 403, 2},
		{egress.BadTarget, r, []proxylink.Route{route(works.addr)}, nil, "2130706433:80", 403, 2},
		{egress.BadTarget, r, nil, nil, "missing.invalid:80", 403, 2},
		{egress.BadRoute, r, rule(egress.Rule{Type: "pigeon"}), nil, site, 502, 1},
		{egress.BadRoute, r, rule(egress.Rule{Type: egress.Custom, Server: "socks5://127.0.0.1:1080"}), nil, site, 502, 1},
		{egress.BadRoute, r, rule(egress.Rule{Type: egress.Custom, DomainPattern: "("}), nil, site, 502, 1},
		{egress.TokenInvalid, r, nil, []byte("no pass"), site, 403, 2},
		{egress.TokenInvalid, r, nil, r.pass(proxylink.Pass{SessionID: "other"}), site, 403, 2},
		{egress.TokenInvalid, r, nil, r.pass(proxylink.Pass{SessionID: "s", Expires: time.Now().Add(-time.Second)}), site, 403, 2},
	} {
		if c.sealed == nil {
			c.sealed = c.rig.pass(proxylink.Pass{SessionID: "s", Routes: c.routes})
		}
		for method, ask := range asks {
			code, reason := ask(t, c.rig.dialWith("s", c.sealed), c.target)
			if method == "SOCKS5" {
				if code != c.socks {
					t.Errorf("%s for %s by %v: reply %d, want %d", c.reason, c.target, c.routes, code, c.socks)
				}
			} else if code != c.status || reason != string(c.reason) {
				t.Errorf("%s %s by %v: %d %q, want %d %s", method, c.target, c.routes, code, reason, c.status, c.reason)
			}
			if got := c.rig.fed(); got.Reason != c.reason || got.Method != method || got.Target != c.target || got.SessionID != "s" || got.Epoch != 1 || got.Detail == "" || time.Since(got.At) > time.Minute {
				t.Errorf("%s %s: the host hears %+v", method, c.reason, got)
			}
		}
	}
	if got := works.heads(); len(got) != 0 {
		t.Errorf("the proxy was asked: %q", got)
	}
}

// What a site must not be reaches no proxy in any spelling (CONNECT).
func TestLiteralsThroughAProxyAreChecked(t *testing.T) {
	r := newRig(t, 512, time.Second)
	p := tunnels(t, "")
	for _, target := range []string{"[::1]:80", "[fd00:ec2::254]:80", "[::ffff:10.0.0.1]:80", "[64:ff9b::a00:1]:80", "[2002:a00:1::]:80", "169.254.169.254:80", "100.100.100.200:80",
		"0x7f000001:80", "0177.0.0.1:80", "10.1:80", "[fe80::1%25eth0]:80"} {
		code, reason := asks["CONNECT"](t, r.dialBy("s", route(p.addr)), target)
		if code != 403 || reason != "bad_target" {
			t.Errorf("%s: %d %s", target, code, reason)
		}
	}
	if heads := p.heads(); len(heads) != 0 {
		t.Errorf("the proxy was asked: %q", heads)
	}
	if code, _ := asks["CONNECT"](t, r.dialBy("s", route(p.addr)), "[2606:4700::1111]:443"); code != 200 {
		t.Errorf("a public address: %d", code)
	}
	if all := p.heads(); !strings.HasPrefix(all[len(all)-1], "CONNECT [2606:4700::1111]:443 HTTP/1.1\r\nHost: [2606:4700::1111]:443\r\n") {
		t.Errorf("the proxy was asked: %q", all[len(all)-1])
	}
}

// Bytes both ways, those that come with the proxy's answer too, and half-closes.
func TestTunnelThroughACustomProxy(t *testing.T) {
	r := newRig(t, 512, time.Second)
	p := tunnels(t, "banner")
	way := route(p.addr)
	way.Username, way.Password = "user", "pa:ss"
	conn := r.dialBy("s", way)
	fmt.Fprintf(conn, "CONNECT Site.Test.:443 HTTP/1.1\r\nHost: x\r\nProxy-Authorization: Basic c2VjcmV0\r\n\r\nearly")
	readEstablished(t, conn)
	body := strings.Repeat("0123456789abcdef", 1<<15)
	go func() {
		_, _ = io.WriteString(conn, body)
		_ = conn.CloseWrite()
	}()
	got, err := io.ReadAll(conn)
	if err != nil || string(got) != "bannerearly"+body {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	want := counts{Up: int64(5 + len(body)), Down: int64(11 + len(body)), Connections: 1}
	if c := r.settled("s"); c != want {
		t.Errorf("%+v, want %+v", c, want)
	}
	if up, down := r.billed(egress.Custom); up != want.Up || down != want.Down {
		t.Errorf("billed %d up, %d down", up, down)
	}
	// The name goes on unresolved; the login is ours, not the client's.
	if head := p.heads()[0]; head != "CONNECT site.test:443 HTTP/1.1\r\nHost: site.test:443\r\nProxy-Authorization: Basic dXNlcjpwYTpzcw==\r\n\r\n" {
		t.Errorf("the proxy was asked: %q", head)
	}
	socks := r.dialBy("socks", way)
	if code := socksConnect(t, socks, socksName("site.test", 443)); code != 0 {
		t.Fatalf("reply %d", code)
	}
	_, _ = io.WriteString(socks, "hello")
	_ = socks.CloseWrite()
	if got, err := io.ReadAll(socks); err != nil || string(got) != "bannerhello" {
		t.Errorf("%q %v", got, err)
	}
	if c := r.settled("socks"); c.Up != 5 || c.Down != 11 {
		t.Errorf("%+v", c)
	}
}

// Plain requests go to the proxy in absolute form over one kept connection,
// whatever the site, with our login and never the client's; that is not counted.
func TestPlainThroughAProxy(t *testing.T) {
	r := newRig(t, 512, time.Second)
	site := newRawSite(t, okAnswer) // a proxy is a site that is asked in absolute form
	way := route(site.addr)
	way.Username, way.Password = "user", "pass"
	const login = "Proxy-Authorization: Basic dXNlcjpwYXNz\r\n"
	conn := r.dialBy("s", way)
	in := bufio.NewReader(conn)
	long := strings.Repeat("x", 9000) // a first line larger than net/http's buffer
	for _, c := range []struct{ request, line string }{
		{"GET http://one.test/a?b HTTP/1.1\r\nHost: one.test\r\nProxy-Authorization: Basic c2VjcmV0\r\n\r\n", "GET http://one.test/a?b HTTP/1.1"},
		{"POST http://two.test:8080/ HTTP/1.1\r\nHost: two.test\r\nContent-Length: " + fmt.Sprint(len(login)) + "\r\n\r\n" + login, "POST http://two.test:8080/ HTTP/1.1"},
		{"GET http://one.test/" + long + " HTTP/1.1\r\nHost: one.test\r\n\r\n", "GET http://one.test/" + long + " HTTP/1.1"},
	} {
		_, _ = io.WriteString(conn, c.request)
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "ok" || resp.StatusCode != 200 {
			t.Fatalf("%s %q %v", resp.Status, body, err)
		}
		all := site.requests()
		got := all[len(all)-1]
		if !strings.HasPrefix(got, c.line+"\r\n"+login+"Host: ") || strings.Contains(got, "c2VjcmV0") || strings.Count(strings.Split(got, "\r\n\r\n")[0], "Proxy-") != 1 {
			t.Errorf("the proxy was asked: %.200q", got)
		}
	}
	conn.Close()
	up := 0
	for _, got := range site.requests() {
		up += len(got) - len(login)
	}
	if c := r.settled("s"); c.Up != int64(up) || c.Down != int64(3*len(okAnswer)) {
		t.Errorf("%+v, want %d up, %d down", c, up, 3*len(okAnswer))
	}
	if n := site.connections(); n != 1 {
		t.Errorf("%d connections to the proxy", n)
	}
}

// A list: the first rule that matches a host is followed, also by requests of
// one connection; each way out has its own count.
func TestRulesDecideEachConnection(t *testing.T) {
	r := newRig(t, 512, time.Second)
	proxy, straight := newRawSite(t, okAnswer), newRawSite(t, okAnswer)
	shop, rest := route(proxy.addr), route(nobody(t))
	shop.DomainPattern = `(^|\.)shop\.test$`
	none := proxylink.Route{Rule: egress.Rule{Type: egress.None, DomainPattern: `^127\.`}}
	conn := r.dialBy("s", shop, none, rest)
	in := bufio.NewReader(conn)
	for _, c := range []struct {
		host   string
		status int
		reason string
	}{
		{"SHOP.test", 200, ""}, {straight.addr, 200, ""}, {"www.shop.test.", 200, ""}, {"workshop.test", 502, "upstream_unreachable"}, {straight.addr, 200, ""},
	} {
		fmt.Fprintf(conn, "GET http://%s/ HTTP/1.1\r\nHost: x\r\n\r\n", c.host)
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatalf("%s: %v", c.host, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		if resp.StatusCode != c.status || resp.Header.Get(egress.ReasonHeader) != c.reason {
			t.Errorf("%s: %s %v", c.host, resp.Status, resp.Header)
		}
	}
	if len(proxy.requests()) != 2 || len(straight.requests()) != 2 {
		t.Errorf("proxy %q, straight %q", proxy.requests(), straight.requests())
	}
	conn.Close()
	r.settled("s")
	up := int64(len(strings.Join(proxy.requests(), "")))
	if gotUp, gotDown := r.billed(egress.Custom); gotUp != up || gotDown != int64(2*len(okAnswer)) {
		t.Errorf("billed %d up, %d down, want %d up", gotUp, gotDown, up)
	}
}

// After a change, older passes are refused and connections that wait for their
// next plain request are closed; what is open finishes.
func TestANewPassReplacesTheOlder(t *testing.T) {
	r := newRig(t, 512, time.Second)
	site, target := newRawSite(t, okAnswer), echo(t)
	first := r.pass(proxylink.Pass{SessionID: "s", Epoch: 2, Version: 7})
	idle, open := r.dialWith("s", first), r.dialWith("s", first)
	in := bufio.NewReader(idle)
	fmt.Fprintf(idle, "GET http://%s/ HTTP/1.1\r\nHost: x\r\n\r\n", site.addr)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	fmt.Fprintf(open, "CONNECT %s HTTP/1.1\r\n\r\n", target)
	readEstablished(t, open)

	second := r.pass(proxylink.Pass{SessionID: "s", Epoch: 2, Version: 8})
	if code, _ := asks["CONNECT"](t, r.dialWith("s", second), target); code != 200 {
		t.Fatalf("the new pass: %d", code)
	}
	fmt.Fprintf(idle, "GET http://%s/ HTTP/1.1\r\nHost: x\r\n\r\n", site.addr) // it may have reached the server before the new pass did
	if _, err := http.ReadResponse(in, nil); err == nil {
		t.Error("a request by the old pass was served")
	}
	if code, reason := asks["CONNECT"](t, r.dialWith("s", first), target); code != 403 || reason != "token_invalid" {
		t.Errorf("the old pass: %d %s", code, reason)
	}
	renewed := r.pass(proxylink.Pass{SessionID: "s", Epoch: 2, Version: 8, Expires: time.Now().Add(time.Hour)})
	for name, sealed := range map[string][]byte{"the same": second, "renewed": renewed} {
		if code, _ := asks["CONNECT"](t, r.dialWith("s", sealed), target); code != 200 {
			t.Errorf("%s: %d", name, code)
		}
	}
	_, _ = io.WriteString(open, "still")
	if _, err := io.ReadFull(open, make([]byte, 5)); err != nil {
		t.Errorf("an open tunnel was cut: %v", err)
	}
}

// A connection whose pass was no good does not wait for another request: its
// client is to make a new one, whose pass is today's. When a newer pass comes,
// nobody looks for the one that it has not.
func TestARefusedConnectionIsNotKept(t *testing.T) {
	r := newRig(t, 512, time.Second)
	target := echo(t)
	pass := func(version uint64) []byte { return r.pass(proxylink.Pass{SessionID: "s", Epoch: 1, Version: version}) }
	if code, _ := asks["CONNECT"](t, r.dialWith("s", pass(2)), target); code != 200 {
		t.Fatal(code)
	}
	late := r.dialWith("s", pass(1))
	in := bufio.NewReader(late)
	fmt.Fprintf(late, "GET http://%s/ HTTP/1.1\r\nHost: x\r\n\r\n", target)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	if reason := resp.Header.Get(egress.ReasonHeader); reason != "token_invalid" || !resp.Close {
		t.Errorf("reason %q, close %v", reason, resp.Close)
	}
	if code, _ := asks["CONNECT"](t, r.dialWith("s", pass(3)), target); code != 200 {
		t.Errorf("the newer pass: %d", code)
	}
	if _, err := in.ReadByte(); err != io.EOF {
		t.Errorf("the refused connection: %v", err)
	}
}

// Whoever changes a setting and keeps a tunnel open, again and again, fills no
// memory with rules.
func TestATunnelKeepsNoRules(t *testing.T) {
	r := newRig(t, 512, time.Second)
	target := echo(t)
	sealed := r.pass(proxylink.Pass{SessionID: "s", Epoch: 1, Version: 1})
	first, _, refused := r.server.passes.Open(time.Now(), "s", sealed)
	if refused != nil {
		t.Fatal(refused)
	}
	kept := weak.Make(first)
	open := map[string]*net.TCPConn{"CONNECT": r.dialWith("s", sealed), "SOCKS5": r.dialWith("s", sealed)}
	for name, conn := range open {
		if code, _ := asks[name](t, conn, target); code != 200 && code != 0 {
			t.Fatalf("%s: %d", name, code)
		}
	}
	if code, _ := asks["CONNECT"](t, r.dialWith("s", r.pass(proxylink.Pass{SessionID: "s", Epoch: 1, Version: 2})), target); code != 200 {
		t.Fatal(code)
	}
	for deadline := time.Now().Add(30 * time.Second); kept.Value() != nil; runtime.GC() {
		if time.Now().After(deadline) {
			t.Fatal("the replaced rules are kept")
		}
	}
	for name, conn := range open {
		if _, err := io.WriteString(conn, "still"); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := io.ReadFull(conn, make([]byte, 5)); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// An HTTPS proxy serves tunnels and plain requests alike; what is counted is
// inside its TLS.
func TestHTTPSProxy(t *testing.T) {
	var mu sync.Mutex
	var seen []string
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		mu.Lock()
		seen = append(seen, req.Method+" "+req.RequestURI+" "+req.Header.Get("Proxy-Authorization"))
		mu.Unlock()
		if req.Method != http.MethodConnect {
			_, _ = io.WriteString(w, "plain")
			return
		}
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, ok200+"early")
		_, _ = io.Copy(conn, rw)
	}))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	pool := x509.NewCertPool()
	pool.AddCert(srv.Certificate())
	r := newRigWith(t, 512, time.Second, upstream.Config{Roots: pool})
	way := route(srv.Listener.Addr().String())
	way.Server, way.Username = strings.Replace(way.Server, "http:", "https:", 1), "u"
	conn := r.dialBy("s", way)
	fmt.Fprintf(conn, "CONNECT site.test:443 HTTP/1.1\r\n\r\n")
	readEstablished(t, conn)
	body := strings.Repeat("x", 300_000)
	go func() {
		_, _ = io.WriteString(conn, body)
		_ = conn.CloseWrite()
	}()
	if got, err := io.ReadAll(conn); err != nil || string(got) != "early"+body {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	if c := r.settled("s"); c.Up != int64(len(body)) || c.Down != int64(len(body)+5) {
		t.Errorf("%+v", c)
	}
	plain := send(t, r.dialBy("s", way), "GET http://site.test/a HTTP/1.1\r\nHost: x\r\n\r\n")
	if got, err := io.ReadAll(plain.Body); err != nil || string(got) != "plain" {
		t.Errorf("%q %v", got, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if got := strings.Join(seen, ", "); got != "CONNECT site.test:443 Basic dTo=, GET http://site.test/a Basic dTo=" {
		t.Errorf("the proxy saw %s", got)
	}
}

// Heads that are too long or no HTTP are answered and end; slow ones end.
func TestHeadsAreBounded(t *testing.T) {
	r := newRig(t, 512, time.Second)
	long := strings.Repeat("x", maxHead)
	for name, c := range map[string]struct {
		wire   string
		status int
	}{
		"CONNECT, long field": {"CONNECT a.test:443 HTTP/1.1\r\nX: " + long + "\r\n\r\n", 431},
		"CONNECT, garbage":    {"CONNECT a.test:443 FTP/1.1\r\n\r\n", 400},
		"GET, long field":     {"GET http://127.0.0.1:1/ HTTP/1.1\r\nHost: x\r\nX: " + long + long + "\r\n\r\n", 431},
		"garbage":             {"\x16\x03\x01\x02\x00\x01\r\n\r\n", 400},
	} {
		conn := r.dial("s")
		if resp := send(t, conn, c.wire); resp.StatusCode != c.status {
			t.Errorf("%s: %s", name, resp.Status)
		}
	}
	slow := r.dial("slow")
	_, _ = io.WriteString(slow, "CONNECT a.test:443 HTTP/1.1\r\n")
	r.until("slow", func(n counts) bool { return n.Open == 1 })
	r.until("slow", func(n counts) bool { // as the watch does once the time is over
		for c := range r.connections("slow") {
			c.overdue(time.Now().Add(headTimeout + time.Second))
		}
		return n.Open == 0
	})
	if b, err := io.ReadAll(slow); len(b) != 0 {
		t.Errorf("a slow head: %q %v", b, err)
	}
}
