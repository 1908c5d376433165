package api

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/token"
)

var _ Service = (*sessions.Service)(nil)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m,
		goleak.IgnoreTopFunction("github.com/valyala/fasthttp.updateServerDate.func1.1"), // one ticker for the process
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.updateServerDate.func1"),
		goleak.IgnoreAnyFunction("github.com/valyala/fasthttp.(*workerPool).Start.func2")) // sleeps some seconds more after Shutdown
}

const (
	goodKey = "berth_good"
	goodID  = "11111111-2222-3333-4444-555555555555"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 678_900_000, time.UTC)

// fakeService is a Service whose functions a test replaces one by one.
type fakeService struct {
	Service // nil: what a test does not expect panics, which the server survives

	create  func(context.Context, sessions.CreateRequest) (sessions.View, bool, error)
	list    sessions.ListRequest
	patch   sessions.PatchRequest
	follow  func(ctx context.Context, after *uint64, types []event.Type) iter.Seq2[event.Event, error]
	view    sessions.View
	fail    error
	rotated bool
	ends    chan sessions.Ended
	agent   http.Handler
	agentLn net.Listener
	rt      *http.Transport
	book    book                                        // how the session stands
	link    func(ctx context.Context) (net.Conn, error) // to the agent, instead of a bare connection
}

func newFake(t testing.TB) *fakeService {
	f := &fakeService{view: testView(), ends: make(chan sessions.Ended, 1)}
	f.agent = http.NotFoundHandler()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f.agentLn = ln
	f.rt = &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return f.dial(ctx) },
		WriteBufferSize: 256 << 10}
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { f.agent.ServeHTTP(w, r) }), ErrorLog: slog.NewLogLogger(slog.DiscardHandler, 0)}
	go srv.Serve(ln)
	t.Cleanup(func() { f.rt.CloseIdleConnections(); srv.Close() })
	return f
}

func testView() sessions.View {
	return sessions.View{
		Session: session.Session{ID: goodID, ProjectID: "p1", Region: "local", Kind: session.Both, Timeout: 300, Status: session.Running,
			Viewport: session.Viewport{Width: 1280, Height: 720}, Captcha: "ask", CreatedAt: t0, StartedAt: t0, ExpiresAt: t0.Add(300 * time.Second)},
		URLs: sessions.URLs{Connect: "ws://h/v1/connect?sessionId=" + goodID + "&token=c", Live: "http://h/live/" + goodID + "?token=l", Terminal: "/v1/sessions/" + goodID + "/terminal?token=t"},
		Used: 1500 * time.Millisecond, Cost: 18750,
	}
}

func (f *fakeService) dial(ctx context.Context) (net.Conn, error) {
	if f.link != nil {
		return f.link(ctx)
	}
	var d net.Dialer
	return d.DialContext(ctx, "tcp", f.agentLn.Addr().String())
}

func (f *fakeService) check(id string) (session.Session, error) {
	if f.fail != nil {
		return session.Session{}, f.fail
	}
	if id != goodID {
		return session.Session{}, apierr.New(apierr.NotFound, "there is no session %s", id)
	}
	return f.view.Session, nil
}

func (f *fakeService) Create(ctx context.Context, _ accounts.Caller, req sessions.CreateRequest) (sessions.View, bool, error) {
	return f.create(ctx, req)
}

func (f *fakeService) Get(_ context.Context, _ accounts.Caller, id string) (sessions.View, error) {
	_, err := f.check(id)
	return f.view, err
}

func (f *fakeService) List(_ context.Context, _ accounts.Caller, req sessions.ListRequest) ([]sessions.View, string, error) {
	f.list = req
	return []sessions.View{f.view}, "next", f.fail
}

func (f *fakeService) Patch(_ context.Context, _ accounts.Caller, id string, req sessions.PatchRequest) (sessions.View, error) {
	f.patch = req
	_, err := f.check(id)
	return f.view, err
}

func (f *fakeService) Release(_ context.Context, _ accounts.Caller, id string) (sessions.View, error) {
	_, err := f.check(id)
	v := f.view
	v.Session.Status, v.Session.EndReason, v.Session.EndedAt = session.Completed, session.Released, t0.Add(time.Second)
	return v, err
}

