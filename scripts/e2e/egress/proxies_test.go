package egress

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
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
