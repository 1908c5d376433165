package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/cdpclient"
)

const sessionsPath = "/v1/sessions"

func TestCreateGetRelease(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	s := c.Create(testenv.Fields{"browser": true, "shell": true, "timeout": 600, "keepAlive": true, "captcha": "ignore",
		"viewport": testenv.Fields{"width": 800, "height": 600}, "userMetadata": testenv.Fields{"who": "ann", "n": 1.50}})
	if s.Status != "RUNNING" || !s.Browser || !s.Shell || !s.KeepAlive || s.Timeout != 600 || s.Captcha != "ignore" || s.Moves != 0 {
		t.Errorf("created: %+v", s)
	}
	if got := s.ExpiresAt.Sub(s.StartedAt); got != 600*time.Second {
		t.Errorf("expires %s after its start, want 600 s", got)
	}
	var meta map[string]any
	if err := json.Unmarshal(s.UserMetadata, &meta); err != nil || meta["who"] != "ann" || meta["n"] != 1.5 {
		t.Errorf("userMetadata: %s (%v)", s.UserMetadata, err)
	}
	host := strings.TrimPrefix(env.BaseURL, "http://")
	if s.ConnectUrl == nil || !strings.HasPrefix(*s.ConnectUrl, "ws://"+host+"/v1/connect?sessionId="+s.Id+"&token=") {
		t.Errorf("connectUrl: %v", s.ConnectUrl)
	}
	if !strings.HasPrefix(s.LiveUrl, "http://"+host+"/live/"+s.Id+"?token=") {
		t.Errorf("liveUrl: %s", s.LiveUrl)
	}
	if s.TerminalUrl == nil || !strings.HasPrefix(*s.TerminalUrl, "/v1/sessions/"+s.Id+"/terminal?token=") {
		t.Errorf("terminalUrl: %v", s.TerminalUrl)
	}
	ended := c.Release(s.Id)
	if ended.Status != "COMPLETED" || ended.EndReason == nil || *ended.EndReason != "released" || ended.EndedAt == nil {
		t.Errorf("released: %+v", ended)
	}
	for _, path := range []string{"/release", "/exec", "/shell/restart", "/rotate-urls"} {
		var body any
		if path == "/exec" {
			body = testenv.Fields{"command": "true"}
		}
		c.Refused(apierr.SessionNotRunning, "", http.MethodPost, sessionsPath+"/"+s.Id+path, body)
	}
	c.Refused(apierr.SessionNotRunning, "", http.MethodDelete, sessionsPath+"/"+s.Id, nil)
	c.Refused(apierr.SessionNotRunning, "", http.MethodPatch, sessionsPath+"/"+s.Id, testenv.Fields{"keepAlive": true})
	c.Refused(apierr.SessionNotRunning, "", http.MethodGet, testenv.FilePath(s.Id, ".")+"&list=1", nil)
	c.Refused(apierr.SessionNotRunning, "", http.MethodGet, sessionsPath+"/"+s.Id+"/live", nil)
	if got := c.Get(s.Id); got.Status != "COMPLETED" {
		t.Errorf("get after release: %s", got.Status)
	}
}

func TestKindsAndDelete(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	browser := c.Create(nil)
	if !browser.Browser || browser.Shell || browser.TerminalUrl != nil || browser.ConnectUrl == nil || browser.Timeout != 300 {
		t.Errorf("an empty body gave %+v", browser)
	}
	c.Refused(apierr.InvalidRequest, "shell", http.MethodPost, sessionsPath+"/"+browser.Id+"/exec", testenv.Fields{"command": "true"})
	shell := c.Shell()
	if shell.Browser || !shell.Shell || shell.ConnectUrl != nil || shell.TerminalUrl == nil {
		t.Errorf("shell only gave %+v", shell)
	}
	for _, id := range []string{browser.Id, shell.Id} {
		var s api.Session
		c.Want(http.StatusOK, http.MethodDelete, sessionsPath+"/"+id, nil, &s)
		if s.Status != "COMPLETED" || *s.EndReason != "released" {
			t.Errorf("DELETE gave %+v", s)
		}
	}
}

