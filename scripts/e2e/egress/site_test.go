package egress

import (
	"archive/zip"
	"bytes"
	"crypto/rand"
	"crypto/sha1"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"archive/tar"
	"compress/gzip"

	"github.com/berth-dev/berth/scripts/testenv"
)

// sites are the names under which a web host's own proxies know it; the last
// parts of them are for tests that need several sites.
var sites = []string{"curl.test", "wget.test", "git.test", "pip.test", "npm.test", "apt.test", "chrome.test", "tls.test", "socks.test",
	"one.test", "two.test", "three.test"}

// site is a web site on ports 8080 and, with TLS, 8443 of a web host. Who asks
// it through a proxy that runs there comes from its own address.
type site struct {
	*testenv.WebHost
	http, tls int

	sent     atomic.Int64  // bytes of bodies of /bytes
	arrived  chan struct{} // gets one for each request of /gate
	gate     chan struct{} // /gate sends its second half when it can take one
	requests atomic.Int64

	strangers atomic.Int64 // requests from elsewhere than the site's own computer
}

const half = 1 << 20 // bytes, of /gate

func newSite(t *testing.T, env *testenv.Env) *site {
	t.Helper()
	s := &site{WebHost: env.AllowedWeb(t), http: 8080, tls: 8443, arrived: make(chan struct{}, 16), gate: make(chan struct{}, 16)}
	s.name(t)
	mux := s.mux(t)
	for port, withTLS := range map[int]bool{s.http: false, s.tls: true} {
		srv := httptest.NewUnstartedServer(mux)
		srv.Listener.Close()
		srv.Listener = s.Listen(t, port)
		if withTLS {
			srv.StartTLS()
		} else {
			srv.Start()
		}
		t.Cleanup(func() { srv.CloseClientConnections(); srv.Close() })
	}
	return s
}

// name gives the web host a hosts file: ip-netns(8) lays it over /etc/hosts.
func (s *site) name(t *testing.T) {
	t.Helper()
	dir := filepath.Join("/etc/netns", s.Link)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		os.RemoveAll(dir)
		_ = os.Remove("/etc/netns") // when nobody else has one
	})
	write(t, filepath.Join(dir, "hosts"), fmt.Sprintf("127.0.0.1 localhost\n%s %s\n", s.Addr, strings.Join(sites, " ")))
}

// at is an address of the site under one of its names.
func (s *site) at(name, path string) string { return fmt.Sprintf("http://%s:%d%s", name, s.http, path) }

func (s *site) mux(t *testing.T) http.Handler {
	mux := http.NewServeMux()
	for _, path := range []string{"/from", "/from/"} { // what follows tells requests apart in logs
		mux.HandleFunc(path, func(w http.ResponseWriter, r *http.Request) { fmt.Fprint(w, r.RemoteAddr) })
	}
	mux.HandleFunc("/upload", func(w http.ResponseWriter, r *http.Request) { n, _ := io.Copy(io.Discard, r.Body); fmt.Fprint(w, n) })
	mux.HandleFunc("/bytes/{n}", s.bytes)
	mux.HandleFunc("/gate", s.half)
	mux.Handle("/repo.git/", http.StripPrefix("/repo.git", http.FileServer(http.Dir(gitRepository(t)))))
	serveWheel(mux)
	serveNPM(mux)
	serveDeb(mux)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		if !strings.HasPrefix(r.RemoteAddr, s.Addr+":") {
			s.strangers.Add(1)
		}
		mux.ServeHTTP(w, r)
	})
}

// noise is what bodies are made of: nothing on the way can make it smaller.
var noise = func() []byte { b := make([]byte, 8<<20); _, _ = rand.Read(b); return b }()

func (s *site) bytes(w http.ResponseWriter, r *http.Request) {
	n, _ := strconv.Atoi(r.PathValue("n"))
	w.Header().Set("Content-Length", strconv.Itoa(n))
	sent, _ := w.Write(noise[:min(n, len(noise))])
	s.sent.Add(int64(sent))
}

// half sends half an answer, and the rest when the test says so.
func (s *site) half(w http.ResponseWriter, r *http.Request) {
	w.Header().Set("Content-Length", strconv.Itoa(2*half))
	_, _ = w.Write(noise[:half])
	_ = http.NewResponseController(w).Flush()
	s.arrived <- struct{}{}
	select {
	case <-s.gate:
		_, _ = w.Write(noise[:half])
	case <-r.Context().Done():
	case <-time.After(2 * time.Minute):
	}
}

// gitRepository is a bare repository that plain file serving is enough for.
func gitRepository(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	out, err := exec.Command("sh", "-ec", `cd "$1"; export HOME=$1 GIT_CONFIG_NOSYSTEM=1
git init -q work; cd work; echo hello from git > README; git add README
git -c user.name=t -c user.email=t@t commit -qm first; cd ..
git clone -q --bare work repo.git; git -C repo.git update-server-info`, "sh", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return filepath.Join(dir, "repo.git")
}

// serveWheel is a package index (PEP 503) with one wheel.
func serveWheel(mux *http.ServeMux) {
	var b bytes.Buffer
	z := zip.NewWriter(&b)
	for name, text := range map[string]string{
		"berthtest.py":                     "WORD = 'hello from pip'\n",
		"berthtest-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: berthtest\nVersion: 1.0\n",
		"berthtest-1.0.dist-info/WHEEL":    "Wheel-Version: 1.0\nGenerator: t\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
		"berthtest-1.0.dist-info/RECORD":   "",
	} {
		f, _ := z.Create(name)
		_, _ = io.WriteString(f, text)
	}
	_ = z.Close()
	const file = "berthtest-1.0-py3-none-any.whl"
	mux.HandleFunc("/simple/berthtest/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		fmt.Fprintf(w, "<!DOCTYPE html><a href='/files/%[1]s'>%[1]s</a>", file)
	})
	mux.HandleFunc("/files/"+file, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(b.Bytes()) })
}

// serveNPM is a registry with one package.
func serveNPM(mux *http.ServeMux) {
	var b bytes.Buffer
	zipped := gzip.NewWriter(&b)
	tarred := tar.NewWriter(zipped)
	for name, text := range map[string]string{
		"package/package.json": `{"name":"berthtest","version":"1.0.0","main":"index.js"}`,
		"package/index.js":     "module.exports = 'hello from npm'\n",
	} {
		_ = tarred.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(text))})
		_, _ = io.WriteString(tarred, text)
	}
	_ = tarred.Close()
	_ = zipped.Close()
	sum := sha1.Sum(b.Bytes())
	mux.HandleFunc("/berthtest", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		fmt.Fprintf(w, `{"name":"berthtest","dist-tags":{"latest":"1.0.0"},"versions":{"1.0.0":{"name":"berthtest","version":"1.0.0",
			"dist":{"tarball":"http://%s/npm/berthtest-1.0.0.tgz","shasum":"%s"}}}}`, r.Host, hex.EncodeToString(sum[:]))
	})
	mux.HandleFunc("/npm/berthtest-1.0.0.tgz", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(b.Bytes()) })
}

// serveDeb is a flat apt repository with one package, whose content apt only
// checks against its sum.
func serveDeb(mux *http.ServeMux) {
	const deb = "hello from apt\n"
	index := fmt.Sprintf("Package: berthtest\nVersion: 1.0\nArchitecture: all\nMaintainer: t <t@t>\nDescription: t\nFilename: ./berthtest.deb\nSize: %d\nSHA256: %x\n",
		len(deb), sha256.Sum256([]byte(deb)))
	mux.HandleFunc("/apt/Packages", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, index) })
	mux.HandleFunc("/apt/berthtest.deb", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, deb) })
}

// basicAuth is the field of a login.
func basicAuth(name, password string) string {
	return "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(name+":"+password)) + "\r\n"
}
