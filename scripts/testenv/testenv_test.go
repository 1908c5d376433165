package testenv

import (
	"crypto/sha256"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// complaints is a testing.TB that keeps what it is told.
type complaints struct {
	testing.TB
	all []string
}

func (c *complaints) Errorf(format string, args ...any) {
	c.all = append(c.all, fmt.Sprintf(format, args...))
}

// What is not in openapi.yaml does not pass.
func TestAnswersAreChecked(t *testing.T) {
	const me = `{"project":{"id":"p","name":"p","plan":"Free","limits":{"concurrentSessions":3,"maxTimeoutSeconds":900,"proxyGbPerMonth":null}},"usage":{"runningSessions":0,"proxyGb":0}}`
	for _, x := range []struct {
		name, method, path, kind, body string
		status                         int
		want                           string // in the complaint; empty for none
	}{
		{"good", "GET", "/v1/auth/me", "application/json", me, 200, ""},
		{"a field missing", "GET", "/v1/auth/me", "application/json", `{"project":{}}`, 200, "me answered"},
		{"a field too many", "GET", "/v1/auth/me", "application/json", strings.Replace(me, `{"project"`, `{"x":1,"project"`, 1), 200, "me answered"},
		{"another type", "GET", "/v1/auth/me", "text/html", "<p>", 200, "content-type"},
		{"another status", "GET", "/v1/auth/me", "application/json", me, 202, "status is not declared"},
		{"a wrong code", "GET", "/v1/auth/me", "application/json", `{"error":{"code":"not_found","message":"m"}}`, 401, "not_found"},
		{"no operation", "GET", "/v1/nothing", "application/json", "{}", 200, "no such operation"},
		{"a literal segment wins", "POST", "/v1/sessions/release-all", "application/json", `{"data":[]}`, 200, ""},
		{"a bad line of a stream", "POST", "/v1/sessions/x/exec", "application/x-ndjson", `{"type":"stdout","data":"x"}` + "\n" + `{"type":"nonsense"}` + "\n", 200, "exec answered"},
		{"a good stream", "GET", "/v1/sessions/x/events/stream", "text/event-stream", "retry: 1000\n\nid: 1\ndata: {\"seq\":1,\"at\":\"2026-01-02T03:04:05Z\",\"type\":\"exec\"}\n\n: ping\n\n", 200, ""},
		{"a bad event", "GET", "/v1/sessions/x/events/stream", "text/event-stream", "data: {\"seq\":1}\n\n", 200, "streamSessionEvents"},
	} {
		t.Run(x.name, func(t *testing.T) {
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				w.Header().Set("Content-Type", x.kind)
				w.Header().Set("X-Request-Id", "r")
				w.WriteHeader(x.status)
				_, _ = io.WriteString(w, x.body)
			}))
			defer srv.Close()
			told := &complaints{TB: t}
			client := &http.Client{Transport: checked{told, srv.Client().Transport}}
			req, err := http.NewRequest(x.method, srv.URL+x.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			resp, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(resp.Body)
			resp.Body.Close()
			if err != nil || string(got) != x.body {
				t.Errorf("the body became %q (%v)", got, err)
			}
			all := strings.Join(told.all, "\n")
			if (x.want == "") != (all == "") || !strings.Contains(all, x.want) {
				t.Errorf("complaints %q, want %q", all, x.want)
			}
		})
	}
}

// Each kind of thing that a stack could leave is found.
func TestLeftoversAreFound(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a mount, a namespace and the like")
	}
	num, left, err := claimNumber()
	if err != nil {
		t.Fatal(err)
	}
	defer num.release()
	if left != "" {
		t.Skip("another test's remains hold the number")
	}
	home, err := os.MkdirTemp("/tmp", "bt")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(home)
	e := &Env{Home: home, num: num}
	if got := e.leftovers(); len(got) > 0 {
		t.Fatalf("at the start: %q", got)
	}
	prefix := num.prefix(0)
	sum := sha256.Sum256([]byte(filepath.Join(home, Hostd, "machines")))
	group := fmt.Sprintf("/sys/fs/cgroup/%s/berth/%x", cgroupTree(t), sum[:4])
	for _, x := range []struct{ what, plant, remove string }{
		{"mount", "mkdir " + home + "/m && mount -t tmpfs x " + home + "/m", "umount " + home + "/m"},
		{"/run/netns/", "ip netns add " + prefix + "-3", "ip netns del " + prefix + "-3"},
		{"/sys/class/net/", "ip link add " + prefix + "-4 type veth peer name " + prefix + "-5", "ip link del " + prefix + "-4"},
		{"nft table", "nft add table inet " + prefix, "nft delete table inet " + prefix},
		{"loop device", "truncate -s 1M " + home + "/disk && losetup -f " + home + "/disk", "losetup -d $(losetup -j " + home + "/disk -O NAME -n)"},
		{"cgroup", "mkdir -p " + group, "rmdir " + group},
	} {
		sh(t, x.plant)
		got := strings.Join(e.remains(), "\n")
		sh(t, x.remove)
		if !strings.Contains(got, x.what) {
			t.Errorf("planted a %s, found %q", x.what, got)
		}
	}
	for what, cmd := range map[string]*exec.Cmd{
		"named after the home":  exec.Command("sh", "-c", "read x # "+home+"/hostd"),
		"with a machine's user": exec.Command("setpriv", "--reuid", fmt.Sprint(num.uidBase(0)+1000), "--clear-groups", "cat"),
	} {
		in, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		Wait(t, requestTime, "a process "+what+" is found", func() bool { return len(e.processes()) > 0 })
		in.Close()
		_ = cmd.Wait() // read fails at the end of its input
	}
	if got := e.leftovers(); len(got) > 0 {
		t.Errorf("at the end: %q", got)
	}
}

// cgroupTree is the folder of a hierarchy that groups can be made in.
func cgroupTree(t *testing.T) string {
	t.Helper()
	for _, tree := range []string{"memory", "unified", "."} {
		if _, err := os.Stat("/sys/fs/cgroup/" + tree + "/cgroup.procs"); err == nil {
			return tree
		}
	}
	t.Fatal("no cgroup hierarchy")
	return ""
}