func TestWhatCreateRefuses(t *testing.T) {
	c := stack.Start(t).Client(t, "Free")
	for _, x := range []struct {
		body   testenv.Fields
		code   apierr.Code
		phrase string
	}{
		{testenv.Fields{"browser": false}, apierr.InvalidRequest, "browser"},
		{testenv.Fields{"timeout": 59}, apierr.InvalidRequest, "timeout"},
		{testenv.Fields{"timeout": "60"}, apierr.InvalidRequest, "timeout"},
		{testenv.Fields{"timeout": 901}, apierr.PlanLimit, "timeout"},
		{testenv.Fields{"captcha": "solve"}, apierr.InvalidRequest, "captcha"},
		{testenv.Fields{"viewport": testenv.Fields{"width": 199, "height": 720}}, apierr.InvalidRequest, "viewport"},
		{testenv.Fields{"viewport": testenv.Fields{"width": 1280, "height": 2161}}, apierr.InvalidRequest, "viewport"},
		{testenv.Fields{"userMetadata": []int{1}}, apierr.InvalidRequest, "userMetadata"},
		{testenv.Fields{"proxy": testenv.Fields{"type": "residential", "city": "Berlin"}}, apierr.InvalidRequest, "proxy.city"},
		{testenv.Fields{"proxy": nil}, apierr.InvalidRequest, "proxy: must be true"},
		{testenv.Fields{"context": testenv.Fields{"id": "x"}}, apierr.InvalidRequest, "not available yet"},
		{testenv.Fields{"region": "nowhere"}, apierr.InvalidRequest, "region"},
		{testenv.Fields{"colour": "red"}, apierr.InvalidRequest, "colour"},
		{testenv.Fields{"setup": []string{"true"}}, apierr.InvalidRequest, "shell"},
	} {
		c.Refused(x.code, x.phrase, http.MethodPost, sessionsPath, x.body)
	}
	var me api.Me
	c.Want(http.StatusOK, http.MethodGet, "/v1/auth/me", nil, &me)
	if me.Usage.RunningSessions != 0 || me.Project.Plan != "Free" || me.Project.Limits.ConcurrentSessions != 3 || me.Project.Limits.MaxTimeoutSeconds != 900 {
		t.Errorf("auth/me: %+v", me)
	}
}

func TestListPatchMetadata(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	var ids []string
	for i := range 3 {
		s := c.Create(testenv.Fields{"browser": false, "shell": true, "userMetadata": testenv.Fields{"job": fmt.Sprint(i), "all": "x"}})
		ids = append([]string{s.Id}, ids...)
	}
	page := func(query string) (got []string, next *string) {
		var l api.SessionList
		c.Want(http.StatusOK, http.MethodGet, sessionsPath+query, nil, &l)
		for _, s := range l.Data {
			got = append(got, s.Id)
		}
		return got, l.NextCursor
	}
	if got, next := page(""); !slices.Equal(got, ids) || next != nil {
		t.Errorf("listed %v (next %v), want newest first %v", got, next, ids)
	}
	first, next := page("?limit=2")
	if !slices.Equal(first, ids[:2]) || next == nil {
		t.Fatalf("limit 2 gave %v, next %v", first, next)
	}
	if rest, end := page("?limit=2&cursor=" + *next); !slices.Equal(rest, ids[2:]) || end != nil {
		t.Errorf("the page after gave %v, next %v", rest, end)
	}
	if got, _ := page("?metadata[job]=1&metadata[all]=x"); !slices.Equal(got, ids[1:2]) {
		t.Errorf("metadata filter gave %v", got)
	}
	c.Release(ids[0])
	if got, _ := page("?status=RUNNING"); !slices.Equal(got, ids[1:]) {
		t.Errorf("running are %v", got)
	}
	var p api.Session
	c.Want(http.StatusOK, http.MethodPatch, sessionsPath+"/"+ids[1], testenv.Fields{"userMetadata": testenv.Fields{"new": true},
		"timeout": 900, "captcha": "ignore", "keepAlive": true}, &p)
	if p.Timeout != 900 || p.ExpiresAt.Sub(p.StartedAt) != 900*time.Second || p.Captcha != "ignore" || !p.KeepAlive || string(p.UserMetadata) != `{"new":true}` {
		t.Errorf("patched: %+v %s", p, p.UserMetadata)
	}
	c.Refused(apierr.InvalidRequest, "timeout", http.MethodPatch, sessionsPath+"/"+ids[1], testenv.Fields{"timeout": 1})
	c.Refused(apierr.PlanLimit, "timeout", http.MethodPatch, sessionsPath+"/"+ids[1], testenv.Fields{"timeout": 86401})
	c.Refused(apierr.InvalidRequest, "proxy[0].server", http.MethodPatch, sessionsPath+"/"+ids[1], testenv.Fields{"proxy": []testenv.Fields{{"type": "custom"}}})
	c.Refused(apierr.InvalidRequest, "proxy", http.MethodPost, sessionsPath+"/"+ids[1]+"/proxy/rotate", nil)
	c.Want(http.StatusOK, http.MethodPatch, sessionsPath+"/"+ids[1], testenv.Fields{"proxy": testenv.Fields{"type": "custom",
		"server": "http://proxy.example:3128", "password": "hunter2"}}, &p)
	if shown := `{"type":"custom","ip":"sticky","scope":"browser","server":"http://proxy.example:3128"}`; p.Proxy == nil || string(*p.Proxy) != shown {
		t.Errorf("the proxy is shown as %s", *p.Proxy)
	}
	c.Want(http.StatusOK, http.MethodPost, sessionsPath+"/"+ids[1]+"/proxy/rotate", nil, &p)
	p = api.Session{}
	if c.Want(http.StatusOK, http.MethodPatch, sessionsPath+"/"+ids[1], testenv.Fields{"proxy": nil}, &p); p.Proxy != nil {
		t.Errorf("the proxy is still there: %s", *p.Proxy)
	}
	var all api.ReleasedList
	c.Want(http.StatusOK, http.MethodPost, sessionsPath+"/release-all", nil, &all)
	if len(all.Data) != 2 || all.Data[0].Status != "COMPLETED" {
		t.Errorf("release-all ended %+v", all.Data)
	}
}

