package files

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/hostd/agent/procfs/procfstest"
	"github.com/berth-dev/berth/hostd/agent/workspace"
)

func TestMain(m *testing.M) {
	procfstest.Check()
	goleak.VerifyTestMain(m)
}

// served is a workspace with its handler.
type served struct {
	*Files
	t   testing.TB
	dir string
}

func serve(t testing.TB) *served {
	t.Helper()
	top, err := os.MkdirTemp("", "berth-files-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(top) })
	dir := filepath.Join(top, "workspace")
	if err := errors.Join(os.Chmod(top, 0o755), os.Mkdir(dir, 0o755), os.Chmod(dir, 0o777)); err != nil {
		t.Fatal(err)
	}
	tree, err := workspace.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tree.Close() })
	owner := account.Current()
	if os.Getuid() == 0 {
		owner = account.Account{UID: 1000, GID: 1000}
	}
	return &served{New(tree, owner), t, dir}
}

// do sends one request; path is escaped into the query under its key.
func (s *served) do(method, target string, body io.Reader, header ...string) *httptest.ResponseRecorder {
	s.t.Helper()
	r := httptest.NewRequest(method, target, body)
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, r)
	return w
}

func (s *served) file(method, path, more string, body io.Reader) *httptest.ResponseRecorder {
	s.t.Helper()
	return s.do(method, "/files?path="+url.QueryEscape(path)+more, body)
}

func (s *served) write(path, text string) {
	s.t.Helper()
	full := filepath.Join(s.dir, path)
	_ = os.MkdirAll(filepath.Dir(full), 0o755)
	if err := os.WriteFile(full, []byte(text), 0o644); err != nil {
		s.t.Fatal(err)
	}
}

func (s *served) link(target, path string) {
	s.t.Helper()
	if err := os.Symlink(target, filepath.Join(s.dir, path)); err != nil {
		s.t.Fatal(err)
	}
}

