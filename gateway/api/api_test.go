package api

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

func TestSessionObject(t *testing.T) {
	r := newRig(t)
	a := r.do("GET", sessionPath(""), nil)
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	var got map[string]any
	if err := json.Unmarshal(a.body, &got); err != nil {
		t.Fatal(err)
	}
	for _, null := range []string{"endedAt", "endReason", "contextId", "error", "proxy", "attention"} {
		if v, there := got[null]; !there || v != nil {
			t.Errorf("%s is %v, want null", null, v)
		}
	}
	if _, there := got["setupStatus"]; there {
		t.Error("setupStatus without setup")
	}
	want := map[string]any{"status": "RUNNING", "workspacePath": "/workspace", "createdAt": "2026-01-02T03:04:05.678Z", "timeout": 300.0}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s is %v, want %v", k, got[k], v)
		}
	}
	if u := got["usage"].(map[string]any); u["seconds"] != 1.5 || u["costUsd"] != 0.00001875 {
		t.Errorf("usage %v", u)
	}
	if !strings.Contains(string(a.body), "&token=c") {
		t.Error("URLs are escaped")
	}
}

func TestSessionKindsAndEnds(t *testing.T) {
	r := newRig(t)
	v := &r.fake.view
	v.Session.Kind, v.URLs.Terminal = session.Browser, ""
	v.Session.Status, v.Session.Error, v.Session.EndedAt = session.Error, "The host was lost.", t0
	v.Session.SetupStatus, v.Session.SetupError = session.SetupFailed, "exit 1"
	var s api.Session
	a := r.do("GET", sessionPath(""), nil)
	if err := json.Unmarshal(a.body, &s); err != nil {
		t.Fatal(err)
	}
	if s.Shell || !s.Browser || s.TerminalUrl != nil || s.EndReason != nil || *s.Error != "The host was lost." || s.EndedAt == nil || *s.SetupStatus != "failed" || *s.SetupError != "exit 1" {
		t.Errorf("got %s", a.body)
	}
	a = r.do("POST", sessionPath("/release"), nil)
	if a.status != 200 || !strings.Contains(string(a.body), `"endReason":"released"`) {
		t.Errorf("release: %d %s", a.status, a.body)
	}
}

func TestCreate(t *testing.T) {
	r := newRig(t)
	var got sessions.CreateRequest
	existing := false
	r.fake.create = func(_ context.Context, req sessions.CreateRequest) (sessions.View, bool, error) {
		got = req
		return r.fake.view, existing, nil
	}
	if a := r.do("POST", "/v1/sessions", nil); a.status != 201 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if got.Kind != session.Browser || got.Timeout != 300 || got.Captcha != "ask" || got.Viewport != (session.Viewport{Width: 1280, Height: 720}) {
		t.Errorf("defaults: %+v", got)
	}
	existing = true
	a := r.do("POST", "/v1/sessions", `{"shell":true,"browser":false,"timeout":60,"keepAlive":true,"setup":["a"],"userMetadata":{"x":1},"region":"eu","strictRegion":true,"captcha":"ignore"}`, "Idempotency-Key", "k")
	if a.status != 200 {
		t.Fatalf("%d %s", a.status, a.body)
	}
	if got.Kind != session.Shell || got.Timeout != 60 || !got.KeepAlive || got.Setup[0] != "a" || string(got.UserMetadata) != `{"x":1}` || got.Region != "eu" || !got.StrictRegion || got.Captcha != "ignore" || got.IdempotencyKey != "k" {
		t.Errorf("got %+v", got)
	}
}

