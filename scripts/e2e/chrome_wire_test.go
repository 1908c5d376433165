package e2e

import (
	"crypto/tls"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/cdpclient"
)

// tries is a function that has a page try all ways out that a browser has.
//
//go:embed testdata/tries.js
var tries string

// account is what tries says of itself.
type account struct {
	Secure       bool     // the page is a secure context, which WebTransport wants
	WebTransport bool     // it exists
	Gathered     string   // state of WebRTC's gathering at the end
	Candidates   []string // what it gathered
	Protocols    []string // with which the page's own fetches came
	Answered     int      // of them
}

// origin is a site that wants to be reached by HTTP/3, with a certificate that
// Chrome is told to trust, and by WebSocket.
type origin struct {
	*testenv.WebHost
	requests, sockets, pings atomic.Int64
}

func newOrigin(t *testing.T, env *testenv.Env, by *testenv.Authority) *origin {
	t.Helper()
	o := &origin{WebHost: env.AllowedWeb(t)}
	cert, key := by.Server(o.Addr)
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		t.Fatal(err)
	}
	for port, secure := range map[int]bool{8080: false, 8443: true} {
		srv := httptest.NewUnstartedServer(http.HandlerFunc(o.serve))
		srv.Config.ErrorLog = log.New(io.Discard, "", 0) // of handshakes that pages give up
		srv.Listener.Close()
		srv.Listener = o.Listen(t, port)
		if secure {
			srv.TLS = &tls.Config{Certificates: []tls.Certificate{pair}}
			srv.StartTLS()
		} else {
			srv.Start()
		}
		t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	}
	return o
}

func (o *origin) serve(w http.ResponseWriter, r *http.Request) {
	o.requests.Add(1)
	switch {
	case r.Header.Get("Upgrade") == "websocket":
		o.sockets.Add(1)
	case r.URL.Path == "/ping":
		o.pings.Add(1)
	}
	w.Header().Set("Alt-Svc", `h3=":8443"; ma=86400`)
	w.Header().Set("Access-Control-Allow-Origin", "*")
	w.Header().Set("Content-Type", "text/html")
	fmt.Fprint(w, "<title>origin</title><a id=a href='#here' ping='/ping'>link</a>")
}

// triesAnyway are packets of Chrome's that only the slot's rules stop: it looks up
// the names of STUN servers by itself, and takes link-local addresses, which the
// metadata of clouds have, for neighbours that want no proxy.
var triesAnyway = []string{"IP protocol 17 to " + agentlink.SlotAddr + ":53", "TCP to 169.254.169.254:80"}

// No packet of Chrome's goes anywhere but to its egress listener. Two guards
// stand, and each is tried without the other: Chrome hardly even tries, whatever a
// page does; and where Chrome is told to forget its proxy, as the root of a session
// can, the slot's rules refuse it all.
func TestNothingOfChromeOnTheWire(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	by := testenv.NewAuthority()
	web := newOrigin(t, env, by)
	s := c.Create(testenv.Fields{"shell": true})
	c.Output(s.Id, "(sleep 31415 >/dev/null 2>&1 &)")
	slot := env.FindProcess(t, "sleep", "31415").Slot
	if n := env.BrowserRefused(t, slot); n != 0 {
		t.Errorf("at its start Chrome tried %d packets that the slot's rules refused", n)
	}
	trust := list{base64.StdEncoding.EncodeToString(by.Cert.Raw)}
	policy(c, s, testenv.Fields{"CACertificates": trust})
	p := restarted(t, c, s)

	own := offersQUIC(t, c, s, by)
	wire := watch(t, env, slot, "end of Chrome's own guards")
	for range 5 { // a site's offer is for what comes later
		if err := p.Goto(within(t, 20*time.Second), own); err != nil {
			t.Fatal(err)
		}
	}
	requests := web.requests.Load()
	for _, from := range []string{"https://" + web.Addr + ":8443/", "http://" + web.Addr + ":8080/"} {
		got := try(t, p, web, from)
		if got.Gathered != "complete" || got.Answered == 0 || got.Secure != strings.HasPrefix(from, "https:") || got.Secure && !got.WebTransport {
			t.Errorf("from %s the page has hardly tried: %+v", from, got)
		}
		for _, bad := range append(got.Candidates, got.Protocols...) {
			if strings.Contains(bad, " udp ") || bad == "h3" {
				t.Errorf("from %s: %s", from, bad)
			}
		}
	}
	if web.requests.Load()-requests < 10 || web.sockets.Load() < 2 {
		t.Errorf("by its listener Chrome made only %d requests and %d WebSockets", web.requests.Load()-requests, web.sockets.Load())
	}
	if web.pings.Load() == 0 {
		t.Error("the site heard nothing of a click on <a ping>")
	}
	send(c, s, web, wire.mark)
	for _, what := range wire.none(t) {
		if !slices.Contains(triesAnyway, what) {
			t.Errorf("Chrome tried what the slot's rules refused: %s", what)
		}
	}

	policy(c, s, testenv.Fields{"CACertificates": trust, "QuicAllowed": true,
		"ProxySettings": testenv.Fields{"ProxyMode": "direct"}, "WebRtcIPHandling": "default", "NetworkPredictionOptions": 0})
	wire = watch(t, env, slot, "end of the slot's rules")
	testenv.Wait(t, time.Minute, "Chrome goes past its proxy", func() bool {
		return p.Goto(within(t, 20*time.Second), "http://"+web.Addr+":8080/") != nil && env.BrowserRefused(t, slot) > 0
	})
	requests, refused := web.requests.Load(), env.BrowserRefused(t, slot)
	// A page of the session's own, since no other is to be had.
	c.Output(s.Id, "(python3 -m http.server 8000 --bind 127.0.0.1 >/dev/null 2>&1 &); until curl -so /dev/null localhost:8000; do sleep 0.1; done")
	if err := p.Goto(within(t, 20*time.Second), "http://localhost:8000/"); err != nil {
		t.Fatal(err)
	}
	var got account
	if evaluate(t, p, web, &got); !got.WebTransport || got.Answered > 0 {
		t.Errorf("past its listener: %+v", got)
	}
	if n := env.BrowserRefused(t, slot) - refused; n < 20 {
		t.Errorf("the rules refused only %d packets of all that Chrome tried", n)
	}
	if n := web.requests.Load() - requests; n != 0 {
		t.Errorf("past its listener Chrome made %d requests", n)
	}
	send(c, s, web, wire.mark)
	tried := wire.none(t)
	for _, what := range []string{"TCP to %s:8080", "TCP to %s:8443", "IP protocol 17 to %s:8443", "IP protocol 17 to %s:3478"} {
		if what = fmt.Sprintf(what, web.Addr); !slices.Contains(tried, what) {
			t.Errorf("Chrome has not tried %s, which the rules should have refused: %q", what, tried)
		}
	}
}