func TestForeignersAndStrangers(t *testing.T) {
	env := stack.Start(t)
	mine, other := env.Client(t, "Scale"), env.Client(t, "Scale")
	s := mine.Shell()
	for _, x := range []struct{ method, path string }{
		{http.MethodGet, ""}, {http.MethodDelete, ""}, {http.MethodPost, "/release"}, {http.MethodGet, "/events"},
		{http.MethodGet, "/events/stream"}, {http.MethodGet, "/live"}, {http.MethodPost, "/rotate-urls"},
		{http.MethodGet, "/files?path=x"}, {http.MethodPost, "/shell/restart"},
	} {
		other.Refused(apierr.NotFound, "", x.method, sessionsPath+"/"+s.Id+x.path, nil)
	}
	other.Refused(apierr.NotFound, "", http.MethodPost, sessionsPath+"/"+s.Id+"/exec", testenv.Fields{"command": "true"})
	other.Refused(apierr.NotFound, "", http.MethodPatch, sessionsPath+"/"+s.Id, testenv.Fields{"keepAlive": true})
	for _, key := range []string{"", "nonsense", mine.Key + "x"} {
		bad := env.ClientOf(t, key)
		bad.Refused(apierr.Unauthorized, "", http.MethodGet, sessionsPath+"/"+s.Id, nil)
		bad.Refused(apierr.Unauthorized, "", http.MethodPost, sessionsPath, nil)
	}
	bearer := env.ClientOf(t, "")
	bearer.Want(http.StatusOK, http.MethodGet, sessionsPath+"/"+s.Id, nil, nil, "Authorization", "Bearer "+mine.Key)
	if got := mine.Get(s.Id); got.Status != "RUNNING" {
		t.Errorf("after all that the session is %s", got.Status)
	}
}

// Twenty at once on a plan of three: exactly three succeed, whatever the order.
func TestConcurrencyLimitIsExact(t *testing.T) {
	c := stack.Start(t).Client(t, "Free")
	for round := range 2 {
		var wg sync.WaitGroup
		var mu sync.Mutex
		count := map[int]int{}
		for range 20 {
			wg.Go(func() {
				a, err := c.Try(context.Background(), http.MethodPost, sessionsPath, testenv.Fields{"browser": false, "shell": true})
				if err != nil {
					t.Error(err)
					return
				}
				mu.Lock()
				defer mu.Unlock()
				count[a.Status]++
				if a.Status == http.StatusTooManyRequests && (a.Code() != apierr.ConcurrencyLimit || a.Header.Get("Retry-After") == "") {
					t.Errorf("429 with %s, retry-after %q", a.Body, a.Header.Get("Retry-After"))
				}
			})
		}
		wg.Wait()
		if count[http.StatusCreated] != 3 || count[http.StatusTooManyRequests] != 17 {
			t.Fatalf("round %d: %v, want 3 of 201 and 17 of 429", round, count)
		}
		var l api.SessionList
		c.Want(http.StatusOK, http.MethodGet, sessionsPath+"?status=RUNNING", nil, &l)
		if len(l.Data) != 3 {
			t.Errorf("round %d: the list shows %d running", round, len(l.Data))
		}
		c.Want(http.StatusOK, http.MethodPost, sessionsPath+"/release-all", nil, nil)
	}
}

