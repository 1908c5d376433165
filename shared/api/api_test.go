package api

import (
	"encoding/json"
	"net/url"
	"slices"
	"strings"
	"testing"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/event"
)

func mustLoad(t testing.TB) *API {
	t.Helper()
	a, err := Load()
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// wantError checks the code and the whole message; "" wants no error.
func wantError(t *testing.T, err error, message string) {
	t.Helper()
	switch {
	case message == "" && err != nil:
		t.Fatalf("unexpected error: %v", err)
	case message != "" && err == nil:
		t.Fatalf("no error, want %q", message)
	case message != "":
		e := apierr.From(err)
		if e.Code != apierr.InvalidRequest || !strings.Contains(e.Message, message) {
			t.Fatalf("error %s %q, want invalid_request with %q", e.Code, e.Message, message)
		}
	}
}

func TestDecodeBody(t *testing.T) {
	a := mustLoad(t)
	const min, max = "must be at least", "must be at most"
	tests := []struct{ op, body, message string }{
		{"createSession", ``, ""},
		{"createSession", `  `, ""},
		{"createSession", `{}`, ""},
		{"createSession", `null`, "body: must be an object"},
		{"createSession", `[]`, "body: must be an object"},
		{"createSession", `{`, "body: must be one JSON value"},
		{"createSession", `{} {}`, "body: must be one JSON value"},
		{"createSession", `{"shell":true}x`, "body: must be one JSON value"},
		{"createSession", "{\"region\":\"\xff\"}", "body: must be UTF-8"},
		{"createSession", `{"shell":true,"shell":false}`, "shell: must be given once"},
		{"createSession", `{"viewport":{"width":300,"width":400,"height":300}}`, "viewport.width: must be given once"},
		{"createSession", `{"Timeout":300}`, "Timeout: unknown field; use browser, captcha, keepAlive"},
		{"createSession", `{"viewport":{"width":300,"height":300,"depth":1}}`, "viewport.depth: unknown field; use height or width"},
		{"createSession", `{"timeout":59}`, "timeout: " + min + " 60"},
		{"createSession", `{"timeout":60}`, ""},
		{"createSession", `{"timeout":"60"}`, "timeout: must be a whole number"},
		{"createSession", `{"timeout":60.5}`, "timeout: must be a whole number"},
		{"createSession", `{"timeout":1e999}`, "timeout: must be a whole number"},
		{"createSession", `{"timeout":99999999999999999999}`, "timeout: " + max},
		{"createSession", `{"timeout":null}`, "timeout: must be a whole number"},
		{"createSession", `{"browser":1}`, "browser: must be true or false"},
		{"createSession", `{"captcha":"solve"}`, "captcha: must be ask or ignore"},
		{"createSession", `{"captcha":"ignore"}`, ""},
		{"createSession", `{"userMetadata":[]}`, "userMetadata: must be an object"},
		{"createSession", `{"userMetadata":null}`, "userMetadata: must be an object"},
		{"createSession", `{"userMetadata":{"a":{"b":[1,2.5,"x",null]}}}`, ""},
		{"createSession", `{"userMetadata":{"a":"` + strings.Repeat("x", 65536-8) + `"}}`, ""},
		{"createSession", `{"userMetadata":{"a":"` + strings.Repeat("x", 65536-7) + `"}}`, "userMetadata: must be at most 65536 bytes of JSON"},
		{"createSession", `{"userMetadata":` + strings.Repeat(`{"a":`, 64) + `1` + strings.Repeat(`}`, 65), "must nest at most 64 deep"},
		{"createSession", `{"proxy":true}`, ""},
		{"createSession", `{"proxy":null}`, "proxy: must be true, an object or a list of up to 10 rules"},
		{"createSession", `{"proxy":false}`, "proxy: must be true, an object or a list of up to 10 rules"},
		{"createSession", `{"proxy":{"type":"custom","server":"http://a:1","username":"u","password":"p"}}`, ""},
		{"createSession", `{"proxy":{"type":"residential","country":"us","state":"New York","city":"Albany","ip":"rotating","scope":"all","domainPattern":"a"}}`, ""},
		{"createSession", `{"proxy":[{"type":"none","domainPattern":"a"},{"type":"datacenter"}]}`, ""},
		{"createSession", `{"proxy":{"type":"residential","city":"x"}}`, "proxy.city: needs a country"},
		{"createSession", `{"proxy":[{"type":"residential"},{"type":"datacenter","state":"us_ohio"}]}`, "proxy[1].state: is not for datacenter proxies"},
		{"createSession", `{"proxy":{"type":"custom","server":"http://a:1","type":"none"}}`, "proxy.type: must be given once"},
		{"createSession", `{"proxy":{"type":"custom","server":"http://a:1","pass":"x"}}`, "proxy.pass: unknown field; use type, country"},
		{"createSession", `{"context":{"id":"x"}}`, "context: not available yet"},
		{"createSession", `{"setup":["true"]}`, ""},
		{"createSession", `{"setup":["true",""]}`, "setup[1]: must not be empty"},
		{"createSession", `{"setup":["true",1]}`, "setup[1]: must be a string"},
		{"createSession", `{"setup":[` + strings.Repeat(`"a",`, 100) + `"a"]}`, "setup: must hold at most 100"},
		{"createSession", `{"viewport":{"width":200,"height":200}}`, ""},
		{"createSession", `{"viewport":{"width":3840,"height":2160}}`, ""},
		{"createSession", `{"viewport":{"width":199,"height":200}}`, "viewport.width: " + min + " 200"},
		{"createSession", `{"viewport":{"width":200,"height":199}}`, "viewport.height: " + min + " 200"},
		{"createSession", `{"viewport":{"width":3841,"height":200}}`, "viewport.width: " + max + " 3840"},
		{"createSession", `{"viewport":{"width":200,"height":2161}}`, "viewport.height: " + max + " 2160"},
		{"createSession", `{"viewport":{"width":200}}`, "viewport.height: is required"},
		{"createSession", `{"viewport":[200,200]}`, "viewport: must be an object"},
		{"patchSession", ``, "body: must be a JSON object"},
		{"patchSession", `{}`, ""},
		{"patchSession", `{"timeout":59}`, "timeout: " + min + " 60"},
		{"patchSession", `{"proxy":null}`, ""},
		{"patchSession", `{"proxy":true}`, ""},
		{"patchSession", `{"proxy":[]}`, "proxy: must hold at least one rule"},
		{"patchSession", `{"proxy":"none"}`, "proxy: must be true, an object or a list"},
		{"patchSession", `{"captcha":"x"}`, "captcha: must be ask or ignore"},
		{"patchSession", `{"browser":true}`, "browser: unknown field"},
		{"rotateSessionUrls", ``, ""},
		{"rotateSessionUrls", `{"disconnect":true}`, ""},
		{"rotateSessionUrls", `{"disconnect":"yes"}`, "disconnect: must be true or false"},
		{"exec", ``, "body: must be a JSON object"},
		{"exec", `{}`, "command: is required"},
		{"exec", `{"command":""}`, "command: must not be empty"},
		{"exec", `{"command":"ls","timeoutMs":0}`, "timeoutMs: " + min + " 1"},
		{"exec", `{"command":"ls","timeoutMs":3600000}`, ""},
		{"exec", `{"command":"ls","timeoutMs":3600001}`, "timeoutMs: " + max + " 3600000"},
		{"exec", `{"command":"ls","shell":false}`, ""},
		{"exec", `{"command":"ls","shell":"build-1"}`, ""},
		{"exec", `{"command":"ls","shell":true}`, "shell: must be the name of a shell"},
		{"exec", `{"command":"ls","shell":"a b"}`, "shell: must be the name of a shell"},
		{"exec", `{"command":"ls","shell":null}`, "shell: must be the name of a shell"},
		{"exec", `{"command":"ls","env":{"A":"b"}}`, ""},
		{"exec", `{"command":"ls","env":{"A":1}}`, "env.A: must be a string"},
		{"restartShell", ``, ""},
		{"restartShell", `{"shell":"x"}`, ""},
		{"restartShell", `{"shell":false}`, "shell: must be the name of a shell"},
		{"moveFile", `{"from":"a"}`, "to: is required"},
		{"makeFolder", `{"path":""}`, "path: must not be empty"},
	}
	for _, tt := range tests {
		t.Run(tt.op+" "+tt.body[:min64(len(tt.body))], func(t *testing.T) {
			var v any
			_, err := a.Operation(tt.op).DecodeBody([]byte(tt.body), &v)
			wantError(t, err, tt.message)
		})
	}
}

// 300.0 and 3e2 are integers of JSON Schema; what is forwarded says 300.
func TestWholeNumbers(t *testing.T) {
	const whole = "must be a whole number"
	for _, tt := range []struct{ op, body, plain, message string }{
		{"patchSession", `{"timeout":300.0}`, `{"timeout":300}`, ""},
		{"patchSession", `{ "timeout" : 1e2 }`, `{"timeout":100}`, ""},
		{"patchSession", `{"timeout":3.1536000E+7}`, `{"timeout":31536000}`, ""},
		{"patchSession", `{"timeout":6000e-2}`, `{"timeout":60}`, ""},
		{"patchSession", `{ "timeout": 300 }`, `{ "timeout": 300 }`, ""},
		{"patchSession", `{"timeout":300.5}`, "", "timeout: " + whole},
		{"patchSession", `{"timeout":300.00000000000000001}`, "", "timeout: " + whole},
		{"patchSession", `{"timeout":1e-999999999}`, "", "timeout: must be"},
		{"patchSession", `{"timeout":1e1}`, "", "timeout: must be at least 60"},
		{"createSession", `{"viewport":{"width":2e2,"height":300.0}}`, `{"viewport":{"height":300,"width":200}}`, ""},
		{"createSession", `{"viewport":{"width":200.5,"height":300}}`, "", "viewport.width: " + whole},
		{"createSession", `{"timeout":6e1,"userMetadata":{"n":1.0,"a":"<&>"}}`, `{"timeout":60,"userMetadata":{"n":1.0,"a":"<&>"}}`, ""},
		{"exec", `{"timeoutMs":1e3,"command":"echo '<é>' 1e3"}`, `{"command":"echo '<é>' 1e3","timeoutMs":1000}`, ""},
	} {
		var v struct {
			Timeout   *int     `json:"timeout"`
			TimeoutMs *int     `json:"timeoutMs"`
			Viewport  Viewport `json:"viewport"`
		}
		plain, err := mustLoad(t).Operation(tt.op).DecodeBody([]byte(tt.body), &v)
		if tt.message != "" {
			wantError(t, err, tt.message)
		} else if err != nil || strings.TrimSpace(string(plain)) != tt.plain {
			t.Errorf("%s: %s, %v; want %s", tt.body, plain, err, tt.plain)
		}
	}
	var c CreateSession
	if _, err := mustLoad(t).Operation("createSession").DecodeBody([]byte(`{"timeout":1e2}`), &c); err != nil || *c.Timeout != 100 {
		t.Errorf("timeout 1e2: %v, %v", c.Timeout, err)
	}
}

func min64(n int) int { return min(n, 64) }

func TestDefaults(t *testing.T) {
	a := mustLoad(t)
	var c CreateSession
	if _, err := a.Operation("createSession").DecodeBody([]byte(`{"shell":true}`), &c); err != nil {
		t.Fatal(err)
	}
	if !*c.Browser || !*c.Shell || *c.Timeout != 300 || *c.KeepAlive || *c.Captcha != "ask" || *c.Viewport != (Viewport{Width: 1280, Height: 720}) || *c.StrictRegion {
		t.Errorf("defaults are not the specification's: %+v", c)
	}
	var e Exec
	if _, err := a.Operation("exec").DecodeBody([]byte(`{"command":"x"}`), &e); err != nil || *e.TimeoutMs != 120000 || *e.Stream {
		t.Errorf("exec %+v, %v", e, err)
	}
	var l ListSessionEventsParams
	if err := a.Operation("listSessionEvents").DecodeParams(nil, noHeader, &l); err != nil || *l.Limit != event.DefaultPage {
		t.Errorf("events %+v, %v", l, err)
	}
}

// null removes the proxy, left out it stays: the type keeps the two apart.
func TestPatchTellsNullFromAbsent(t *testing.T) {
	for body, want := range map[string]string{`{}`: "", `{"proxy":null}`: "null", `{"timeout":6e1,"proxy":null}`: "null", `{"proxy": true}`: "true"} {
		var p PatchSession
		if _, err := mustLoad(t).Operation("patchSession").DecodeBody([]byte(body), &p); err != nil || string(p.Proxy) != want {
			t.Errorf("%s: %q, %v; want %q", body, p.Proxy, err, want)
		}
	}
}

// What the reader of settings accepts, the schemas of requests and answers
// accept too: else a client would hear that none of the shapes fits.
func TestProxySchemasAgreeWithTheReader(t *testing.T) {
	a := mustLoad(t)
	for _, setting := range []string{
		`true`, `{"type":"residential"}`, `{"type":"residential","state":"U.S. Virgin Islands","city":"St. John's","ip":"rotating","scope":"all"}`,
		`{"type":"datacenter","country":"de","domainPattern":"^é<>&$"}`, `{"type":"custom","server":"HTTPS://[2606:4700::1]:8443/","username":"ü b","password":"p"}`,
		`[{"type":"none","domainPattern":"a"},{"type":"custom","server":"http://proxy.example.:3128"}]`,
		`[{"type":"residential"}` + strings.Repeat(`,{"type":"none","scope":"all"}`, 9) + `]`,
	} {
		var c CreateSession
		if _, err := a.Operation("createSession").DecodeBody([]byte(`{"proxy":`+setting+`}`), &c); err != nil {
			t.Errorf("%s: %v", setting, err)
			continue
		}
		s, err := egress.ParseSetting(c.Proxy, egress.Sticky)
		if err != nil {
			t.Fatal(err)
		}
		shape := a.Operation("getSession").responses.Value("200").Value.Content["application/json"].Schema.Value.Properties["proxy"].Value
		if err := checkJSON(shape, s.Shown()); err != nil {
			t.Errorf("%s is shown as %s: %v", setting, s.Shown(), err)
		}
	}
}

func TestMetadataKeepsItsText(t *testing.T) {
	var c CreateSession
	body := `{"userMetadata":{"n":12345678901234567890.5,"z":1,"a":"<&>"}}`
	if _, err := mustLoad(t).Operation("createSession").DecodeBody([]byte(body), &c); err != nil {
		t.Fatal(err)
	}
	if got := string(*c.UserMetadata); got != `{"n":12345678901234567890.5,"z":1,"a":"<&>"}` {
		t.Errorf("userMetadata became %s", got)
	}
}

func noHeader(string) string { return "" }

func TestDecodeParams(t *testing.T) {
	a := mustLoad(t)
	tests := []struct{ op, query, message string }{
		{"listSessions", "", ""},
		{"listSessions", "limit=1&limit=2", "limit: must be given once"},
		{"listSessions", "limit=0", "limit: must be at least 1"},
		{"listSessions", "limit=1000", ""},
		{"listSessions", "limit=007", ""},
		{"listSessions", "limit=1001", "limit: must be at most 1000"},
		{"listSessions", "limit=ten", "limit: must be a whole number"},
		{"listSessions", "limit=1e3", "limit: must be a whole number"},
		{"listSessions", "limit=", ""},
		{"listSessions", "nothing=known", ""},
		{"listSessions", "status=RUNNING", ""},
		{"listSessions", "status=running", "status: must be RUNNING, PAUSED, COMPLETED or ERROR"},
		{"listSessions", "metadata[user]=7&metadata[x]=y", ""},
		{"listSessions", "metadata[user]=7&metadata[user]=8", "metadata[user]: must be given once"},
		{"listSessions", "metadata[user]=" + strings.Repeat("x", 1025), "metadata.user: must be at most 1024 characters long"},
		{"listSessions", "metadata=x", "metadata: must be given as metadata[key]=value"},
		{"listSessionEvents", "limit=2000&types=exec,lifecycle&after=3", ""},
		{"listSessionEvents", "limit=2001", "limit: must be at most 2000"},
		{"listSessionEvents", "types=exec,nope", "types[1]: must be console, network"},
		{"listSessionEvents", "after=-1", "after: must be at least 0"},
		{"getFile", "", "path: is required"},
		{"getFile", "path=", "path: must not be empty"},
		{"getFile", "path=a&list=1", ""},
		{"getFile", "path=a&list=yes", "list: must be true or false"},
		{"waitForFile", "pattern=*.csv", ""},
		{"waitForFile", "pattern=*.csv&timeoutMs=0", "timeoutMs: must be at least 1"},
		{"connectBrowser", "token=x", "sessionId: is required"},
	}
	for _, tt := range tests {
		t.Run(tt.op+"?"+tt.query[:min64(len(tt.query))], func(t *testing.T) {
			q, err := url.ParseQuery(tt.query)
			if err != nil {
				t.Fatal(err)
			}
			var v map[string]any
			wantError(t, a.Operation(tt.op).DecodeParams(q, noHeader, &v), tt.message)
		})
	}
}

func TestParamsFillTheirTypes(t *testing.T) {
	a := mustLoad(t)
	var l ListSessionsParams
	q := url.Values{"limit": {"007"}, "metadata[user]": {"7"}, "status": {"PAUSED"}}
	if err := a.Operation("listSessions").DecodeParams(q, noHeader, &l); err != nil {
		t.Fatal(err)
	}
	if *l.Limit != 7 || (*l.Metadata)["user"] != "7" || *l.Status != StatusPAUSED {
		t.Errorf("got %+v", l)
	}
	var s StreamSessionEventsParams
	header := func(name string) string { return map[string]string{"Last-Event-ID": "41"}[name] }
	q = url.Values{"types": {"exec,error"}, "after": {"3"}}
	if err := a.Operation("streamSessionEvents").DecodeParams(q, header, &s); err != nil {
		t.Fatal(err)
	}
	if *s.LastEventID != 41 || *s.After != 3 || !slices.Equal(*s.Types, []EventType{EventTypeExec, EventTypeError}) {
		t.Errorf("got %+v", s)
	}
}

// The closed sets of the contracts and of openapi.yaml are the same sets.
func TestSetsAgree(t *testing.T) {
	for _, c := range apierr.Codes() {
		if !ErrorCode(c).Valid() {
			t.Errorf("code %s is not in openapi.yaml", c)
		}
	}
	for _, typ := range event.AllTypes {
		if !EventType(typ).Valid() {
			t.Errorf("event type %s is not in openapi.yaml", typ)
		}
	}
}

// Every declared error code belongs to the status that declares it.
func TestCodesHaveTheirStatus(t *testing.T) {
	for _, op := range mustLoad(t).Operations() {
		for status, ref := range op.responses.Map() {
			codes, _ := ref.Value.Extensions["x-codes"].([]any)
			for _, c := range codes {
				got := apierr.New(apierr.Code(c.(string)), "x").Status()
				if c == "plan_limit" && status == "402" { // what a plan does not include; 403 is a limit of it
					got = apierr.New(apierr.PlanLimit, "x").PaymentRequired().Status()
				}
				if !strings.HasPrefix(status, itoa(got)) {
					t.Errorf("%s: %s is declared for %s, but has status %d", op.ID, c, status, got)
				}
			}
		}
	}
}

func itoa(n int) string { b, _ := json.Marshal(n); return string(b) }

func TestCheckResponse(t *testing.T) {
	a := mustLoad(t)
	unauthorized := `{"error":{"code":"unauthorized","message":"m"}}`
	tests := []struct {
		op          string
		status      int
		media, body string
		ok          bool
	}{
		{"getSession", 401, "application/json", unauthorized, true},
		{"getSession", 404, "application/json", unauthorized, false},
		{"getSession", 502, "application/json", unauthorized, true},
		{"getSession", 502, "text/plain", unauthorized, false},
		{"getSession", 401, "application/json", `{"error":{"code":"unauthorized"}}`, false},
		{"getSession", 401, "application/json", `{"error":{"code":"unauthorized","message":"m"},"x":1}`, false},
		{"getSession", 202, "application/json", `{}`, false},
		{"getSession", 200, "application/json", `{}`, false},
		{"restartShell", 204, "", ``, true},
		{"restartShell", 204, "", `x`, false},
		{"exec", 200, "application/x-ndjson", "{\"type\":\"stdout\",\"data\":\"a\"}\n{\"type\":\"exit\",\"exitCode\":null}\n", true},
		{"exec", 200, "application/x-ndjson", "{\"type\":\"stdin\"}\n", false},
		{"exec", 200, "application/json", `{"stdout":"","stderr":"","exitCode":null,"timedOut":true,"truncated":false,"durationMs":1}`, true},
		{"streamSessionEvents", 200, "text/event-stream", ": x\n\nid: 1\ndata: {\"seq\":1,\"at\":\"2026-01-02T03:04:05.678Z\",\"type\":\"exec\"}\n\n", true},
		{"streamSessionEvents", 200, "text/event-stream", "data: {\"seq\":1,\"at\":\"yesterday\",\"type\":\"exec\"}\n\n", false},
		{"getFile", 200, "application/json", `{"path":"/workspace","entries":[{"name":"a","type":"file","size":1,"mtime":"2026-01-02T03:04:05Z"}]}`, true},
		{"getFile", 200, "application/octet-stream", "\xff", true},
	}
	for _, tt := range tests {
		if err := a.Operation(tt.op).CheckResponse(tt.status, tt.media, []byte(tt.body)); (err == nil) != tt.ok {
			t.Errorf("%s %d %s: %v, want ok %t", tt.op, tt.status, tt.body, err, tt.ok)
		}
	}
}

// FuzzDecodeBody: whatever comes, no panic, and what is accepted is one JSON
// value that decodes into the generated type and is accepted again.
func FuzzDecodeBody(f *testing.F) {
	for _, s := range []string{`{}`, `{"timeout":60,"viewport":{"width":200,"height":200}}`, `{"setup":["a"]}`, `{"a":1,"a":2}`, `[[[[`, "{\"a\":\"\xff\"}", `{"timeout":1e2}`,
		`{"proxy":[{"type":"custom","server":"http://a:1","password":"p"},{"type":"residential","state":"ohio","domainPattern":"a"}]}`} {
		f.Add([]byte(s))
	}
	op := mustLoad(f).Operation("createSession")
	f.Fuzz(func(t *testing.T, b []byte) {
		var c CreateSession
		_, err := op.DecodeBody(b, &c)
		if err != nil {
			if !apierr.Is(err, apierr.InvalidRequest) || len(apierr.From(err).Message) > 64*80 {
				t.Fatalf("error is not fit for a client: %v", err)
			}
			return
		}
		if *c.Timeout < 60 || c.Viewport.Width < 200 || c.Viewport.Height > 2160 {
			t.Fatalf("bounds do not hold: %+v", c)
		}
		again, err := json.Marshal(c)
		if err != nil {
			t.Fatal(err)
		}
		var d CreateSession
		if _, err := op.DecodeBody(again, &d); err != nil {
			t.Fatalf("%s is accepted, its own encoding %s is not: %v", b, again, err)
		}
	})
}

// FuzzDecodeParams: whatever a query holds, no panic, and accepted values are
// within their bounds.
func FuzzDecodeParams(f *testing.F) {
	for _, s := range []string{"limit=7&metadata[a]=b", "limit=-1", "metadata[=x", "status=RUNNING&cursor=%ff", "limit=9999999999999999999"} {
		f.Add(s)
	}
	op := mustLoad(f).Operation("listSessions")
	f.Fuzz(func(t *testing.T, query string) {
		q, _ := url.ParseQuery(query)
		var p ListSessionsParams
		err := op.DecodeParams(q, noHeader, &p)
		if err != nil {
			if !apierr.Is(err, apierr.InvalidRequest) {
				t.Fatalf("not the client's fault: %v", err)
			}
			return
		}
		if *p.Limit < 1 || *p.Limit > 1000 {
			t.Fatalf("limit %d", *p.Limit)
		}
	})
}