// list is a JSON array.
type list = []any

// quicPort is where the session's own site, which Chrome reaches without its
// proxy, says that it speaks HTTP/3.
const quicPort = 9444

// offersQUIC starts such a site in the session's shell.
func offersQUIC(t *testing.T, c *testenv.Client, s api.Session, by *testenv.Authority) (url string) {
	t.Helper()
	cert, key := by.Server("127.0.0.1")
	c.Want(http.StatusOK, http.MethodPut, testenv.FilePath(s.Id, "pem"), strings.NewReader(string(cert)+string(key)), nil)
	c.Want(http.StatusOK, http.MethodPut, testenv.FilePath(s.Id, "site.py"), strings.NewReader(fmt.Sprintf(`
import http.server, ssl
class Site(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Alt-Svc", 'h3=":%d"; ma=86400')
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(b"<title>own</title>")
tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
tls.load_cert_chain("pem")
site = http.server.ThreadingHTTPServer(("127.0.0.1", 9443), Site)
site.socket = tls.wrap_socket(site.socket, server_side=True)
site.serve_forever()
`, quicPort)), nil)
	c.Output(s.Id, "(python3 site.py >/dev/null 2>&1 &); until curl -sko /dev/null https://127.0.0.1:9443; do sleep 0.1; done")
	return "https://127.0.0.1:9443/"
}

// policy is what the root of a session can tell its Chrome, which looks for it at
// its start, and at changes from then on.
func policy(c *testenv.Client, s api.Session, all testenv.Fields) {
	text, _ := json.Marshal(all) // texts and numbers
	c.Output(s.Id, fmt.Sprintf("sudo mkdir -p /etc/chromium/policies/managed; echo '%s' | sudo tee /etc/chromium/policies/managed/all.json", text))
}

// restarted gives the page of a new Chrome.
func restarted(t *testing.T, c *testenv.Client, s api.Session) *cdpclient.Page {
	t.Helper()
	before, _ := testenv.FirstPage(t, *s.ConnectUrl)
	c.Exec(s.Id, "sudo pkill -9 -o -f '[c]hrom'")
	select {
	case <-before.Done():
	case <-time.After(20 * time.Second):
		t.Fatal("Chrome does not die")
	}
	ctx := within(t, time.Minute)
	cdp := chromeAgain(ctx, t, s)
	t.Cleanup(func() { cdp.Close() })
	p, err := cdp.FirstPage(ctx)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// try opens a page and has it try everything.
func try(t *testing.T, p *cdpclient.Page, web *origin, url string) (got account) {
	t.Helper()
	if err := p.Goto(within(t, 20*time.Second), url); err != nil {
		t.Fatal(err)
	}
	if err := p.Click(within(t, 20*time.Second), "#a"); err != nil {
		t.Fatal(err)
	}
	evaluate(t, p, web, &got)
	return got
}

func evaluate(t *testing.T, p *cdpclient.Page, web *origin, got *account) {
	t.Helper()
	if err := p.Evaluate(within(t, time.Minute), fmt.Sprintf("(%s)(%q)", tries, web.Addr), got); err != nil {
		t.Fatal(err)
	}
}

// send has the shell, which may, send a datagram out of the slot.
func send(c *testenv.Client, s api.Session, web *origin, text string) {
	c.Output(s.Id, fmt.Sprintf(`python3 -c "
import socket
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20)
s.sendto(b\"%[1]s\", ('%[2]s', 7)); assert s.recv(100) == b\"%[1]s\""`, text, web.Addr))
}
