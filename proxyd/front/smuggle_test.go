package front

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// smuggling are requests that two parsers may take for one or for two. SITE is
// the site, SECOND a whole request that stands where it is no request by RFC 9112,
// or where the first one must be refused.
var smuggling = map[string]string{
	"CL.TE":                   "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\nLEN\r\nSECOND\r\n0\r\n\r\n",
	"TE.CL":                   "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\nLEN\r\nSECOND\r\n0\r\n\r\n",
	"CL 0 and TE":             "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\nLEN\r\nSECOND\r\n0\r\n\r\n",
	"TE space colon":          "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding : chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nSECOND",
	"TE twice":                "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\nContent-Length: 5\r\n\r\n0\r\n\r\nSECOND",
	"TE list":                 "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked, identity\r\nContent-Length: 5\r\n\r\n0\r\n\r\nSECOND",
	"TE unknown":              "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: xchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nSECOND",
	"TE vertical tab":         "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: \x0bchunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\nSECOND",
	"TE folded":               "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding:\r\n chunked\r\nContent-Length: LEN10\r\n\r\nLEN\r\nSECOND\r\n0\r\n\r\n",
	"TE in a fold":            "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nX: a\r\n Transfer-Encoding: chunked\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"TE in HTTP/1.0":          "POST http://SITE/first HTTP/1.0\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\nContent-Length: 4\r\n\r\nLEN\r\nSECOND\r\n0\r\n\r\n",
	"CL differ":               "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: 0\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"CL list":                 "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: 0, LEN10\r\n\r\nSECOND",
	"CL plus":                 "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: +0\r\n\r\nSECOND",
	"CL minus":                "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: -1\r\n\r\nSECOND",
	"CL hex":                  "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: 0x0\r\n\r\nSECOND",
	"CL overflow":             "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: 18446744073709551616\r\n\r\nSECOND",
	"CL after a bare CR":      "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nX: a\rContent-Length: LEN10\r\n\r\nSECOND",
	"CL named by Connection":  "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nConnection: Content-Length\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"TE named by Connection":  "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nConnection: Transfer-Encoding\r\nTransfer-Encoding: chunked\r\n\r\nLEN\r\nSECOND\r\n0\r\n\r\n",
	"GET with a body":         "GET http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"HEAD with a body":        "HEAD http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"chunk size too large":    "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000000\r\nSECOND",
	"chunk size with 0x":      "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\n\r\n0x0\r\n\r\nSECOND",
	"chunk size negative":     "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\n\r\n-0\r\n\r\nSECOND",
	"chunk without its end":   "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabcd\r\n0\r\n\r\nSECOND",
	"chunk extension with LF": "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\n\r\n2;\nxx\r\nLEN\r\n0\r\n\r\nSECOND\r\n0\r\n\r\n",
	"trailer with a length":   "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\nLEN\r\nSECOND\r\n0\r\nContent-Length: 3\r\n\r\n",
	"NUL in a field":          "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nX: a\x00b\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"space in a field's name": "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent Length: 0\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"no field name":           "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\n: x\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"fold before fields":      "POST http://SITE/first HTTP/1.1\r\n Content-Length: 0\r\nHost: SITE\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"two hosts":               "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nHost: other.test\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"another host":            "POST http://SITE/first HTTP/1.1\r\nHost: other.test\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"version unknown":         "POST http://SITE/first HTTP/1.10\r\nHost: SITE\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"version 2":               "POST http://SITE/first HTTP/2.0\r\nHost: SITE\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"line ends in a target":   "POST http://SITE/first?\r\nX: HTTP/1.1\r\nHost: SITE\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"Expect":                  "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nExpect: 100-continue\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"upgrade that is refused": "GET http://SITE/first HTTP/1.1\r\nHost: SITE\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"upgrade to h2c":          "GET http://SITE/first HTTP/1.1\r\nHost: SITE\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"a long field":            "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nX: LONG\r\nContent-Length: LEN10\r\n\r\nSECOND",
	"underscores":             "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent_Length: 0\r\nContent-Length: LEN10\r\n\r\nSECOND",
}