func TestIdempotencyKey(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	body := testenv.Fields{"browser": false, "shell": true}
	var wg sync.WaitGroup
	answers := make([]testenv.Answer, 4)
	for i := range answers {
		wg.Go(func() {
			var err error
			if answers[i], err = c.Try(context.Background(), http.MethodPost, sessionsPath, body, "Idempotency-Key", "k1"); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	ids, created := map[string]bool{}, 0
	for _, a := range answers {
		var s api.Session
		if err := json.Unmarshal(a.Body, &s); err != nil {
			t.Fatalf("%d %s", a.Status, a.Body)
		}
		ids[s.Id] = true
		if a.Status == http.StatusCreated {
			created++
		}
	}
	if len(ids) != 1 || created != 1 {
		t.Errorf("four creates with one key made %d sessions and %d answers of 201", len(ids), created)
	}
}

// Waits for the minimum lifetime, so it runs beside the other long ones.
func TestTimeoutEndsASession(t *testing.T) {
	t.Parallel()
	c := stack.Start(t).Client(t, "Scale")
	s := c.Create(testenv.Fields{"timeout": 60, "keepAlive": true})
	cdp, err := cdpclient.Dial(within(t, 20*time.Second), *s.ConnectUrl)
	if err != nil {
		t.Fatal(err)
	}
	select {
	case <-cdp.Done():
	case <-time.After(75 * time.Second):
		t.Fatal("the session's socket is still open")
	}
	late := time.Since(s.ExpiresAt)
	if late < -time.Second || late > 5*time.Second {
		t.Errorf("the socket ended %s after expiresAt", late)
	}
	if got := cdp.CloseStatus(); got != 4000 {
		t.Errorf("close code %d (%v), want 4000", got, cdp.Err())
	}
	testenv.Wait(t, 3*time.Second, "COMPLETED", func() bool { return c.Get(s.Id).Status == "COMPLETED" })
	got := c.Get(s.Id)
	if got.EndReason == nil || *got.EndReason != "timeout" {
		t.Errorf("ended: %+v", got)
	}
	if math.Abs(got.Usage.Seconds-60) > 3 {
		t.Errorf("billed %v s of 60", got.Usage.Seconds)
	}
}

func TestUsageAtTheSpecsPrices(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	both, browser := c.Create(testenv.Fields{"shell": true}), c.Create(testenv.Fields{"keepAlive": true})
	time.Sleep(2 * time.Second) // what is billed is time
	for _, x := range []struct {
		id      string
		perHour float64
	}{{both.Id, 0.045 + 3*0.013}, {browser.Id, 0.045}} {
		s := c.Release(x.id)
		lasted := s.EndedAt.Sub(s.StartedAt).Seconds()
		if math.Abs(s.Usage.Seconds-lasted) > 1 || s.Usage.Seconds < 2 {
			t.Errorf("billed %v s of %v", s.Usage.Seconds, lasted)
		}
		if want := s.Usage.Seconds * x.perHour / 3600; math.Abs(s.Usage.CostUsd-want) > 2e-6 {
			t.Errorf("cost %v, want %v", s.Usage.CostUsd, want)
		}
	}
}

// The 5-second rule counts clients; it spares keepAlive and shells.
func TestDisconnectedAfterFiveSeconds(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	plain, kept, shell := c.Create(nil), c.Create(testenv.Fields{"keepAlive": true}), c.Create(testenv.Fields{"shell": true})
	ctx := within(t, 60*time.Second)
	first, err := cdpclient.Dial(ctx, *plain.ConnectUrl)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range []api.Session{plain, kept, shell} {
		cdp, err := cdpclient.Dial(ctx, *s.ConnectUrl)
		if err != nil {
			t.Fatal(err)
		}
		if err := cdp.Call(ctx, "", "Browser.getVersion", nil, nil); err != nil {
			t.Error(err)
		}
		cdp.Close()
	}
	time.Sleep(6 * time.Second) // longer than the rule; the first client is still there
	if got := c.Get(plain.Id); got.Status != "RUNNING" {
		t.Errorf("with a client left it is %s", got.Status)
	}
	first.Close()
	left := time.Now()
	testenv.Wait(t, 10*time.Second, "COMPLETED", func() bool { return c.Get(plain.Id).Status == "COMPLETED" })
	if took := time.Since(left); took < 4*time.Second || took > 8*time.Second {
		t.Errorf("it ended %s after the last client left", took)
	}
	if got := c.Get(plain.Id); *got.EndReason != "disconnected" {
		t.Errorf("endReason %s", *got.EndReason)
	}
	for _, s := range []api.Session{kept, shell} {
		if got := c.Get(s.Id); got.Status != "RUNNING" {
			t.Errorf("keepAlive %v shell %v: %s", s.KeepAlive, s.Shell, got.Status)
		}
	}
}
