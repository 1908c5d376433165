package egress

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
)

// Login of the real proxies.
const (
	user     = "alice"
	password = "rabbit-7Q"
)

// proxy is a real proxy with a login on a computer of its own.
type proxy struct {
	url string
	log string // file of its accesses
}

// rule is the proxy as a setting, with more fields.
func (p proxy) rule(more testenv.Fields) testenv.Fields {
	f := testenv.Fields{"type": "custom", "server": p.url, "username": user, "password": password}
	for k, v := range more {
		f[k] = v
	}
	return f
}

// served counts the log's lines that name a site.
func (p proxy) served(site string) (n int) {
	b, _ := os.ReadFile(p.log)
	for line := range bytes.Lines(b) {
		if bytes.Contains(line, []byte(site)) {
			n++
		}
	}
	return n
}

// serves waits until the log names a site: squid writes it after the answer.
func (p proxy) serves(t *testing.T, site string) {
	t.Helper()
	testenv.Wait(t, 20*time.Second, p.url+" has served "+site, func() bool { return p.served(site) > 0 })
}

// startSquid starts squid on a web host.
func startSquid(t *testing.T, w *testenv.WebHost) proxy {
	t.Helper()
	dir := ownedBy(t, "proxy")
	p := proxy{url: "http://" + w.Addr + ":3128", log: filepath.Join(dir, "access.log")}
	hash, err := exec.Command("openssl", "passwd", "-apr1", password).Output()
	if err != nil {
		t.Fatal(err)
	}
	write(t, filepath.Join(dir, "users"), user+":"+string(hash))
	config := filepath.Join(dir, "squid.conf")
	write(t, config, fmt.Sprintf(`http_port %s:3128
auth_param basic program /usr/lib/squid/basic_ncsa_auth %[2]s/users
auth_param basic children 1 startup=1
acl known proxy_auth REQUIRED
http_access allow known
http_access deny all
access_log stdio:%[2]s/access.log
cache_log %[2]s/cache.log
pid_filename %[2]s/pid
coredump_dir %[2]s
cache deny all
netdb_filename none
pinger_enable off
max_filedescriptors 2048
shutdown_lifetime 0 seconds
visible_hostname squid.test
`, w.Addr, dir))
	serveOn(t, w, p.url, filepath.Join(dir, "cache.log"), "squid", "-N", "-f", config)
	return p
}

// startTinyproxy starts tinyproxy on a web host.
func startTinyproxy(t *testing.T, w *testenv.WebHost) proxy {
	t.Helper()
	dir := ownedBy(t, "nobody")
	p := proxy{url: "http://" + w.Addr + ":8888", log: filepath.Join(dir, "log")}
	config := filepath.Join(dir, "conf")
	write(t, config, fmt.Sprintf("Port 8888\nListen %s\nTimeout 120\nBasicAuth %s %s\nLogFile %q\nLogLevel Connect\nMaxClients 100\n", w.Addr, user, password, p.log))
	serveOn(t, w, p.url, p.log, "tinyproxy", "-d", "-c", config)
	return p
}

// ownedBy is a folder that a proxy may write in, whoever it becomes.
func ownedBy(t *testing.T, name string) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "berth-egress")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	if out, err := exec.Command("chown", name, dir).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return dir
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// serveOn runs a server on a web host until the test ends, and waits for its port.
func serveOn(t *testing.T, w *testenv.WebHost, url, log, name string, args ...string) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	cmd := w.Command(ctx, name, args...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) } // helpers too
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { defer close(ended); _ = cmd.Wait() }()
	t.Cleanup(func() { cancel(); <-ended })
	addr := strings.TrimPrefix(url, "http://")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if conn, err := net.DialTimeout("tcp", addr, time.Second); err == nil {
			conn.Close()
			return
		}
		select {
		case <-ended:
			t.Fatalf("%s ended: %s", name, &said)
		default:
		}
		if time.Now().After(deadline) {
			b, _ := os.ReadFile(log)
			t.Fatalf("%s does not listen: %s", name, b)
		}
	}
}

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
