package front

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/egress"
)

// rawSite answers each request on a connection with answer(request), raw, and
// keeps what it was sent.
type rawSite struct {
	addr  string
	mu    sync.Mutex
	got   []string
	conns int
}

// newRawSite reads requests head and body by itself: what it keeps is what
// was on the wire.
func newRawSite(t *testing.T, answer string) *rawSite {
	s := &rawSite{}
	s.addr = serveTCP(t, func(c *net.TCPConn) {
		s.mu.Lock()
		s.conns++
		s.mu.Unlock()
		var wire bytes.Buffer
		r := bufio.NewReader(io.TeeReader(c, &wire))
		for {
			req, err := http.ReadRequest(r)
			if err != nil {
				return
			}
			_, _ = io.Copy(io.Discard, req.Body)
			s.mu.Lock()
			s.got = append(s.got, wire.String())
			s.mu.Unlock()
			wire.Reset()
			_, _ = io.WriteString(c, answer)
		}
	})
	return s
}

func (s *rawSite) requests() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.got...)
}

func (s *rawSite) connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.conns
}

const okAnswer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX-Site: yes\r\nConnection: keep-alive, X-Hop\r\nX-Hop: 1\r\n\r\nok"

func TestPlainHTTPIsForwardedWithoutHopByHopFields(t *testing.T) {
	r := newRig(t, 512, time.Second)
	site := newRawSite(t, okAnswer)
	conn := r.dial("s")
	resp := send(t, conn, "GET http://"+site.addr+"/a%2Fb?x=1;y=%zz HTTP/1.1\r\nHost: other.example\r\nUser-Agent: test\r\nAccept: */*\r\n"+
		"Proxy-Connection: keep-alive\r\nProxy-Authorization: Basic c2VjcmV0\r\nConnection: X-Drop, keep-alive\r\nX-Drop: 1\r\nX-Forwarded-For: 1.2.3.4\r\nTE: trailers\r\nKeep-Alive: 300\r\n\r\n")
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != 200 || string(body) != "ok" || resp.Header.Get("X-Site") != "yes" || resp.Header.Get("X-Hop") != "" {
		t.Fatalf("%s %v %q %v", resp.Status, resp.Header, body, err)
	}
	got := site.requests()[0]
	line, rest, _ := strings.Cut(got, "\r\n")
	if line != "GET /a%2Fb?x=1;y=%zz HTTP/1.1" {
		t.Errorf("request line %q", line)
	}
	for _, want := range []string{"Host: " + site.addr + "\r\n", "User-Agent: test\r\n", "X-Forwarded-For: 1.2.3.4\r\n"} { // RFC 9112 3.2.2: Host from the target
		if !strings.Contains(rest, want) {
			t.Errorf("no %q in %q", want, got)
		}
	}
	for _, name := range []string{"Proxy-", "X-Drop", "Keep-Alive", "other.example", "Via", "Accept-Encoding"} {
		if strings.Contains(rest, name) {
			t.Errorf("%s got through: %q", name, got)
		}
	}
}