func (f *fakeService) ReleaseAll(context.Context, accounts.Caller) ([]sessions.View, error) {
	return nil, f.fail
}

func (f *fakeService) Live(_ context.Context, _ accounts.Caller, id string) (sessions.URLs, error) {
	_, err := f.check(id)
	return f.view.URLs, err
}

func (f *fakeService) RotateURLs(_ context.Context, _ accounts.Caller, id string, disconnect bool) (sessions.URLs, error) {
	f.rotated = disconnect
	_, err := f.check(id)
	return f.view.URLs, err
}

func (f *fakeService) Events(_ context.Context, _ accounts.Caller, id string, after uint64, _ []event.Type, limit int) (hostlink.EventPage, error) {
	_, err := f.check(id)
	return hostlink.EventPage{NextAfter: after + uint64(limit)}, err
}

func (f *fakeService) FollowEvents(ctx context.Context, _ accounts.Caller, id string, after *uint64, types []event.Type) (iter.Seq2[event.Event, error], error) {
	if _, err := f.check(id); err != nil {
		return nil, err
	}
	return f.follow(ctx, after, types), nil
}

func (f *fakeService) OpenByToken(_ context.Context, p token.Purpose, id, tok string) (session.Session, error) {
	if want := map[token.Purpose]string{token.Connect: "c", token.Live: "l", token.Terminal: "t"}[p]; tok != want || id != goodID {
		return session.Session{}, apierr.New(apierr.Unauthorized, "token: not valid for this session")
	}
	return f.check(id)
}

func (f *fakeService) Running(_ context.Context, _ accounts.Caller, id string) (session.Session, error) {
	return f.check(id)
}

func (f *fakeService) ConnectURL(session.Session) string { return f.view.URLs.Connect }

func (f *fakeService) WatchEnd(ctx context.Context, s session.Session) sessions.Ended {
	if now, ok, _ := f.book.watch(); ok && s.URLKeyVersion < now.CutBelow {
		return sessions.Ended{CloseCode: closeRotated, Reason: "rotated", At: t0}
	}
	select {
	case e := <-f.ends:
		f.ends <- e // for the next watcher
		return e
	case <-ctx.Done():
		return sessions.Ended{}
	}
}

func (f *fakeService) DialAgent(ctx context.Context, _ session.Session) (net.Conn, error) {
	return f.dial(ctx)
}

func (f *fakeService) AgentRoundTrip(_ session.Session, req *http.Request) (*http.Response, error) {
	return f.rt.RoundTrip(req)
}

type fakeAccounts struct{}

func (fakeAccounts) Authenticate(_ context.Context, key string) (accounts.Caller, error) {
	if key != goodKey {
		return accounts.Caller{}, apierr.New(apierr.Unauthorized, "this API key is not valid")
	}
	return accounts.Caller{ProjectID: "p1", KeyID: "k1", Plan: placement.Plan{Name: "Free"}}, nil
}

func (fakeAccounts) Me(context.Context, accounts.Caller) (accounts.Me, error) {
	return accounts.Me{Project: accounts.MeProject{ID: "p1", Name: "dev", Plan: "Free", Limits: accounts.MeLimits{ConcurrentSessions: 3, MaxTimeoutSeconds: 900}}}, nil
}

// Usage answers with the days at the edges of the window asked for.
func (fakeAccounts) Usage(_ context.Context, _ accounts.Caller, w accounts.Window) (accounts.Usage, error) {
	day := func(t time.Time) accounts.DayUsage {
		return accounts.DayUsage{Date: t.UTC().Format(time.DateOnly), Seconds: 1, CostUSD: 1}
	}
	return accounts.Usage{Sessions: 2, Proxy: accounts.ProxyUsage{Residential: 1}, CostUSD: 2, ByDay: []accounts.DayUsage{day(w.From), day(w.To)}}, nil
}

func (fakeAccounts) Pricing() accounts.Prices { return accounts.DefaultPrices() }

// rig is a server on a real socket and its fakes.
type rig struct {
	t    testing.TB
	fake *fakeService
	srv  *Server
	addr string
	http *http.Client
}

