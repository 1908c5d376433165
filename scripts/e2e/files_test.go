package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
)

func TestFiles(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	id := c.Shell().Id
	base := "/v1/sessions/" + id + "/files"
	var put api.PathSize
	c.Want(http.StatusOK, http.MethodPut, testenv.FilePath(id, "a/b/data.bin"), strings.NewReader("0123456789"), &put)
	if put.Path != "/workspace/a/b/data.bin" || put.Size != 10 {
		t.Errorf("put: %+v", put)
	}
	if got := c.Output(id, "stat -c '%U %s' a/b/data.bin; cat a/b/data.bin"); got != "user 10\n0123456789" {
		t.Errorf("in the shell: %q", got)
	}
	read := func(want int, path string, header ...string) testenv.Answer {
		t.Helper()
		return c.Want(want, http.MethodGet, testenv.FilePath(id, path), nil, nil, header...)
	}
	if a := read(200, "/workspace/a/b/data.bin"); string(a.Body) != "0123456789" || a.Header.Get("Content-Type") != "application/octet-stream" {
		t.Errorf("get: %q %v", a.Body, a.Header)
	}
	for header, want := range map[string]string{"bytes=2-4": "234", "bytes=7-": "789", "bytes=-2": "89", "bytes=8-100": "89"} {
		if a := read(206, "a/b/data.bin", "Range", header); string(a.Body) != want || !strings.HasSuffix(a.Header.Get("Content-Range"), "/10") {
			t.Errorf("%s: %q %s", header, a.Body, a.Header.Get("Content-Range"))
		}
	}
	c.Refused(apierr.RangeNotSatisfiable, "", http.MethodGet, testenv.FilePath(id, "a/b/data.bin"), nil, "Range", "bytes=10-")

	c.Output(id, "ln -s b a/link; mkfifo a/pipe 2>/dev/null; rm -f a/pipe; touch a/empty")
	var list api.Listing
	c.Want(200, http.MethodGet, testenv.FilePath(id, "a")+"&list=1", nil, &list)
	var got []string
	for _, e := range list.Entries {
		got = append(got, fmt.Sprintf("%s:%s", e.Name, e.Type))
	}
	if list.Path != "/workspace/a" || !slices.Equal(got, []string{"b:dir", "empty:file", "link:symlink"}) {
		t.Errorf("list: %s %v", list.Path, got)
	}
	var stat api.FileEntry
	c.Want(200, http.MethodGet, testenv.FilePath(id, "a/b/data.bin")+"&stat=1", nil, &stat)
	if stat.Size != 10 || stat.Type != "file" || stat.Name != "data.bin" || time.Since(stat.Mtime) > time.Minute {
		t.Errorf("stat: %+v", stat)
	}
	c.Want(200, http.MethodPost, base+"/mkdir", testenv.Fields{"path": "x/y/z"}, nil)
	c.Want(200, http.MethodPost, base+"/move", testenv.Fields{"from": "a/b/data.bin", "to": "x/y/z/moved"}, nil)
	if a := read(200, "x/y/z/moved"); string(a.Body) != "0123456789" {
		t.Errorf("moved: %q", a.Body)
	}
	c.Refused(apierr.NotFound, "", http.MethodGet, testenv.FilePath(id, "a/b/data.bin"), nil)
	c.Want(204, http.MethodDelete, testenv.FilePath(id, "x"), nil, nil)
	c.Refused(apierr.NotFound, "", http.MethodDelete, testenv.FilePath(id, "x"), nil)
	c.Refused(apierr.InvalidRequest, "path", http.MethodGet, testenv.FilePath(id, "a"), nil)
	c.Refused(apierr.InvalidRequest, "path", http.MethodGet, base, nil)
}

func TestFilesStayInside(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	id := c.Shell().Id
	c.Output(id, "ln -s /etc out; ln -s ../etc/passwd up; ln -s /workspace/in in2; mkdir in; echo x > in/f; ln -s /proc/1/root root")
	for _, path := range []string{"../etc/passwd", "/etc/passwd", "in/../../etc/passwd", "out/passwd", "up", "/workspace/../etc/passwd", "root/etc/shadow", "/workspacex"} {
		c.Refused(apierr.InvalidRequest, "path", http.MethodGet, testenv.FilePath(id, path), nil)
		c.Refused(apierr.InvalidRequest, "path", http.MethodPut, testenv.FilePath(id, path), strings.NewReader("x"))
	}
	c.Refused(apierr.InvalidRequest, "", http.MethodDelete, testenv.FilePath(id, "out/passwd"), nil)
	c.Refused(apierr.InvalidRequest, "to", http.MethodPost, "/v1/sessions/"+id+"/files/move", testenv.Fields{"from": "in/f", "to": "../tmp/f"})
	c.Refused(apierr.InvalidRequest, "", http.MethodPost, "/v1/sessions/"+id+"/files/mkdir", testenv.Fields{"path": "out/new"})
	if a := c.Want(200, http.MethodGet, testenv.FilePath(id, "in2/f"), nil, nil); string(a.Body) != "x\n" {
		t.Errorf("a link that stays inside: %q", a.Body)
	}
	if got := c.Output(id, "head -c 5 /etc/passwd"); got != "root:" {
		t.Errorf("/etc/passwd now begins with %q", got)
	}
}