// Keep-alive: each request's target is decided anew.
func TestPlainKeepAliveDecidesEachRequest(t *testing.T) {
	r := newRig(t, 512, time.Second)
	one, two := newRawSite(t, okAnswer), newRawSite(t, okAnswer)
	conn := r.dial("s")
	in := bufio.NewReader(conn)
	for i, c := range []struct {
		url    string
		status int
		reason string
	}{
		{"http://" + one.addr + "/1", 200, ""},
		{"http://" + two.addr + "/2", 200, ""},
		{"http://10.0.0.1/", 403, "bad_target"},
		{"http://127.0.0.1:587/", 403, "port_blocked"},
		{"https://" + one.addr + "/", 403, "bad_target"},
		{"/origin-form", 403, "bad_target"},
		{"http://" + nobody(t) + "/", 502, "upstream_unreachable"},
		{"http://" + one.addr + "/3", 200, ""},
	} {
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: x\r\n\r\n", c.url)
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatalf("%d %s: %v", i, c.url, err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if resp.StatusCode != c.status || resp.Header.Get(egress.ReasonHeader) != c.reason || resp.Close {
			t.Errorf("%s: %s %v", c.url, resp.Status, resp.Header)
		}
	}
	if len(one.requests()) != 2 || len(two.requests()) != 1 {
		t.Errorf("sites saw %d and %d requests", len(one.requests()), len(two.requests()))
	}
	conn.Close()
	c := r.settled("s")
	up := int64(len(strings.Join(append(one.requests(), two.requests()...), "")))
	if c != (meter.Counts{Up: up, Down: 3 * int64(len(okAnswer)), Connections: 1}) {
		t.Errorf("%+v, want %d up, %d down: whole messages", c, up, 3*len(okAnswer))
	}
}

// What two parsers could frame differently never reaches a site as it was.
func TestSmugglingIsDefused(t *testing.T) {
	r := newRig(t, 512, time.Second)
	site := newRawSite(t, okAnswer)
	head := "POST http://" + site.addr + "/first HTTP/1.1\r\nHost: x\r\n"
	smuggled := "GET http://" + site.addr + "/smuggled HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
	for name, raw := range map[string]string{
		"two lengths":       head + "Content-Length: 5\r\nContent-Length: 0\r\n\r\nhello",
		"length with plus":  head + "Content-Length: +5\r\n\r\nhello",
		"xchunked":          head + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		"chunked twice":     head + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
		"chunked, identity": head + "Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
		"space before":      head + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
		"fold":              head + "X: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n",
		"bad chunk":         head + "Transfer-Encoding: chunked\r\n\r\n-1\r\n\r\n",
		"bare CR":           head + "X: a\rTransfer-Encoding: chunked\r\n\r\n",
	} {
		conn := r.dial("s")
		before := len(site.requests())
		_, _ = io.WriteString(conn, raw+smuggled)
		_, _ = io.ReadAll(conn)
		for _, got := range site.requests()[before:] {
			if strings.Contains(got, "/first") && strings.Contains(got, "/smuggled") || strings.Count(strings.ToLower(got), "transfer-encoding") > 1 {
				t.Errorf("%s: the site saw %q", name, got)
			}
		}
	}
	// Both framings: Transfer-Encoding counts, Content-Length does not go on (RFC 9112 6.1).
	send(t, r.dial("s"), head+"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n")
	all := site.requests()
	if last := all[len(all)-1]; strings.Contains(last, "Content-Length") || !strings.HasSuffix(last, "\r\n\r\n5\r\nhello\r\n0\r\n\r\n") {
		t.Errorf("both framings: the site saw %q", last)
	}
}

func TestUpgradeThroughPlainProxy(t *testing.T) {
	r := newRig(t, 512, time.Second)
	addr := serveTCP(t, func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		req, err := http.ReadRequest(in)
		if err != nil || req.Header.Get("Upgrade") != "websocket" || req.Header.Get("Connection") != "Upgrade" {
			_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n")
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n")
		_, _ = io.Copy(c, in)
	})
	for _, scheme := range []string{"http", "ws"} {
		conn := r.dial(scheme)
		fmt.Fprintf(conn, "GET %s://%s/chat HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n", scheme, addr)
		in := bufio.NewReader(conn)
		resp, err := http.ReadResponse(in, nil)
		if err != nil || resp.StatusCode != 101 {
			t.Fatalf("%v %v", resp, err)
		}
		for _, word := range []string{"ping", "pong"} {
			_, _ = io.WriteString(conn, word)
			b := make([]byte, 4)
			if _, err := io.ReadFull(in, b); err != nil || string(b) != word {
				t.Fatalf("%q %v", b, err)
			}
		}
		conn.Close()
		if c := r.settled(scheme); c.Up < 8 || c.Down < 8 {
			t.Errorf("%+v", c)
		}
	}
}

// A browser's use: bodies up and down, streaming, HEAD, redirects untouched.
func TestPlainHTTPBodies(t *testing.T) {
	r := newRig(t, 512, time.Second)
	flushed := make(chan struct{})
	site := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		switch req.URL.Path {
		case "/stream":
			_, _ = io.WriteString(w, "first")
			w.(http.Flusher).Flush()
			<-flushed
			_, _ = io.WriteString(w, "second")
		case "/redirect":
			http.Redirect(w, req, "/elsewhere", http.StatusFound)
		default:
			_, _ = io.Copy(w, req.Body)
		}
	}))
	defer site.Close()
	client := r.client("s")
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	big := strings.Repeat("berth ", 1<<18)
	resp, err := client.Post(site.URL+"/echo", "text/plain", strings.NewReader(big))
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || string(got) != big {
		t.Fatalf("echo of %d bytes: %d, %v", len(big), len(got), err)
	}
	if resp, err = client.Get(site.URL + "/redirect"); err != nil || resp.StatusCode != 302 || resp.Header.Get("Location") != "/elsewhere" {
		t.Fatalf("%v %v", resp, err)
	}
	_, _ = io.Copy(io.Discard, resp.Body) // closing early would give the connection up
	resp.Body.Close()
	if resp, err = client.Head(site.URL + "/"); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %v", resp, err)
	}
	resp.Body.Close()
	if resp, err = client.Get(site.URL + "/stream"); err != nil {
		t.Fatal(err)
	}
	first := make([]byte, 5)
	if _, err := io.ReadFull(resp.Body, first); err != nil || string(first) != "first" { // before the site is done
		t.Fatalf("%q %v", first, err)
	}
	close(flushed)
	rest, err := io.ReadAll(resp.Body)
	resp.Body.Close()
	if err != nil || string(rest) != "second" {
		t.Fatalf("%q %v", rest, err)
	}
	if c := r.meter.Session("s"); c.Connections != 1 || c.Up < int64(len(big)) || c.Down < int64(len(big)) {
		t.Errorf("%+v", c)
	}
}

