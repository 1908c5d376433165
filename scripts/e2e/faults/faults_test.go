// Package faults kills and restarts the daemons under clients that are at
// work: what was acknowledged stays, what runs goes on, nothing is left over.
package faults

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/cdpclient"
)

// The create deadline is short, since a session whose create was cut off by a
// gateway's death is given up only when the deadline and ten seconds are over.
var stack = testenv.New(testenv.Options{Pool: "browser=1,shell=2,both=1", Gateway: []string{"--create-deadline", "8s"}})

func TestMain(m *testing.M) { os.Exit(stack.Main(m)) }

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// evaluate gives the number that an expression has in a page.
func evaluate(t *testing.T, p *cdpclient.Page, expression string) (n int) {
	t.Helper()
	if err := p.Evaluate(within(t, 30*time.Second), expression, &n); err != nil {
		t.Fatalf("%s: %v", expression, err)
	}
	return n
}

// An open CDP socket and a running command outlive hostd: the session link
// resumes through the hostd that follows.
func TestHostdKilled(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	s := c.Create(testenv.Fields{"shell": true})
	cdp, p := testenv.FirstPage(t, *s.ConnectUrl)
	evaluate(t, p, "window.n = 0; setInterval(() => n++, 50); 0")
	c.Output(s.Id, "STATE=kept")

	// A command that prints on and on, read as it prints.
	got := make(chan testenv.Answer, 1)
	go func() {
		a, err := c.Try(within(t, time.Minute), http.MethodPost, "/v1/sessions/"+s.Id+"/exec",
			testenv.Fields{"command": "for i in $(seq 300); do echo $i; sleep 0.02; done", "stream": true, "shell": "long"})
		if err != nil {
			t.Errorf("the stream broke: %v", err)
		}
		got <- a
	}()
	plain := make(chan testenv.Answer, 1)
	go func() {
		a, err := c.Try(within(t, time.Minute), http.MethodPost, "/v1/sessions/"+s.Id+"/exec", testenv.Fields{"command": "sleep 4; echo done", "shell": "plain"})
		if err != nil {
			t.Errorf("the exec broke: %v", err)
		}
		plain <- a
	}()
	before := evaluate(t, p, "n")
	env.Kill9(t, testenv.Hostd)
	asked := make(chan error, 1)
	go func() { // asked while there is no hostd, answered by the next
		var n int
		err := p.Evaluate(within(t, 30*time.Second), "n", &n)
		if err == nil && n < before {
			err = fmt.Errorf("the page's counter fell from %d to %d", before, n)
		}
		asked <- err
	}()
	time.Sleep(time.Second) // hostd is away for a while
	env.Restart(t, testenv.Hostd)
	if err := <-asked; err != nil {
		t.Errorf("a call made during the outage: %v", err)
	}
	if evaluate(t, p, "n") <= before {
		t.Error("the page stood still")
	}
	select {
	case <-cdp.Done():
		t.Errorf("the socket dropped: %v", cdp.Err())
	default:
	}
	var lines strings.Builder
	a := <-got
	for l := range strings.Lines(string(a.Body)) {
		var x struct{ Type, Data string }
		if err := json.Unmarshal([]byte(l), &x); err != nil {
			t.Fatal(err)
		}
		lines.WriteString(x.Data)
	}
	if fields := strings.Fields(lines.String()); len(fields) != 300 || fields[299] != "300" {
		t.Errorf("the stream gave %d lines: %.300s", len(fields), lines.String())
	}
	if a := <-plain; a.Status != 200 || !strings.Contains(string(a.Body), "done") {
		t.Errorf("the exec under way: %d %s", a.Status, a.Body)
	}
	if got := c.Output(s.Id, "echo $STATE"); got != "kept" {
		t.Errorf("the shell: %q", got)
	}
	c.Release(s.Id)
}

// A machine that died while hostd was away is found dead.
func TestMachineDiesWhileHostdIsAway(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	s, other := c.Shell(), c.Shell()
	c.Output(s.Id, "(sleep 14142 >/dev/null 2>&1 &)")
	p := env.FindProcess(t, "sleep", "14142")
	agent := env.Agent(t, p)
	env.Kill9(t, testenv.Hostd)
	env.KillProcess(t, agent)
	env.Restart(t, testenv.Hostd)
	testenv.Wait(t, 15*time.Second, "ERROR", func() bool { return c.Get(s.Id).Status == "ERROR" })
	if got := c.Get(s.Id); got.Error == nil || *got.Error == "" {
		t.Errorf("no sentence: %+v", got)
	}
	if got := c.Output(other.Id, "echo lives"); got != "lives" {
		t.Errorf("the other session: %q", got)
	}
	testenv.Wait(t, 10*time.Second, "its processes are gone", func() bool { return !env.Alive(p.PID) })
}