func TestFileNamesOfAnyBytes(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	id := c.Shell().Id
	for _, name := range []string{"späße ☃.txt", "a b+c%d&e=f#g?h", "-rf", "new\nline", strings.Repeat("n", 255)} {
		body := "of " + name
		c.Want(200, http.MethodPut, testenv.FilePath(id, name), strings.NewReader(body), nil)
		if a := c.Want(200, http.MethodGet, testenv.FilePath(id, name), nil, nil); string(a.Body) != body {
			t.Errorf("%q: %q", name, a.Body)
		}
		c.Want(200, http.MethodGet, testenv.FilePath(id, ".")+"&list=1", nil, nil)
		c.Want(204, http.MethodDelete, testenv.FilePath(id, name), nil, nil)
	}
	// Names that are not UTF-8 exist on Linux and not in JSON: the listing shows
	// where they are, the API names no file by them, the shell can.
	c.Output(id, `printf x > "$(printf 'raw\377')"`)
	var list api.Listing
	c.Want(200, http.MethodGet, testenv.FilePath(id, ".")+"&list=1", nil, &list)
	if !slices.ContainsFunc(list.Entries, func(e api.FileEntry) bool { return e.Name == "raw\ufffd" }) {
		t.Errorf("the listing shows %+v", list.Entries)
	}
	c.Refused(apierr.InvalidRequest, "path: must be UTF-8", http.MethodGet, testenv.FilePath(id, "raw\xff"), nil)
}

func TestFilesWait(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	id := c.Shell().Id
	wait := func(pattern string, ms int) string {
		return fmt.Sprintf("/v1/sessions/%s/files/wait?pattern=%s&timeoutMs=%d", id, url.QueryEscape(pattern), ms)
	}
	c.Refused(apierr.WaitTimeout, "", http.MethodGet, wait("downloads/*.csv", 300), nil)
	c.Exec(id, "mkdir -p downloads; (sleep 0.3; cd downloads; exec 3>a.csv.crdownload; echo a,b >&3; sleep 1; exec 3>&-; mv a.csv.crdownload a.csv) >/dev/null 2>&1 &")
	began := time.Now()
	var got api.PathSize
	c.Want(200, http.MethodGet, wait("downloads/*.csv", 15000), nil, &got)
	if got.Path != "/workspace/downloads/a.csv" || got.Size != 4 || time.Since(began) < time.Second {
		t.Errorf("wait gave %+v after %s", got, time.Since(began))
	}
	c.Refused(apierr.InvalidRequest, "pattern", http.MethodGet, wait("../*.csv", 300), nil)
}

// hashed counts and hashes what passes.
type hashed struct {
	hash.Hash
	n int64
}

func (h *hashed) Write(p []byte) (int, error) { h.n += int64(len(p)); return h.Hash.Write(p) }

// stripes is n bytes that differ from place to place.
func stripes(n int64) io.Reader {
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i*7 + i>>8)
	}
	var parts []io.Reader
	for i := int64(0); i < n; i += int64(len(block)) {
		parts = append(parts, strings.NewReader(fmt.Sprintf("%016d", i)), bytes.NewReader(block[:min(int64(len(block)), n-i)-16]))
	}
	return io.MultiReader(parts...)
}

func TestAGigabyteUpAndDown(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	t.Parallel()
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	id := c.Create(testenv.Fields{"browser": false, "shell": true, "timeout": 900}).Id
	const size = 1 << 30
	flat := watchMemory(t, env)
	sent := &hashed{Hash: sha256.New()}
	ctx := within(t, 6*time.Minute)
	began := time.Now()
	a, err := c.Try(ctx, http.MethodPut, testenv.FilePath(id, "big"), io.TeeReader(stripes(size), sent))
	if err != nil || a.Status != 200 || sent.n != size {
		t.Fatalf("up: %v %d %s after %d bytes", err, a.Status, a.Body, sent.n)
	}
	up := time.Since(began)
	want := hex.EncodeToString(sent.Sum(nil))
	if got := c.Output(id, "sha256sum big"); !strings.HasPrefix(got, want) {
		t.Errorf("inside it is %s, sent %s", got, want)
	}
	began = time.Now()
	resp, err := c.Send(ctx, http.MethodGet, testenv.FilePath(id, "big"), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	back := &hashed{Hash: sha256.New()}
	if _, err := io.Copy(back, resp.Body); err != nil || back.n != size || hex.EncodeToString(back.Sum(nil)) != want {
		t.Errorf("down: %v, %d bytes", err, back.n)
	}
	t.Logf("1 GiB up in %s, down in %s (race detector on)", up.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
	flat()
}