// CONNECT after plain requests on one connection.
func TestConnectAfterPlain(t *testing.T) {
	r := newRig(t, 512, time.Second)
	site, target := newRawSite(t, okAnswer), echo(t)
	conn := r.dial("s")
	in := bufio.NewReader(conn)
	fmt.Fprintf(conn, "GET http://%s/ HTTP/1.1\r\nHost: x\r\n\r\n", site.addr)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(io.Discard, resp.Body)
	fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: x\r\n\r\nearly", target)
	resp, err = http.ReadResponse(in, &http.Request{Method: "CONNECT"})
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %v", resp, err)
	}
	_ = conn.CloseWrite()
	if got, err := io.ReadAll(in); err != nil || string(got) != "early" {
		t.Fatalf("%q %v", got, err)
	}
	r.settled("s")
}

// The site's connection goes when the client's does.
func TestPlainClientThatLeaves(t *testing.T) {
	r := newRig(t, 512, time.Second)
	seen, gone := make(chan struct{}), make(chan error, 1)
	addr := serveTCP(t, func(c *net.TCPConn) {
		if _, err := http.ReadRequest(bufio.NewReader(c)); err != nil {
			return
		}
		close(seen)
		_, err := c.Read(make([]byte, 1))
		gone <- err
	})
	conn := r.dial("s")
	fmt.Fprintf(conn, "GET http://%s/slow HTTP/1.1\r\nHost: x\r\n\r\n", addr)
	<-seen
	conn.Close()
	if err := <-gone; err == nil {
		t.Error("the site got bytes")
	}
	r.settled("s")
}

// A site that answers before the body is over is heard at once.
func TestAnswerBeforeTheBodyEnds(t *testing.T) {
	r := newRig(t, 512, time.Second)
	addr := serveTCP(t, func(c *net.TCPConn) {
		in := bufio.NewReader(c)
		if _, err := http.ReadRequest(in); err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n")
		_, _ = io.Copy(io.Discard, in)
	})
	conn := r.dial("s")
	resp := send(t, conn, "POST http://"+addr+"/ HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
	got := make([]byte, 2)
	if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != "hi" {
		t.Fatalf("%q %v", got, err)
	}
	conn.Close()
	r.settled("s")
}