// Every way to be refused, and that each is the envelope (do checks it).
func TestRefusals(t *testing.T) {
	r := newRig(t)
	r.fake.create = func(context.Context, sessions.CreateRequest) (sessions.View, bool, error) {
		return r.fake.view, false, nil
	}
	big := `{"region":"` + strings.Repeat("x", maxJSONBytes) + `"}`
	tests := []struct {
		name, method, path string
		body               any
		header             []string
		status             int
		code, message      string
	}{
		{"no key", "GET", "/v1/sessions", nil, []string{"X-Api-Key", ""}, 401, "unauthorized", "not valid"},
		{"bad key", "GET", "/v1/sessions", nil, []string{"X-Api-Key", "x"}, 401, "unauthorized", "not valid"},
		{"basic", "GET", "/v1/sessions", nil, []string{"X-Api-Key", "", "Authorization", "Basic " + goodKey}, 401, "unauthorized", ""},
		{"key before body", "POST", "/v1/sessions", `{`, []string{"X-Api-Key", "x"}, 401, "unauthorized", ""},
		{"no route", "GET", "/v2/sessions", nil, nil, 404, "not_found", ""},
		{"trailing slash", "GET", "/v1/sessions/", nil, nil, 404, "not_found", ""},
		{"method", "PUT", "/v1/sessions", nil, nil, 405, "method_not_allowed", "takes GET, POST"},
		{"options", "OPTIONS", "/v1/sessions", nil, nil, 405, "method_not_allowed", ""},
		{"not found", "GET", "/v1/sessions/none", nil, nil, 404, "not_found", "none"},
		{"media", "POST", "/v1/sessions", `{}`, []string{"Content-Type", "text/plain"}, 415, "unsupported_media_type", "application/json"},
		{"no media", "POST", "/v1/sessions", []byte(`{}`), nil, 415, "unsupported_media_type", ""},
		{"too large", "POST", "/v1/sessions", big, nil, 413, "too_large", "1048576"},
		{"too large, chunked", "POST", "/v1/sessions", io.MultiReader(strings.NewReader(big)), []string{"Content-Type", "application/json"}, 413, "too_large", ""},
		{"not JSON", "POST", "/v1/sessions", `{`, nil, 400, "invalid_request", "one JSON value"},
		{"bound", "POST", "/v1/sessions", `{"timeout":59}`, nil, 400, "invalid_request", "timeout: must be at least 60"},
		{"unknown", "POST", "/v1/sessions", `{"tiemout":60}`, nil, 400, "invalid_request", "tiemout: unknown field"},
		{"proxy", "POST", "/v1/sessions", `{"proxy":null}`, nil, 400, "invalid_request", "proxy: must be true, an object or a list"},
		{"context", "POST", "/v1/sessions", `{"context":{"id":"x"}}`, nil, 400, "invalid_request", "context: not available yet"},
		{"neither", "POST", "/v1/sessions", `{"browser":false}`, nil, 400, "invalid_request", "browser, shell"},
		{"setup without shell", "POST", "/v1/sessions", `{"setup":["a"]}`, nil, 400, "invalid_request", "setup: needs a shell"},
		{"long key", "POST", "/v1/sessions", nil, []string{"Idempotency-Key", strings.Repeat("k", 256)}, 400, "invalid_request", "idempotency-key: must be at most 255"},
		{"patch proxy", "PATCH", sessionPath(""), `{"proxy":[]}`, nil, 400, "invalid_request", "proxy: must hold at least one rule"},
		{"patch empty", "PATCH", sessionPath(""), nil, nil, 400, "invalid_request", "body"},
		{"list limit", "GET", "/v1/sessions?limit=0", nil, nil, 400, "invalid_request", "limit"},
		{"events limit", "GET", sessionPath("/events?limit=2001"), nil, nil, 400, "invalid_request", "limit: must be at most 2000"},
		{"stream id", "GET", sessionPath("/events/stream"), nil, []string{"Last-Event-ID", "x"}, 400, "invalid_request", "Last-Event-ID"},
		{"exec empty", "POST", sessionPath("/exec"), `{}`, nil, 400, "invalid_request", "command: is required"},
		{"exec none", "POST", "/v1/sessions/none/exec", `{"command":"x"}`, nil, 404, "not_found", ""},
		{"file path", "GET", sessionPath("/files"), nil, nil, 400, "invalid_request", "path: is required"},
		{"file path bytes", "GET", sessionPath("/files?path=%ff"), nil, nil, 400, "invalid_request", "path: must be UTF-8"},
		{"wait", "GET", sessionPath("/files/wait?pattern=a&timeoutMs=600001"), nil, nil, 400, "invalid_request", "timeoutMs: must be at most 600000"},
		{"connect token", "GET", "/v1/connect?sessionId=" + goodID, nil, nil, 401, "unauthorized", "token"},
		{"panic", "POST", "/v1/sessions", `{"shell":true,"region":"panic"}`, nil, 500, "internal", "request id"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if tt.name == "panic" {
				r.fake.create = func(context.Context, sessions.CreateRequest) (sessions.View, bool, error) { panic("secret") }
			}
			a := r.do(tt.method, tt.path, tt.body, tt.header...)
			if a.status != tt.status || a.code() != tt.code || !strings.Contains(a.message(), tt.message) || strings.Contains(a.message(), "secret") {
				t.Errorf("%d %s", a.status, a.body)
			}
		})
	}
}

