package egress

import (
	"bufio"
	"encoding/base64"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// upstream is a proxy that notes each login and counts every byte. It asks for
// no particular login, and knows sites by name.
type upstream struct {
	addr     string
	ln       net.Listener
	up, down atomic.Int64 // payload, as proxy data is counted

	mu     sync.Mutex // guards what follows
	site   string     // where every name leads
	seen   []visit
	conns  map[net.Conn]struct{}
	answer func(target string) string // a whole answer instead of a tunnel; "": none
}

// visit is one CONNECT or plain request.
type visit struct{ login, target string }

func mustListen(addr string) net.Listener {
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		panic(err)
	}
	return ln
}

func startUpstream(ln net.Listener) *upstream {
	u := &upstream{addr: ln.Addr().String(), ln: ln, conns: map[net.Conn]struct{}{}}
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go u.serve(conn)
		}
	}()
	return u
}

func (u *upstream) stop() {
	u.ln.Close()
	u.mu.Lock()
	defer u.mu.Unlock()
	for c := range u.conns {
		c.Close()
	}
}

// leadTo makes every name lead to a site, and forgets what was.
func (u *upstream) leadTo(site string, answer func(target string) string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	u.site, u.answer, u.seen = site, answer, nil
}

// idle says whether no connection is open.
func (u *upstream) idle() bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	return len(u.conns) == 0
}

// logins of the connections to a target so far.
func (u *upstream) logins(target string) (out []string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for _, v := range u.seen {
		if strings.HasPrefix(v.target, target) {
			out = append(out, v.login)
		}
	}
	return out
}

// lastLogin is the one of the newest connection to a target.
func (u *upstream) lastLogin(t *testing.T, target string) string {
	t.Helper()
	all := u.logins(target)
	if len(all) == 0 {
		t.Fatalf("the provider saw no connection to %s: %v", target, u.seen)
	}
	return all[len(all)-1]
}

func (u *upstream) serve(conn net.Conn) {
	u.mu.Lock()
	u.conns[conn] = struct{}{}
	u.mu.Unlock()
	defer func() {
		conn.Close()
		u.mu.Lock()
		delete(u.conns, conn)
		u.mu.Unlock()
	}()
	in := &tally{Reader: conn}
	br := bufio.NewReader(in)
	for {
		began := in.n.Load() - int64(br.Buffered())
		r, err := http.ReadRequest(br)
		if err != nil {
			return
		}
		site, answer := u.note(r)
		switch {
		case answer != "":
			_, _ = io.WriteString(conn, answer)
			return
		case r.Method == http.MethodConnect:
			u.tunnel(conn, br, site)
			return
		}
		login := ""
		if v := r.Header.Get("Proxy-Authorization"); v != "" {
			login = "Proxy-Authorization: " + v + "\r\n"
		}
		if !u.forward(conn, r, site) {
			return
		}
		_, _ = io.Copy(io.Discard, r.Body)
		u.up.Add(in.n.Load() - int64(br.Buffered()) - began - int64(len(login)))
	}
}

func (u *upstream) note(r *http.Request) (site, answer string) {
	target := r.Host
	if r.Method == http.MethodConnect {
		target = r.RequestURI
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	u.seen = append(u.seen, visit{login(r), target})
	if u.answer != nil {
		answer = u.answer(target)
	}
	site = u.site
	if _, port, err := net.SplitHostPort(target); err == nil {
		site = net.JoinHostPort(site, port)
	}
	return site, answer
}

func login(r *http.Request) string {
	b, _ := base64.StdEncoding.DecodeString(strings.TrimPrefix(r.Header.Get("Proxy-Authorization"), "Basic "))
	name, _, _ := strings.Cut(string(b), ":")
	return name
}

func (u *upstream) forward(conn net.Conn, r *http.Request, site string) bool {
	r.URL.Host, r.RequestURI = site, ""
	r.Header.Del("Proxy-Authorization")
	resp, err := bare.RoundTrip(r)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	return resp.Write(&counting{conn, &u.down}) == nil
}

// bare makes a connection for each request.
var bare = &http.Transport{DisableKeepAlives: true, DisableCompression: true}

func (u *upstream) tunnel(conn net.Conn, br *bufio.Reader, site string) {
	far, err := net.DialTimeout("tcp", site, 10*time.Second)
	if err != nil {
		_, _ = io.WriteString(conn, "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
		return
	}
	defer far.Close()
	if _, err := io.WriteString(conn, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
		return
	}
	over := make(chan struct{})
	go func() {
		defer close(over)
		_, _ = io.Copy(&counting{conn, &u.down}, far)
		_ = conn.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(&counting{far, &u.up}, br)
	_ = far.(*net.TCPConn).CloseWrite()
	<-over
}

// tally counts what is read.
type tally struct {
	io.Reader
	n atomic.Int64
}

func (r *tally) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.n.Add(int64(n))
	return n, err
}

// counting counts what is written.
type counting struct {
	io.Writer
	n *atomic.Int64
}

func (w *counting) Write(p []byte) (int, error) {
	n, err := w.Writer.Write(p)
	w.n.Add(int64(n))
	return n, err
}

// distinct gives each text once.
func distinct(all []string) []string { return slices.Compact(slices.Sorted(slices.Values(all))) }