// A dead gateway drops sockets, and nothing else: the record is intact, the
// sessions run, and a browser-only session has time for its client to return.
func TestGatewayKilled(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	plain, both := c.Create(nil), c.Create(testenv.Fields{"shell": true, "userMetadata": testenv.Fields{"a": 1}})
	done := c.Shell()
	c.Release(done.Id)
	cdp, p := testenv.FirstPage(t, *plain.ConnectUrl)
	evaluate(t, p, "window.mark = 77")
	c.Output(both.Id, "X=1; (sleep 17320 >/dev/null 2>&1 &)")
	var before api.SessionList
	c.Want(200, http.MethodGet, "/v1/sessions", nil, &before)

	env.Kill9(t, testenv.Gateway)
	select {
	case <-cdp.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("the socket of a dead gateway is open")
	}
	began := time.Now()
	env.Restart(t, testenv.Gateway)
	t.Logf("ready %s after its start", time.Since(began).Round(time.Millisecond))
	var after api.SessionList
	c.Want(200, http.MethodGet, "/v1/sessions", nil, &after)
	if len(after.Data) != len(before.Data) {
		t.Fatalf("the record had %d sessions and has %d", len(before.Data), len(after.Data))
	}
	for i := range after.Data {
		x, y := before.Data[i], after.Data[i]
		if x.Id != y.Id || x.Status != y.Status || string(x.UserMetadata) != string(y.UserMetadata) || !x.ExpiresAt.Equal(y.ExpiresAt) {
			t.Errorf("%+v became %+v", x, y)
		}
	}
	time.Sleep(7 * time.Second) // longer than the 5-second rule
	if got := c.Get(plain.Id); got.Status != "RUNNING" {
		t.Fatalf("the session whose client the gateway dropped is %s", got.Status)
	}
	_, p = testenv.FirstPage(t, *plain.ConnectUrl)
	if got := evaluate(t, p, "window.mark"); got != 77 {
		t.Errorf("the page lost its state: %d", got)
	}
	if got := c.Output(both.Id, "echo $X; pgrep -f 'sleep 17320' | wc -l"); got != "1\n1" {
		t.Errorf("the shell: %q", got)
	}
	if got := c.Get(done.Id); got.Status != "COMPLETED" {
		t.Errorf("the released one is %s", got.Status)
	}
}

// While proxyd is away a page load waits or fails; after, it works, and no
// session has noticed anything else.
func TestProxydKilled(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	web := env.AllowedWeb(t)
	s := c.Create(testenv.Fields{"shell": true})
	_, p := testenv.FirstPage(t, *s.ConnectUrl)
	if err := p.Goto(within(t, 20*time.Second), "http://"+web.Addr+"/"); err != nil {
		t.Fatal(err)
	}
	env.Kill9(t, testenv.Proxyd)
	if got := c.Output(s.Id, "curl -sS -m 5 http://"+web.Addr+"/ >/dev/null && echo direct"); got != "direct" {
		t.Errorf("the shell without proxyd: %q", got)
	}
	loaded := make(chan error, 1)
	go func() { loaded <- p.Goto(within(t, 30*time.Second), "http://"+web.Addr+"/again") }()
	time.Sleep(500 * time.Millisecond)
	env.Restart(t, testenv.Proxyd)
	if err := <-loaded; err != nil {
		t.Errorf("a page opened during the outage: %v", err)
	}
	if err := p.Goto(within(t, 20*time.Second), "http://"+web.Addr+"/after"); err != nil {
		t.Errorf("after it: %v", err)
	}
}

// An operator's restart of everything, one after the other, ends no session.
func TestRestartOfAll(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	s := c.Create(testenv.Fields{"shell": true, "keepAlive": true})
	cdp, _ := testenv.FirstPage(t, *s.ConnectUrl)
	c.Output(s.Id, "Y=2")
	for _, daemon := range []string{testenv.Hostd, testenv.Proxyd, testenv.Gateway} {
		began := time.Now()
		env.Terminate(t, daemon)
		t.Logf("%s stopped in %s", daemon, time.Since(began).Round(time.Millisecond))
		if daemon == testenv.Gateway {
			<-cdp.Done()
			if code := cdp.CloseStatus(); code != 1001 {
				t.Errorf("a gateway that leaves closes with %d (%v), want 1001", code, cdp.Err())
			}
		} else if cdp.Err() != nil {
			t.Errorf("the socket dropped with %s: %v", daemon, cdp.Err())
		}
		env.Restart(t, daemon)
		if got := c.Output(s.Id, "echo $Y"); got != "2" {
			t.Errorf("after the restart of %s: %q", daemon, got)
		}
	}
	c.Release(s.Id)
}
