package upstream

import (
	"bufio"
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// direct dials wherever it is told.
type direct struct{}

func (direct) DialProxy(ctx context.Context, t egress.Target) (*net.TCPConn, error) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", t.String())
	if err != nil {
		r := egress.Refuse(egress.UpstreamUnreachable, "could not connect to the proxy %s", t)
		r.Cause = err
		return nil, r
	}
	return conn.(*net.TCPConn), nil
}

func (d direct) DialTrusted(ctx context.Context, t egress.Target) (*net.TCPConn, error) {
	return d.DialProxy(ctx, t)
}

// fake is a proxy that gives the same answer to each CONNECT.
type fake struct {
	addr string

	mu     sync.Mutex
	answer string   // empty: none ever
	users  []string // user names that were sent
}

func newFake(t *testing.T, answer string) *fake {
	t.Helper()
	f := &fake{answer: answer}
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.addr = ln.Addr().String()
	var open sync.WaitGroup
	open.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			open.Go(func() { f.serve(conn) })
		}
	})
	t.Cleanup(func() { ln.Close(); open.Wait() })
	return f
}

func (f *fake) serve(conn net.Conn) {
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	in := bufio.NewReader(conn)
	req, err := http.ReadRequest(in)
	if err != nil {
		return
	}
	req.Header.Set("Authorization", req.Header.Get("Proxy-Authorization"))
	user, _, _ := req.BasicAuth()
	f.mu.Lock()
	answer := f.answer
	f.users = append(f.users, user)
	f.mu.Unlock()
	_, _ = io.WriteString(conn, answer)
	_, _ = io.Copy(io.Discard, in)
}

func (f *fake) set(answer string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.answer = answer
}

// seen takes the user names that were sent.
func (f *fake) seen() []string {
	f.mu.Lock()
	defer f.mu.Unlock()
	users := f.users
	f.users = nil
	return users
}

const (
	ok200  = "HTTP/1.1 200 OK\r\n\r\n"
	bad502 = "HTTP/1.1 502 Bad Gateway\r\n\r\n"
)

func provide(name, addr string) ProviderConfig {
	return ProviderConfig{Name: name, Types: []egress.Type{egress.Residential}, Server: "http://" + addr,
		Username: name + "[-{country}]-{session}", Password: "secret"}
}

var site = egress.Target{Name: "site.test", Port: 443}

func newUpstreams(t *testing.T, c Config) *Upstreams {
	t.Helper()
	c.Dialer = direct{}
	u, err := New(c)
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// tunnel opens and closes one, and gives the reason of a refusal.
func tunnel(u *Upstreams, r proxylink.Route) egress.Reason {
	l, refused := u.Tunnel(context.Background(), &r, site)
	if refused != nil {
		return refused.Reason
	}
	l.Conn.Close()
	return ""
}

func residential(sticky string) proxylink.Route {
	return proxylink.Route{Rule: egress.Rule{Type: egress.Residential, Country: "US"}, StickyID: sticky}
}

// A sticky rule keeps its id at the provider; a rotating one never does.
func TestSessionIDs(t *testing.T) {
	f := newFake(t, ok200)
	u := newUpstreams(t, Config{Providers: []ProviderConfig{provide("p", f.addr)}})
	for range 3 {
		if reason := tunnel(u, residential("0123456789abcdef")); reason != "" {
			t.Fatal(reason)
		}
	}
	for _, user := range f.seen() {
		if user != "p-US-0123456789abcdef" {
			t.Errorf("sticky: %q", user)
		}
	}
	seen := map[string]bool{}
	for range 5 {
		tunnel(u, residential(""))
	}
	for _, user := range f.seen() {
		id, _ := strings.CutPrefix(user, "p-US-")
		if len(id) != 16 || seen[id] {
			t.Errorf("rotating: %q", user)
		}
		seen[id] = true
	}
	if len(seen) != 5 {
		t.Errorf("%d ids", len(seen))
	}
}

// The next provider serves when one fails, and one that failed is tried last
// until its time is over.
func TestFailover(t *testing.T) {
	for name, c := range map[string]struct {
		answer   string
		failures int // until it is tried last
		failover bool
		reason   egress.Reason
	}{
		"login":      {"HTTP/1.1 407 x\r\n\r\n", 3, true, ""},
		"login, 401": {"HTTP/1.1 401 x\r\n\r\n", 3, true, ""},
		"error":      {bad502, 3, true, ""},
		"garbage":    {"SSH-2.0-x\r\n", 3, true, ""},
		"restricted": {"HTTP/1.1 451 x\r\n\r\n", 0, false, egress.TargetRestricted},
		"forbidden":  {"HTTP/1.1 403 x\r\n\r\n", 0, false, egress.UpstreamError},
	} {
		first, second := newFake(t, c.answer), newFake(t, ok200)
		one, two := provide("one", first.addr), provide("two", second.addr)
		one.Restricted = []Pattern{{Status: 451}}
		u := newUpstreams(t, Config{Providers: []ProviderConfig{one, two}})
		for range 5 {
			if reason := tunnel(u, residential("x")); reason != c.reason {
				t.Errorf("%s: %q", name, reason)
			}
		}
		asked, stood := len(first.seen()), len(second.seen())
		if !c.failover && (asked != 5 || stood != 0) || c.failover && (asked != c.failures || stood != 5) {
			t.Errorf("%s: the first was asked %d times, the second %d", name, asked, stood)
		}
		if c.failover == u.providers[0].up() {
			t.Errorf("%s: up %v", name, u.providers[0].up())
		}
	}
}

func TestFailoverOfDeadAndSilentProviders(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	silent, works := newFake(t, ""), newFake(t, ok200)
	u := newUpstreams(t, Config{Timeouts: Timeouts{First: 30 * time.Millisecond}, Providers: []ProviderConfig{
		provide("dead", ln.Addr().String()), provide("silent", silent.addr), provide("works", works.addr)}})
	for range 4 {
		if reason := tunnel(u, residential("x")); reason != "" {
			t.Fatal(reason)
		}
	}
	for i, want := range []bool{false, false, true} {
		if u.providers[i].up() != want {
			t.Errorf("%s: up %v", u.providers[i].name, u.providers[i].up())
		}
	}
	// Without anyone who works the last failure is told.
	all := newUpstreams(t, Config{Timeouts: Timeouts{Answer: 30 * time.Millisecond}, Providers: []ProviderConfig{provide("silent", silent.addr)}})
	if reason := tunnel(all, residential("x")); reason != egress.UpstreamTimeout {
		t.Error(reason)
	}
}

// After its time a provider that failed is tried by one connection; when that
// works it is back.
func TestAProviderComesBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := residential("x")
		a, b := &provider{name: "a", types: []egress.Type{egress.Residential}}, &provider{name: "b", types: []egress.Type{egress.Residential}}
		r.Country = ""
		first := func() string { return choose([]*provider{a, b}, &r, time.Now())[0].name }
		a.report(doubtful, time.Now())
		a.report(doubtful, time.Now())
		if first() != "a" {
			t.Error("two doubts put it last")
		}
		a.report(doubtful, time.Now())
		if first() != "b" {
			t.Error("three do not")
		}
		time.Sleep(downFor + time.Second)
		if first() != "a" || first() != "b" {
			t.Error("want one connection to try it again, and only one")
		}
		a.report(broken, time.Now())
		if first() != "b" {
			t.Error("it failed again")
		}
		time.Sleep(downFor + time.Second)
		if first() != "a" {
			t.Error("not tried again")
		}
		a.report(fine, time.Now())
		if got := first() + first(); got != "aa" {
			t.Error("it is not back")
		}
	})
}