func TestServiceErrorsReachTheClient(t *testing.T) {
	r := newRig(t)
	for _, code := range apierr.Codes() {
		r.fake.fail = apierr.New(code, "because %s", code)
		a := r.do("GET", "/v1/sessions", nil)
		if a.status != apierr.New(code, "").Status() || a.code() != string(code) {
			t.Errorf("%s became %d %s", code, a.status, a.body)
		}
		if (a.status == 429 || a.status == 503) != (a.header.Get("Retry-After") != "") {
			t.Errorf("%s: retry-after %q", code, a.header.Get("Retry-After"))
		}
	}
	r.fake.fail = apierr.New(apierr.NoCapacity, "full").After(1500 * time.Millisecond)
	if a := r.do("GET", "/v1/sessions", nil); a.header.Get("Retry-After") != "2" {
		t.Errorf("retry-after %q, want 2", a.header.Get("Retry-After"))
	}
	r.fake.fail = errors.New("a secret detail")
	if a := r.do("GET", "/v1/sessions", nil); a.status != 500 || strings.Contains(string(a.body), "secret") {
		t.Errorf("%d %s", a.status, a.body)
	}
}

func TestEveryOperationAnswers(t *testing.T) {
	r := newRig(t)
	r.do("GET", "/v1/sessions?status=PAUSED&limit=7&cursor=c&region=eu&metadata[a]=b", nil)
	if l := r.fake.list; l.Status != "PAUSED" || l.Limit != 7 || l.Cursor != "c" || l.Region != "eu" || l.Metadata["a"] != "b" {
		t.Errorf("list %+v", l)
	}
	r.do("PATCH", sessionPath(""), `{"keepAlive":false,"timeout":600,"captcha":"ignore","userMetadata":{}}`)
	if p := r.fake.patch; *p.KeepAlive || *p.Timeout != 600 || *p.Captcha != "ignore" || string(p.UserMetadata) != "{}" {
		t.Errorf("patch %+v", p)
	}
	r.do("PATCH", sessionPath(""), `{}`)
	if p := r.fake.patch; p.KeepAlive != nil || p.Timeout != nil || p.Captcha != nil || p.UserMetadata != nil {
		t.Errorf("patch %+v, want nothing", p)
	}
	for _, tt := range []struct {
		method, path, want string
		body               any
	}{
		{"DELETE", sessionPath(""), `"COMPLETED"`, nil},
		{"POST", "/v1/sessions/release-all", `{"data":[]}`, nil},
		{"GET", sessionPath("/live"), `"terminalUrl":"/v1/sessions/`, nil},
		{"POST", sessionPath("/rotate-urls"), `"connectUrl":"ws://`, nil},
		{"POST", sessionPath("/rotate-urls"), `"connectUrl":"ws://`, `{"disconnect":true}`},
		{"GET", sessionPath("/events?after=3"), `{"data":[],"nextAfter":503}`, nil},
		{"GET", "/v1/auth/me", `"proxyGbPerMonth":null`, nil},
		{"GET", "/healthz", "ok", nil},
		{"GET", "/readyz", "ready", nil},
		{"GET", "/metrics", `berth_api_requests_total{operation="getSessionLive",status="200"}`, nil},
	} {
		if a := r.do(tt.method, tt.path, tt.body); a.status != 200 || !strings.Contains(string(a.body), tt.want) {
			t.Errorf("%s %s: %d %s", tt.method, tt.path, a.status, a.body)
		}
	}
	if !r.fake.rotated {
		t.Error("disconnect did not arrive")
	}
}