// want checks status and that an error is the envelope whose message begins
// with field.
func (s *served) want(what string, w *httptest.ResponseRecorder, status int, field string) {
	s.t.Helper()
	if w.Code != status {
		s.t.Errorf("%s: status %d, want %d: %s", what, w.Code, status, w.Body)
		return
	}
	if status < 400 {
		return
	}
	var e struct {
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal(w.Body.Bytes(), &e); err != nil || e.Error.Code == "" || !strings.HasPrefix(e.Error.Message, field) {
		s.t.Errorf("%s: %s, want an envelope about %q", what, w.Body, field)
	}
}

func TestWriteAndRead(t *testing.T) {
	s := serve(t)
	bytes := string([]byte{0, 1, 0xff, '\n'})
	for _, path := range []string{"a", "new/folders/b c", s.dir + "/d", "\xff\xfe raw", "ünïcode"} {
		w := s.file("PUT", path, "", strings.NewReader(bytes))
		s.want("PUT "+path, w, 200, "")
		if !strings.Contains(w.Body.String(), `"size":4`) {
			t.Errorf("PUT answer: %s", w.Body)
		}
		w = s.file("GET", path, "", nil)
		if w.Body.String() != bytes || w.Header().Get("Content-Type") != "application/octet-stream" || w.Header().Get("Content-Length") != "4" || w.Header().Get("Last-Modified") == "" {
			t.Errorf("GET %q: %q, %v", path, w.Body, w.Header())
		}
	}
	if _, err := os.Stat(filepath.Join(s.dir, "\xff\xfe raw")); err != nil {
		t.Errorf("raw name on disk: %v", err)
	}
	for _, made := range []string{"a", "new", "new/folders", "new/folders/b c"} {
		info, _ := os.Stat(filepath.Join(s.dir, made))
		if st := info.Sys().(*syscall.Stat_t); st.Uid != s.owner.UID || st.Gid != s.owner.GID {
			t.Errorf("%s belongs to %d:%d", made, st.Uid, st.Gid)
		}
	}
	_ = os.Chmod(filepath.Join(s.dir, "a"), 0o751)
	s.file("PUT", "a", "", strings.NewReader("2"))
	if info, _ := os.Stat(filepath.Join(s.dir, "a")); info.Mode().Perm() != 0o751 {
		t.Errorf("mode after overwrite: %v", info.Mode())
	}
	s.want("empty", s.file("PUT", "empty", "", nil), 200, "")
}

func TestRanges(t *testing.T) {
	s := serve(t)
	s.write("f", "0123456789")
	for header, want := range map[string]struct {
		status int
		body   string
	}{"bytes=2-4": {206, "234"}, "bytes=-3": {206, "789"}, "bytes=7-": {206, "789"}, "bytes=0-99": {206, "0123456789"},
		"bytes=8-99999999999999999999": {206, "89"}, "bytes=-99999999999999999999": {206, "0123456789"}, "bytes= 1-2 ,, ": {206, "12"}} {
		w := s.do("GET", "/files?path=f", nil, "Range", header)
		if w.Code != want.status || w.Body.String() != want.body {
			t.Errorf("%s: %d %q", header, w.Code, w.Body)
		}
	}
	for _, header := range []string{"bytes=50-60", "bytes=10-", "bytes=99999999999999999999-"} {
		w := s.do("GET", "/files?path=f", nil, "Range", header)
		s.want("beyond the end", w, 416, "Range")
		if w.Header().Get("Content-Range") != "bytes */10" || w.Header().Get("Content-Type") != "application/json" {
			t.Errorf("%s: 416 headers: %v", header, w.Header())
		}
	}
	for _, junk := range []string{"junk", "", "bytes", "bytes=", "bytes=a-b", "bytes=4-2", "bytes=--3", "bytes=1-2,x", "lines=0-1", "Bytes 0-1", "bytes=+1-2"} {
		w := s.do("GET", "/files?path=f", nil, "Range", junk)
		if w.Code != 200 || w.Body.String() != "0123456789" || w.Header().Get("Content-Range") != "" {
			t.Errorf("%q: %d %q; want it ignored", junk, w.Code, w.Body)
		}
	}
	modified := s.do("GET", "/files?path=f", nil).Header().Get("Last-Modified")
	if w := s.do("GET", "/files?path=f", nil, "If-Modified-Since", modified); w.Code != 304 {
		t.Errorf("not modified: %d", w.Code)
	}
}

func TestListAndStat(t *testing.T) {
	s := serve(t)
	s.write("d/b", "123")
	s.write("d/a\xff", "")
	_ = os.Mkdir(filepath.Join(s.dir, "d/sub"), 0o755)
	_ = syscall.Mkfifo(filepath.Join(s.dir, "d/pipe"), 0o600)
	s.link("/nowhere", "d/link")
	var l struct {
		Path    string
		Entries []entry
	}
	w := s.file("GET", "d", "&list=1", nil)
	if err := json.Unmarshal(w.Body.Bytes(), &l); err != nil || l.Path != s.dir+"/d" {
		t.Fatalf("list: %s", w.Body)
	}
	want := []string{"a\uFFFD file 0", "b file 3", "link symlink 8", "pipe file 0", "sub dir"}
	for i, e := range l.Entries {
		line := e.Name + " " + e.Type
		if e.Type != "dir" {
			line += " " + string(rune('0'+e.Size))
		}
		if i >= len(want) || line != want[i] || len(e.Mtime) != len("2006-01-02T15:04:05.000Z") {
			t.Errorf("entry %d: %s %s", i, line, e.Mtime)
		}
	}
	var e entry
	_ = json.Unmarshal(s.file("GET", "d/b", "&stat=1", nil).Body.Bytes(), &e)
	if e.Name != "b" || e.Path != s.dir+"/d/b" || e.Size != 3 || e.Type != "file" {
		t.Errorf("stat: %+v", e)
	}
	_ = json.Unmarshal(s.file("GET", "/"+strings.TrimPrefix(s.dir, "/"), "&stat=true", nil).Body.Bytes(), &e)
	if e.Name != "workspace" || e.Type != "dir" || e.Path != s.dir {
		t.Errorf("stat of the workspace: %+v", e)
	}
}

// TestRefusals: nothing hangs, nothing outside is touched, each says why.
func TestRefusals(t *testing.T) {
	s := serve(t)
	outside := filepath.Join(filepath.Dir(s.dir), "outside")
	_ = os.Mkdir(outside, 0o755)
	secret := filepath.Join(outside, "secret")
	_ = os.WriteFile(secret, []byte("s"), 0o644)
	s.write("f", "x")
	s.write("dir/g", "x")
	s.link(secret, "out")
	s.link("../../outside", "dir/up")
	s.link("loop", "loop")
	s.link(s.dir+"/f", "in")
	_ = syscall.Mkfifo(filepath.Join(s.dir, "pipe"), 0o666)
	for _, c := range []struct {
		method, path, more string
		status             int
	}{
		{"GET", "", "", 400}, {"GET", "../outside/secret", "", 400}, {"GET", "/etc/passwd", "", 400},
		{"GET", "dir/../../outside/secret", "", 400}, {"GET", "out", "", 400}, {"GET", "dir/up/secret", "", 400},
		{"GET", "dir/up", "&list=1", 400}, {"GET", "loop", "", 400}, {"GET", "pipe", "", 400}, {"GET", "dir", "", 400},
		{"GET", "f/x", "", 400}, {"GET", "none", "", 404}, {"GET", "f", "&list=1", 400}, {"GET", "none", "&list=1", 404},
		{"GET", "none", "&stat=1", 404}, {"GET", "a\x00b", "", 400}, {"GET", strings.Repeat("n", 256), "", 400},
		{"GET", strings.Repeat("n/", 2100), "", 400}, {"GET", s.dir + "x/f", "", 400},
		{"PUT", "out", "", 400}, {"PUT", "dir/up/new", "", 400}, {"PUT", "dir", "", 400}, {"PUT", ".", "", 400},
		{"PUT", "new/", "", 400}, {"PUT", "f/below", "", 400}, {"PUT", "../new", "", 400},
		{"DELETE", ".", "", 400}, {"DELETE", s.dir, "", 400}, {"DELETE", "none", "", 404}, {"DELETE", "dir/up/secret", "", 400},
		{"DELETE", "..", "", 400}, {"POST", "f", "", 405},
	} {
		field := "path"
		if c.status == 405 {
			field = "method"
		}
		s.want(c.method+" "+c.path, s.file(c.method, c.path, c.more, strings.NewReader("evil")), c.status, field)
	}
	s.want("list and stat", s.file("GET", "dir", "&list=1&stat=1", nil), 400, "stat")
	s.want("odd flag", s.file("GET", "dir", "&list=yes", nil), 400, "list")
	if b, err := os.ReadFile(secret); err != nil || string(b) != "s" {
		t.Errorf("the file outside: %q, %v", b, err)
	}
	if names, _ := os.ReadDir(outside); len(names) != 1 {
		t.Errorf("outside: %v", names)
	}
	if w := s.file("GET", "in", "", nil); w.Body.String() != "x" {
		t.Errorf("an absolute link inside: %d %s", w.Code, w.Body)
	}
	s.want("write through a link", s.file("PUT", "in", "", strings.NewReader("new")), 200, "")
	if b, _ := os.ReadFile(filepath.Join(s.dir, "f")); string(b) != "new" {
		t.Errorf("the link's target: %q", b)
	}
	s.want("delete a link that leads out", s.file("DELETE", "out", "", nil), 204, "")
	s.want("delete a folder with such a link", s.file("DELETE", "dir", "", nil), 204, "")
	if _, err := os.Stat(secret); err != nil {
		t.Errorf("deleted through a link: %v", err)
	}
}

// brokenBody ends with an error after some bytes, as a cut connection does.
type brokenBody struct{ sent bool }

func (b *brokenBody) Read(p []byte) (int, error) {
	if b.sent {
		return 0, io.ErrUnexpectedEOF
	}
	b.sent = true
	return copy(p, "half"), nil
}

func TestBrokenUploadLeavesNothing(t *testing.T) {
	s := serve(t)
	s.write("f", "old")
	s.want("broken", s.file("PUT", "f", "", &brokenBody{}), 400, "body")
	s.want("broken, new", s.file("PUT", "g", "", &brokenBody{}), 400, "body")
	names, _ := os.ReadDir(s.dir)
	if b, _ := os.ReadFile(filepath.Join(s.dir, "f")); string(b) != "old" || len(names) != 1 {
		t.Errorf("f is %q, folder %v", b, names)
	}
}

// TestBrokenConnection is the same over a real one.
func TestBrokenConnection(t *testing.T) {
	s := serve(t)
	s.write("f", "old")
	server := httptest.NewServer(s)
	defer server.Close()
	pr, pw := io.Pipe()
	go func() {
		_, _ = pw.Write(bytes.Repeat([]byte("x"), 1<<20))
		pw.CloseWithError(errors.New("gone"))
	}()
	r, _ := http.NewRequest("PUT", server.URL+"/files?path=f", pr)
	if _, err := http.DefaultTransport.RoundTrip(r); err == nil {
		t.Fatal("the upload did not break")
	}
	http.DefaultTransport.(*http.Transport).CloseIdleConnections()
	server.Close() // waits for the handler
	names, _ := os.ReadDir(s.dir)
	if b, _ := os.ReadFile(filepath.Join(s.dir, "f")); string(b) != "old" || len(names) != 1 {
		t.Errorf("f is %q, folder %v", b, names)
	}
}

func TestMkdirAndMove(t *testing.T) {
	s := serve(t)
	post := func(path, body string) *httptest.ResponseRecorder { return s.do("POST", path, strings.NewReader(body)) }
	for range 2 {
		w := post("/files/mkdir", `{"path":"a/b"}`)
		if s.want("mkdir", w, 200, ""); strings.TrimSpace(w.Body.String()) != `{"path":"`+s.dir+`/a/b"}` {
			t.Errorf("mkdir answer %s", w.Body)
		}
	}
	s.write("f", "1")
	s.link("/etc", "out")
	w := post("/files/move", `{"from":"f","to":"new/dir/g"}`)
	if s.want("move", w, 200, ""); strings.TrimSpace(w.Body.String()) != `{"path":"`+s.dir+`/new/dir/g"}` {
		t.Errorf("move answer %s", w.Body)
	}
	s.write("h", "2")
	s.want("replace", post("/files/move", `{"from":"h","to":"new/dir/g"}`), 200, "")
	if b, _ := os.ReadFile(filepath.Join(s.dir, "new/dir/g")); string(b) != "2" {
		t.Errorf("replaced: %q", b)
	}
	s.want("a link that leads out", post("/files/move", `{"from":"out","to":"out2"}`), 200, "")
	if _, err := os.Lstat(filepath.Join(s.dir, "out2")); err != nil {
		t.Error(err)
	}
	for body, c := range map[string]struct {
		status int
		field  string
	}{
		`{"from":"none","to":"x"}`:           {404, "from"},
		`{"from":"new","to":"new/dir/x"}`:    {400, "to"},
		`{"from":"new/dir/g","to":"a"}`:      {400, "to"},
		`{"from":".","to":"x"}`:              {400, "from"},
		`{"from":"a","to":"."}`:              {400, "to"},
		`{"from":"../x","to":"x"}`:           {400, "from"},
		`{"from":"a","to":"out2/x"}`:         {400, "to"},
		`{"from":"a"}`:                       {400, "to"},
		`{"from":"a","to":"b","force":true}`: {400, "force: unknown field"},
		`{"from":1,"to":"b"}`:                {400, "from: must be a string"},
		`{"from":"a","to":"b"} x`:            {400, "body"},
		`["a"]`:                              {400, "body"},
	} {
		s.want(body, post("/files/move", body), c.status, c.field)
	}
	s.want("mkdir over a file", post("/files/mkdir", `{"path":"new/dir/g/x"}`), 400, "path")
	s.want("mkdir outside", post("/files/mkdir", `{"path":"out2/x"}`), 400, "path")
	s.want("mkdir nothing", post("/files/mkdir", ``), 400, "path")
}

// TestLargeCopyIsFlat: a large upload and download hold one buffer each.
func TestLargeCopyIsFlat(t *testing.T) {
	s := serve(t)
	const size = 64 << 20
	allocs := testing.AllocsPerRun(1, func() {
		s.want("PUT", s.file("PUT", "big", "", io.LimitReader(zeros{}, size)), 200, "")
	})
	if allocs > 2000 {
		t.Errorf("%v allocations for one upload", allocs)
	}
	if info, err := os.Stat(filepath.Join(s.dir, "big")); err != nil || info.Size() != size {
		t.Fatalf("size on disk: %v, %v", info, err)
	}
	w := &counter{header: make(http.Header)}
	s.ServeHTTP(w, httptest.NewRequest("GET", "/files?path=big", nil))
	if w.n != size || w.largest > copySize {
		t.Errorf("got %d bytes, %d at once", w.n, w.largest)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

type counter struct {
	header     http.Header
	n, largest int
}

func (c *counter) Header() http.Header { return c.header }
func (c *counter) WriteHeader(int)     {}
func (c *counter) Write(p []byte) (int, error) {
	c.n += len(p)
	c.largest = max(c.largest, len(p))
	return len(p), nil
}