// A provider that cannot be told the place does not serve the rule.
func TestOnlyAbleProvidersAreAsked(t *testing.T) {
	f := newFake(t, ok200)
	plain := ProviderConfig{Name: "plain", Types: []egress.Type{egress.Residential, egress.Datacenter}, Server: "http://" + f.addr, Username: "x", Password: "k-{country}", Lowercase: true}
	u := newUpstreams(t, Config{Providers: []ProviderConfig{plain}})
	for _, c := range []struct {
		rule egress.Rule
		want egress.Reason
	}{
		{egress.Rule{Type: egress.Residential}, ""},
		{egress.Rule{Type: egress.Datacenter, Country: "DE"}, ""},
		{egress.Rule{Type: egress.Residential, Country: "DE", City: "berlin"}, egress.ProxyTypeUnavailable},
		{egress.Rule{Type: egress.Residential, Country: "US", State: "us_texas"}, egress.ProxyTypeUnavailable},
		{egress.Rule{Type: egress.None}, egress.BadRoute},
	} {
		if got := tunnel(u, proxylink.Route{Rule: c.rule}); got != c.want {
			t.Errorf("%+v: %q, want %q", c.rule, got, c.want)
		}
	}
	r := proxylink.Route{Rule: egress.Rule{Type: egress.Datacenter, Country: "DE"}}
	if got := u.providers[0].proxy(&r).auth; got != basic("x", "k-de") {
		t.Errorf("login %q", got)
	}
}

// What a client is told of a failure names no provider and no secret.
func TestRefusalsKeepSecrets(t *testing.T) {
	f := newFake(t, bad502)
	u := newUpstreams(t, Config{Providers: []ProviderConfig{provide("acme", f.addr)}})
	r := residential("x")
	for _, answer := range []string{bad502, "HTTP/1.1 407 x\r\n\r\n", "nonsense\r\n\r\n"} {
		f.set(answer)
		_, refused := u.Tunnel(context.Background(), &r, site)
		if refused == nil || strings.Contains(refused.Error(), "acme") || strings.Contains(refused.Error(), "127.0.0.1") || strings.Contains(refused.Error(), "secret") {
			t.Errorf("%v", refused)
		}
	}
}

// A client that leaves while a proxy thinks ends the attempt, and says nothing
// of the provider.
func TestLeavingEndsTheAttempt(t *testing.T) {
	silent, other := newFake(t, ""), newFake(t, ok200)
	u := newUpstreams(t, Config{Providers: []ProviderConfig{provide("silent", silent.addr), provide("other", other.addr)}})
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		for len(silent.seen()) == 0 && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		cancel()
	}()
	r := residential("x")
	if _, refused := u.Tunnel(ctx, &r, site); refused == nil || !errors.Is(refused, context.Canceled) {
		t.Errorf("%v", refused)
	}
	if len(other.seen()) != 0 || u.providers[0].failures != 0 {
		t.Error("the provider is blamed")
	}
}

// HTTPS proxies: their certificate is checked for the name that the rule has.
func TestHTTPSProxy(t *testing.T) {
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if user, pass, ok := (&http.Request{Header: http.Header{"Authorization": r.Header["Proxy-Authorization"]}}).BasicAuth(); !ok || user != "u" || pass != "p" {
			w.WriteHeader(http.StatusProxyAuthRequired)
			return
		}
		conn, rw, err := w.(http.Hijacker).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = io.WriteString(conn, ok200+"hello")
		b, _ := io.ReadAll(rw) // to the other side's half-close
		_, _ = conn.Write(b)
	}))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.StartTLS()
	defer srv.Close()
	pool := x509.NewCertPool()
	pool.AddCert(srv.Certificate())
	addr := srv.Listener.Addr().String()
	rule := func(server, pass string) proxylink.Route {
		return proxylink.Route{Rule: egress.Rule{Type: egress.Custom, Server: server, Username: "u"}, Password: pass}
	}
	u := newUpstreams(t, Config{Roots: pool})
	r := rule("https://"+addr, "p")
	l, refused := u.Tunnel(context.Background(), &r, site)
	if refused != nil {
		t.Fatal(refused)
	}
	if _, err := l.Conn.Write([]byte(" there")); err != nil {
		t.Fatal(err)
	}
	if err := l.Conn.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(l.Conn)
	l.Conn.Close()
	if got := string(l.Early) + string(rest); err != nil || got != "hello there" {
		t.Errorf("%q %v", got, err)
	}
	_, port, _ := net.SplitHostPort(addr)
	for name, c := range map[string]struct {
		u    *Upstreams
		r    proxylink.Route
		want egress.Reason
	}{
		"wrong password":  {u, rule("https://"+addr, "guess"), egress.ProxyAuthFailed},
		"wrong name":      {u, rule("https://localhost:"+port, "p"), egress.UpstreamUnreachable},
		"unknown issuer":  {newUpstreams(t, Config{Roots: x509.NewCertPool()}), r, egress.UpstreamUnreachable},
		"no TLS expected": {u, rule("http://"+addr, "p"), egress.UpstreamError},
		"no TLS there":    {u, rule("https://"+newFake(t, ok200).addr, "p"), egress.UpstreamUnreachable},
	} {
		if got := tunnel(c.u, c.r); got != c.want {
			t.Errorf("%s: %q, want %q", name, got, c.want)
		}
	}
}