func TestKeysAndRequestIDs(t *testing.T) {
	r := newRig(t)
	for _, auth := range []string{"Bearer " + goodKey, "bearer " + goodKey} {
		if a := r.do("GET", "/v1/auth/me", nil, "X-Api-Key", "", "Authorization", auth); a.status != 200 {
			t.Errorf("%s: %d", auth, a.status)
		}
	}
	if a := r.do("GET", "/healthz", nil, "X-Request-Id", "abc-1.2:3_4"); a.header.Get("X-Request-Id") != "abc-1.2:3_4" {
		t.Errorf("request id %q", a.header.Get("X-Request-Id"))
	}
	for _, bad := range []string{"a b", "<x>", strings.Repeat("a", 129), "\xffabc"} {
		if a := r.do("GET", "/healthz", nil, "X-Request-Id", bad); !strings.HasPrefix(a.header.Get("X-Request-Id"), "req_") {
			t.Errorf("took over %q", bad)
		}
	}
	if a := r.do("GET", "/v1/auth/me", nil, "X-Api-Key", "x"); a.header.Get("Www-Authenticate") == "" {
		t.Error("401 without www-authenticate (RFC 9110 11.6.1)")
	}
}

func TestTableAndSpecAgree(t *testing.T) {
	spec, _ := api.Load()
	if len(spec.Operations()) != len(routes) {
		t.Errorf("%d operations, %d handlers", len(spec.Operations()), len(routes))
	}
	saved := routes["me"]
	delete(routes, "me")
	defer func() { routes["me"] = saved }()
	if _, err := New(Config{}); err == nil || !strings.Contains(err.Error(), "me") {
		t.Errorf("an operation without handler: %v", err)
	}
}

// Malformed requests get one envelope and a closed connection; nothing that
// follows them is taken for a request.
func TestMalformed(t *testing.T) {
	r := newRig(t)
	for name, text := range map[string]string{
		"garbage":                 "\x16\x03\x01\x02\x00\r\n\r\n",
		"no version":              "GET /healthz\r\n\r\n",
		"space in name":           "GET /healthz HTTP/1.1\r\nHost : h\r\n\r\n",
		"two lengths":             "POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
		"negative length":         "POST /v1/sessions HTTP/1.1\r\nHost: h\r\nContent-Length: -1\r\n\r\n{}",
		"huge header":             "GET /healthz HTTP/1.1\r\nHost: h\r\nX: " + strings.Repeat("x", maxHeaderBytes) + "\r\n\r\n",
		"unknown coding":          "POST /v1/sessions HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: gzip\r\n\r\n",
		"length and coding":       head("POST", "/v1/sessions", "Content-Type: application/json", "Content-Length: 4", "Transfer-Encoding: chunked") + "0\r\n\r\nGET /healthz HTTP/1.1\r\nHost: h\r\n\r\n",
		"bad chunk":               head("POST", "/v1/sessions", "Content-Type: application/json", "Transfer-Encoding: chunked") + "zz\r\n{}\r\n0\r\n\r\n",
		"body cut, then the next": head("POST", "/v1/sessions", "Content-Type: text/plain", "Content-Length: 9000000") + strings.Repeat("GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n", 2000),
	} {
		t.Run(name, func(t *testing.T) {
			c := r.raw(text)
			resp, err := http.ReadResponse(bufio.NewReader(c), nil)
			if err != nil {
				t.Fatal(err)
			}
			b, _ := io.ReadAll(resp.Body)
			a := answer{resp.StatusCode, resp.Header, b}
			if a.status < 400 || a.code() == "" || !resp.Close {
				t.Errorf("%d, close %t: %s", a.status, resp.Close, b)
			}
		})
	}
}

// A refused request's body is never taken for the next request, and the
// connection lives on when the body was short.
func TestPipelining(t *testing.T) {
	r := newRig(t)
	inner := "GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
	text := head("POST", "/v1/sessions", "Content-Type: text/plain", "Content-Length: "+itoa(len(inner))) + inner +
		head("GET", "/v1/auth/me") +
		head("GET", "/v1/sessions", "Content-Length: 3") + "abc" +
		head("POST", "/nowhere", "Transfer-Encoding: chunked") + "3\r\nabc\r\n0\r\n\r\n" +
		head("GET", "/healthz")
	br := bufio.NewReader(r.raw(text))
	for i, want := range []int{415, 200, 200, 404, 200} {
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatalf("answer %d: %v", i, err)
		}
		b, _ := io.ReadAll(resp.Body)
		if resp.StatusCode != want {
			t.Errorf("answer %d: %d, want %d: %s", i, resp.StatusCode, want, b)
		}
	}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }
