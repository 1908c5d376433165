package e2e

import (
	"crypto/tls"
	_ "embed"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/cdpclient"
)

// tries is a function that has a page try all ways out that a browser has.
//
//go:embed testdata/tries.js
var tries string

// tried is what tries says of itself.
type tried struct {
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

// No packet of Chrome's goes anywhere but to its egress listener. Two guards
// stand, and each is tried without the other: Chrome does not even try, whatever a
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
	policy(c, s, testenv.Fields{"CACertificates": list{base64.StdEncoding.EncodeToString(by.Cert.Raw)}})
	cdp, p := testenv.FirstPage(t, *s.ConnectUrl)
	trusts(t, p, "https://"+web.Addr+":8443/")

	wire := watch(t, env, slot, "end of Chrome's own guards")
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
	if web.pings.Load() > 0 {
		t.Error("a click was told to <a ping>")
	}
	if n := env.BrowserRefused(t, slot); n != 0 {
		t.Errorf("Chrome tried %d packets that the slot's rules refused", n)
	}
	send(c, s, web, wire.mark)
	wire.none(t)

	policy(c, s, testenv.Fields{"CACertificates": list{base64.StdEncoding.EncodeToString(by.Cert.Raw)}, "QuicAllowed": true,
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
	var got tried
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
	wire.none(t)
	cdp.Close()
}

// list is a JSON array.
type list = []any

// policy is what the root of a session can tell its Chrome; Chrome looks at it
// again by itself.
func policy(c *testenv.Client, s api.Session, all testenv.Fields) {
	text, _ := json.Marshal(all) // texts and numbers
	c.Output(s.Id, fmt.Sprintf("sudo mkdir -p /etc/chromium/policies/managed; echo '%s' | sudo tee /etc/chromium/policies/managed/all.json", text))
}

// trusts waits until Chrome takes a site's certificate.
func trusts(t *testing.T, p *cdpclient.Page, url string) {
	t.Helper()
	testenv.Wait(t, time.Minute, "Chrome trusts the authority of "+url, func() bool { return p.Goto(within(t, 20*time.Second), url) == nil })
}

// try opens a page and has it try everything.
func try(t *testing.T, p *cdpclient.Page, web *origin, url string) (got tried) {
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

func evaluate(t *testing.T, p *cdpclient.Page, web *origin, got *tried) {
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