func TestLoadProviders(t *testing.T) {
	dir := t.TempDir()
	load := func(text string, mode os.FileMode) ([]ProviderConfig, error) {
		path := filepath.Join(dir, "providers.json")
		_ = os.Remove(path)
		if err := os.WriteFile(path, []byte(text), mode); err != nil {
			t.Fatal(err)
		}
		return LoadProviders(path)
	}
	good := `{"providers":[{"name":"acme","types":["residential","datacenter"],"server":"https://proxy.acme.test:7000","username":"c-1[-country-{country}]-session-{session}",
		"password":"pw","lowercase":true,"restricted":[{"status":403,"header":"X-Error","contains":"policy"}]}]}`
	list, err := load(good, 0o600)
	if err != nil || len(list) != 1 || list[0].Restricted[0].Status != 403 {
		t.Fatalf("%+v %v", list, err)
	}
	if _, err := load(good, 0o644); err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("readable by all: %v", err)
	}
	one := func(fields string) string { return `{"providers":[{` + fields + `}]}` }
	for text, want := range map[string]string{
		`{`:                                  "unexpected EOF",
		`{"provider":[]}`:                    "provider",
		`{"providers":[]} {}`:                "follows",
		one(`"name":"A"`):                    "name",
		one(`"name":"a"`):                    "types",
		one(`"name":"a","x":1`):              "x",
		one(`"name":"a","types":["custom"]`): "types",
		one(`"name":"a","types":["residential"]`):                                                                    "server",
		one(`"name":"a","types":["residential"],"server":"http://x"`):                                                "port",
		one(`"name":"a","types":["residential"],"server":"socks5://x:1"`):                                            "http://host:port",
		one(`"name":"a","types":["residential"],"server":"http://u:p@x:1"`):                                          "http://host:port",
		one(`"name":"a","types":["residential"],"server":"http://x:1","username":"{town}"`):                          "username",
		one(`"name":"a","types":["residential"],"server":"http://x:1","username":"a:b"`):                             "colon",
		one(`"name":"a","types":["residential"],"server":"http://x:1","password":"["`):                               "password",
		one(`"name":"a","types":["residential"],"server":"http://x:1","restricted":[{}]`):                            "restricted",
		one(`"name":"a","types":["residential"],"server":"http://x:1","restricted":[{"status":200}]`):                "restricted",
		one(`"name":"a","types":["residential"],"server":"http://x:1","restricted":[{"status":403,"contains":"x"}]`): "restricted",
	} {
		if _, err := load(text, 0o600); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
	if _, err := load(one(`"name":"a","types":["residential"],"server":"http://x:1","password":"my{secret"`), 0o600); err == nil || strings.Contains(err.Error(), "secret") {
		t.Errorf("a piece of the password is shown: %v", err)
	}
	p := `{"name":"a","types":["residential"],"server":"http://x:1"}`
	if _, err := load(fmt.Sprintf(`{"providers":[%s,%s]}`, p, p), 0o600); err == nil || !strings.Contains(err.Error(), "twice") {
		t.Errorf("twice: %v", err)
	}
}