func newRig(t testing.TB) *rig {
	t.Helper()
	r := &rig{t: t, fake: newFake(t)}
	var err error
	r.srv, err = New(Config{Service: r.fake, Accounts: fakeAccounts{}, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	r.addr = ln.Addr().String()
	served := make(chan error, 1)
	go func() { served <- r.srv.Serve(ln) }()
	tr := &http.Transport{ReadBufferSize: 256 << 10}
	r.http = &http.Client{Transport: tr}
	t.Cleanup(func() {
		tr.CloseIdleConnections()
		ctx, cancel := context.WithTimeout(context.Background(), patience)
		defer cancel()
		if err := r.srv.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return r
}

type answer struct {
	status int
	header http.Header
	body   []byte
}

// code gives the error code of the answer, "" when it is none.
func (a answer) code() string {
	var e api.Error
	_ = json.Unmarshal(a.body, &e)
	return string(e.Error.Code)
}

func (a answer) message() string {
	var e api.Error
	_ = json.Unmarshal(a.body, &e)
	return e.Error.Message
}

// do sends a request with the good key and checks the answer against
// openapi.yaml. A body that is a string is JSON.
func (r *rig) do(method, path string, body any, header ...string) answer {
	r.t.Helper()
	req := r.request(method, path, body, header...)
	resp, err := r.http.Do(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, path, err)
	}
	a := answer{resp.StatusCode, resp.Header, b}
	r.checkAnswer(method, req.URL.Path, a)
	return a
}

func (r *rig) request(method, path string, body any, header ...string) *http.Request {
	r.t.Helper()
	var reader io.Reader
	json := false
	switch b := body.(type) {
	case string:
		reader, json = strings.NewReader(b), true
	case []byte:
		reader = bytes.NewReader(b)
	case io.Reader:
		reader = b
	}
	req, err := http.NewRequest(method, "http://"+r.addr+path, reader)
	if err != nil {
		r.t.Fatal(err)
	}
	req.Header.Set("X-Api-Key", goodKey)
	if json {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
		if header[i+1] == "" {
			req.Header.Del(header[i])
		}
	}
	return req
}

// checkAnswer holds an answer against its operation; where no operation
// matches, against the envelope.
func (r *rig) checkAnswer(method, path string, a answer) {
	r.t.Helper()
	if a.header.Get("X-Request-Id") == "" {
		r.t.Errorf("%s %s: no x-request-id", method, path)
	}
	op := operationOf(r.t, method, path)
	if op == nil {
		op = r.srv.api.Operation("me") // any: errors have one shape
		if a.code() == "" {
			r.t.Errorf("%s %s: %d is not the envelope: %s", method, path, a.status, a.body)
		}
	}
	if err := op.CheckResponse(a.status, a.header.Get("Content-Type"), a.body); err != nil {
		r.t.Errorf("%s %s: %v: %s", method, path, err, a.body)
	}
}

func operationOf(t testing.TB, method, path string) *api.Operation {
	spec, err := api.Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, op := range spec.Operations() {
		pattern := strings.ReplaceAll(op.Path, "{id}", goodID)
		if op.Method == method && (path == pattern || path == strings.ReplaceAll(op.Path, "{id}", "none")) {
			return op
		}
	}
	return nil
}

// raw sends bytes on a fresh connection and gives it back.
func (r *rig) raw(text string) net.Conn {
	r.t.Helper()
	c, err := net.Dial("tcp", r.addr)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { c.Close() })
	_ = c.SetDeadline(time.Now().Add(patience))
	if _, err := io.WriteString(c, text); err != nil {
		r.t.Fatal(err)
	}
	return c
}

func sessionPath(rest string) string { return "/v1/sessions/" + goodID + rest }

func head(method, path string, header ...string) string {
	return fmt.Sprintf("%s %s HTTP/1.1\r\nHost: h\r\nX-Api-Key: %s\r\n%s\r\n", method, path, goodKey, strings.Join(append(header, ""), "\r\n"))
}

// patience is how long tests wait for what must happen, on a computer that may
// be very busy.
const patience = 40 * time.Second

// soon fails the test when ch gives nothing while patience lasts.
func soon[T any](t testing.TB, what string, ch <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-ch:
	case <-time.After(patience):
		t.Fatalf("%s did not happen", what)
	}
	return v
}
