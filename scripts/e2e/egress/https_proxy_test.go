package egress

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
)

// Ports of the HTTPS proxies of a web host, all squid behind haproxy.
const (
	tlsKnown    = 3443 // certified by the authority that --upstream-ca names
	tlsStranger = 3444 // by one that nobody knows
	tlsMisnamed = 3445 // by the known one, for another address
)

// A customer's HTTPS proxy serves Chrome and curl, with a login, and what it
// carries is counted to the byte. One that cannot be certain is told nothing.
func TestHTTPSProxy(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := newSite(t, env)
	squid := startSquid(t, web.WebHost)
	certain, other := newTap(t, web, 3129, squid), newTap(t, web, 3130, squid)
	startTLS(t, web, certain, other)
	secure := func(port int, pattern string) testenv.Fields {
		p := squid
		p.url = fmt.Sprintf("https://%s:%d", web.Addr, port)
		return p.rule(testenv.Fields{"domainPattern": pattern, "scope": "all"})
	}
	s := c.Create(testenv.Fields{"shell": true, "proxy": list{
		secure(tlsStranger, "two"), secure(tlsMisnamed, "three"), secure(tlsKnown, ".")}})

	c.Output(s.Id, fmt.Sprintf(`set -e; for p in http://one.test:%d https://one.test:%d; do
curl -sSk -o a $p/bytes/700001 -o b $p/bytes/13; test $(stat -c %%s a b | tr '\n' .) = 700001.13.
test $(curl -sSk --data-binary @a $p/upload) = 700001; curl -sSk -o /dev/null $p/missing; done`, web.http, web.tls))
	squid.serves(t, "one.test")
	inChrome(t, web, squid, s)
	testenv.Wait(t, 30*time.Second, "usage is what passed haproxy", func() bool {
		residential, custom := proxyData(c)
		return residential == 0 && custom == certain.payload(t)
	})
	if got := certain.payload(t); got < 6*700_000 {
		t.Errorf("only %d bytes", got)
	}

	before := refused(t, env)
	for _, site := range []string{"two.test", "three.test"} {
		for _, url := range []string{web.at(site, "/from"), fmt.Sprintf("https://%s:%d/from", site, web.tls)} {
			if got := c.Output(s.Id, "curl -ski --max-time 60 "+url+" || true"); !strings.Contains(got, "X-Service-Proxy-Error: upstream_unreachable") {
				t.Errorf("%s: %q", url, got)
			}
		}
		if got := goTo(t, s, web.at(site, "/from")); !strings.Contains(got, "certificate") {
			t.Errorf("Chrome at %s: %q", site, got)
		}
	}
	tellsOf(t, c, s.Id, before, "upstream_unreachable")
	if n := other.payload(t); n != 0 || len(other.conns) != 0 {
		t.Errorf("proxies that are not certain were sent %d bytes on %d connections", n, len(other.conns))
	}
}

// inChrome opens the site by plain HTTP and by HTTPS, and sends something.
func inChrome(t *testing.T, web *site, p proxy, s api.Session) {
	t.Helper()
	ctx := within(t, time.Minute)
	cdp, page := testenv.FirstPage(t, *s.ConnectUrl)
	defer cdp.Close()
	if err := page.Call(ctx, "Security.setIgnoreCertificateErrors", testenv.Fields{"ignore": true}, nil); err != nil {
		t.Fatal(err)
	}
	for site, base := range map[string]string{"chrome.test": web.at("chrome.test", ""), "tls.test": fmt.Sprintf("https://tls.test:%d", web.tls)} {
		if err := page.Goto(ctx, base+"/from"); err != nil {
			t.Fatalf("%s: %v", base, err)
		}
		var got string
		if err := page.Evaluate(ctx, `(async () => { const body = await (await fetch("/bytes/1400003")).arrayBuffer();
			return (await (await fetch("/upload", {method: "POST", body})).text()) + " " + document.body.innerText })()`, &got); err != nil {
			t.Fatalf("%s: %v", base, err)
		}
		if !strings.HasPrefix(got, "1400003 "+web.Addr+":") {
			t.Errorf("%s: %q", base, got)
		}
		p.serves(t, site)
	}
}