// plainly are requests that are two and must stay so.
var plainly = map[string]string{
	"two requests":      "GET http://SITE/first HTTP/1.1\r\nHost: SITE\r\n\r\nSECOND",
	"bare LF":           "GET http://SITE/first HTTP/1.1\nHost: SITE\n\nSECOND",
	"CL twice the same": "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: 3\r\nContent-Length: 3\r\n\r\nabcSECOND",
	"empty lines ahead": "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nContent-Length: 0\r\n\r\n\r\n\r\nSECOND",
	"chunks":            "POST http://SITE/first HTTP/1.1\r\nHost: SITE\r\nTransfer-Encoding: chunked\r\n\r\n3;a=b\r\nabc\r\n0\r\nX: y\r\n\r\nSECOND",
}

// raw fills a case in for a site, host:port and the beginning of paths.
func raw(text, site string) string {
	host, _, _ := strings.Cut(site, "/")
	second := "GET http://" + site + "/second HTTP/1.1\r\nHost: " + host + "\r\n\r\n"
	return strings.NewReplacer("//SITE", "//"+site, "SITE", host, "SECOND", second, "LEN10", fmt.Sprint(len(second)), "LEN", fmt.Sprintf("%x", len(second)),
		"LONG", strings.Repeat("x", 40<<10)).Replace(text)
}

// Whatever a client makes of framing, haproxy behind proxyd sees as many requests
// as proxyd decided on, and never one that hid in another; as a site, and as a
// customer's proxy.
func TestHAProxySeesTheRequestsThatProxydDecidedOn(t *testing.T) {
	r := newRigWith(t, 512, time.Second, upstream.Config{})
	o := newOrigin(t)
	through := proxylink.Pass{SessionID: "through", Routes: []proxylink.Route{{Rule: egress.Rule{Type: egress.Custom, Server: "http://" + o.haproxy}, Password: "p"}}}
	for way, pass := range map[string][]byte{"straight": r.pass(proxylink.Pass{SessionID: "straight"}), "through": r.pass(through)} {
		for name, text := range smuggling {
			t.Run(way+" "+name, func(t *testing.T) {
				got := o.try(t, r.dialWith(way, pass), text)
				if slices.Contains(got, "/second") {
					t.Errorf("the second request got through: %q", got)
				}
			})
		}
		for name, text := range plainly {
			t.Run(way+" "+name, func(t *testing.T) {
				if got := o.try(t, r.dialWith(way, pass), text); !slices.Equal(got, []string{"/first", "/second"}) {
					t.Errorf("the site saw %q", got)
				}
			})
		}
	}
}

// The same with haproxy as the client: what it takes for one request is one here.
func TestProxydSeesTheRequestsThatHAProxyForwards(t *testing.T) {
	r := newRig(t, 512, time.Second)
	o := newOrigin(t)
	link := serveTCP(t, func(c *net.TCPConn) { // what hostd does
		conn, err := proxylink.Dial(context.Background(), r.addr, proxylink.Hello{Proof: r.secret.Proof(), Host: "host", SessionID: "s", Epoch: 1,
			Pass: r.pass(proxylink.Pass{SessionID: "s"})})
		if err != nil {
			t.Error(err)
			return
		}
		_ = proxylink.Relay(context.Background(), c, conn, nil, nil)
	})
	front := startHAProxy(t, link)
	for _, cases := range []map[string]string{smuggling, plainly} {
		for name, text := range cases {
			t.Run(name, func(t *testing.T) {
				conn, err := net.Dial("tcp", front)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close()
				got := o.tryAt(t, conn, text, o.addr)
				if _, two := plainly[name]; !two && slices.Contains(got, "/second") {
					t.Errorf("the second request got through: %q", got)
				}
			})
		}
	}
}