// startTLS starts haproxy, which ends TLS before taps of squid.
func startTLS(t *testing.T, web *site, known, others *tap) {
	t.Helper()
	dir := ownedBy(t, "root")
	config := "global\n  maxconn 500\ndefaults\n  mode tcp\n  timeout connect 10s\n  timeout client 120s\n  timeout server 120s\n"
	for port, x := range map[int]struct {
		by   *testenv.Authority
		name string
		to   *tap
	}{
		tlsKnown:    {trusted, web.Addr, known},
		tlsStranger: {testenv.NewAuthority(), web.Addr, others},
		tlsMisnamed: {trusted, "192.0.2.1", others},
	} {
		cert, key := x.by.Server(x.name)
		file := filepath.Join(dir, fmt.Sprint(port))
		write(t, file, string(cert)+string(key))
		config += fmt.Sprintf("listen p%d\n  bind %s:%d ssl crt %s\n  server squid %s\n", port, web.Addr, port, file, x.to.addr)
	}
	write(t, filepath.Join(dir, "conf"), config)
	serveOn(t, web.WebHost, fmt.Sprintf("http://%s:%d", web.Addr, tlsKnown), "/dev/null", "haproxy", "-db", "-f", filepath.Join(dir, "conf"))
}

// tap stands before a proxy and keeps all that passes.
type tap struct {
	addr, proxy string

	mu    sync.Mutex // guards what follows, and the buffers
	conns []*[2]bytes.Buffer
}

func newTap(t *testing.T, web *site, port int, p proxy) *tap {
	t.Helper()
	ln := web.Listen(t, port)
	x := &tap{addr: ln.Addr().String(), proxy: strings.TrimPrefix(p.url, "http://")}
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go x.carry(conn.(*net.TCPConn))
		}
	}()
	return x
}

func (x *tap) carry(near *net.TCPConn) {
	defer near.Close()
	conn, err := net.DialTimeout("tcp", x.proxy, 10*time.Second)
	if err != nil {
		return
	}
	far := conn.(*net.TCPConn)
	defer far.Close()
	kept := &[2]bytes.Buffer{}
	x.mu.Lock()
	x.conns = append(x.conns, kept)
	x.mu.Unlock()
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, _ = io.Copy(io.MultiWriter(x.keep(&kept[1]), near), far)
		_ = near.CloseWrite()
	}()
	_, _ = io.Copy(io.MultiWriter(x.keep(&kept[0]), far), near)
	_ = far.CloseWrite()
	<-over
}

// keep is a writer of one of the buffers.
func (x *tap) keep(b *bytes.Buffer) io.Writer {
	return writerFunc(func(p []byte) (int, error) {
		x.mu.Lock()
		defer x.mu.Unlock()
		return b.Write(p)
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// payload is what passed as proxy data is counted: all that follows CONNECT and
// its answer, and whole plain messages without the login.
func (x *tap) payload(t *testing.T) (n int64) {
	t.Helper()
	x.mu.Lock()
	defer x.mu.Unlock()
	login := []byte(basicAuth(user, password))
	for _, kept := range x.conns {
		up, down := kept[0].Bytes(), kept[1].Bytes()
		if !bytes.Contains(up, login) && len(up) > 0 {
			t.Errorf("no login in %.200q", up)
		}
		if bytes.HasPrefix(up, []byte("CONNECT ")) {
			_, up, _ = bytes.Cut(up, []byte("\r\n\r\n"))
			_, down, _ = bytes.Cut(down, []byte("\r\n\r\n"))
		}
		n += int64(len(up) - bytes.Count(up, login)*len(login) + len(down))
	}
	return n
}