// origin is a site behind haproxy that notes the requests it gets.
type origin struct {
	addr, haproxy string

	mu    sync.Mutex // guards what follows
	tried int
	now   string   // begins the paths of this try
	seen  []string // the rest of them
}

func newOrigin(t *testing.T) *origin {
	o := &origin{}
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if _, err := io.Copy(io.Discard, r.Body); err != nil {
			return // broken off: no request
		}
		o.mu.Lock()
		defer o.mu.Unlock()
		path, of := strings.CutPrefix(r.URL.Path, o.now)
		if of { // else of a try that is over
			o.seen = append(o.seen, path)
		}
		w.Header().Set("X-Path", path)
	}))
	t.Cleanup(srv.Close)
	o.addr = strings.TrimPrefix(srv.URL, "http://")
	o.haproxy = startHAProxy(t, o.addr)
	return o
}

// try says text to proxyd, then asks for /last, and gives the paths that the site
// saw before that. There must be an answer for each.
func (o *origin) try(t *testing.T, conn net.Conn, text string) []string {
	t.Helper()
	return o.tryAt(t, conn, text, o.haproxy)
}

func (o *origin) tryAt(t *testing.T, conn net.Conn, text, site string) []string {
	t.Helper()
	o.mu.Lock()
	o.tried++
	o.now, o.seen = fmt.Sprint("/", o.tried), nil
	o.mu.Unlock()
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	said := make(chan struct{})
	go func() {
		defer close(said)
		_, _ = io.WriteString(conn, raw(text, site+o.now)+"GET http://"+site+o.now+"/last HTTP/1.1\r\nHost: "+site+"\r\nConnection: close\r\n\r\n")
	}()
	answered := answers(conn, strings.HasPrefix(text, "HEAD"))
	conn.Close()
	<-said
	o.mu.Lock()
	defer o.mu.Unlock()
	if !slices.Equal(answered, o.seen) {
		t.Errorf("the site saw %q, the answers are for %q", o.seen, answered)
	}
	return slices.DeleteFunc(slices.Clone(o.seen), func(path string) bool { return path == "/last" })
}

// answers are the paths of the site's answers, in order.
func answers(conn net.Conn, head bool) (paths []string) {
	br := bufio.NewReader(conn)
	for {
		method := http.MethodGet
		if head && len(paths) == 0 {
			method = http.MethodHead
		}
		resp, err := http.ReadResponse(br, &http.Request{Method: method})
		if err != nil {
			return paths
		}
		if _, err := io.Copy(io.Discard, resp.Body); err != nil {
			return paths
		}
		if path := resp.Header.Get("X-Path"); path != "" {
			paths = append(paths, path)
		}
	}
}

// startHAProxy starts haproxy in front of a server, with a listener that is
// there already: nobody else can take its port.
func startHAProxy(t *testing.T, server string) (addr string) {
	t.Helper()
	binary := findHAProxy(t)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	listener, err := ln.(*net.TCPListener).File()
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	config := filepath.Join(t.TempDir(), "haproxy.cfg")
	text := fmt.Sprintf(`global
  nbthread 1
  tune.bufsize 131072
defaults
  mode http
  timeout connect 5s
  timeout client 20s
  timeout server 20s
  timeout http-request 20s
listen all
  bind fd@3
  http-reuse never
  server one %s
`, server)
	if err := os.WriteFile(config, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	var said strings.Builder
	cmd := exec.Command(binary, "-db", "-f", config)
	cmd.Stdout, cmd.Stderr = &said, &said
	cmd.ExtraFiles = []*os.File{listener} // 3
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			t.Logf("haproxy: %s", &said)
		}
	})
	return ln.Addr().String()
}

// findHAProxy skips on a developer's computer, by name, and fails in CI.
func findHAProxy(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"haproxy", "/usr/sbin/haproxy"} {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	if os.Getenv("CI") == "true" {
		t.Fatal("missing: haproxy; make test brings it")
	}
	t.Skip("missing: haproxy; make test brings it")
	return ""
}
