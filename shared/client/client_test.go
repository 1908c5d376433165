package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is an API that answers one request as handle does and keeps it.
func fake(t *testing.T, handle func(w http.ResponseWriter, r *http.Request, body string)) *Client {
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("X-Api-Key") != "k" {
			t.Errorf("the key is %q", r.Header.Get("X-Api-Key"))
		}
		b, _ := io.ReadAll(r.Body)
		handle(w, r, string(b))
	}))
	c := New(srv.URL+"/", "k", nil)
	t.Cleanup(func() {
		c.Close()
		srv.CloseClientConnections()
		srv.Close()
	})
	return c
}

// Each call asks for the path of the specification.
func TestPaths(t *testing.T) {
	var got string
	c := fake(t, func(w http.ResponseWriter, r *http.Request, body string) {
		got = r.Method + " " + r.URL.RequestURI() + " " + body
		fmt.Fprint(w, "{}")
	})
	ctx, after := t.Context(), uint64(5)
	for want, call := range map[string]func() error{
		"GET /v1/sessions/a%2Fb ":                           func() error { _, err := c.Session(ctx, "a/b"); return err },
		"POST /v1/sessions/s/release ":                      func() error { _, err := c.Release(ctx, "s"); return err },
		"POST /v1/sessions/release-all ":                    func() error { _, err := c.ReleaseAll(ctx); return err },
		"GET /v1/sessions/s/live ":                          func() error { _, err := c.Live(ctx, "s"); return err },
		"GET /v1/auth/me ":                                  func() error { _, err := c.Me(ctx); return err },
		"GET /v1/sessions/s/events?after=5&limit=2 ":        func() error { _, err := c.Events(ctx, "s", after, "", 2); return err },
		"GET /v1/sessions/s/files?path=a+%26b&list=1 ":      func() error { _, err := c.List(ctx, "s", "a &b"); return err },
		"PUT /v1/sessions/s/files?path=x hello":             func() error { _, err := c.WriteFile(ctx, "s", "x", strings.NewReader("hello")); return err },
		"DELETE /v1/sessions/s/files?path=x ":               func() error { return c.DeleteFile(ctx, "s", "x") },
		`POST /v1/sessions/s/shell/restart {"shell":"two"}`: func() error { return c.RestartShell(ctx, "s", "two") },
	} {
		if err := call(); err != nil || got != want {
			t.Errorf("asked %q, want %q; %v", got, want, err)
		}
	}
}

func TestErrorsAreRebuilt(t *testing.T) {
	c := fake(t, func(w http.ResponseWriter, r *http.Request, _ string) {
		if r.Header.Get("Idempotency-Key") != "once" {
			t.Error("no idempotency key")
		}
		w.Header().Set("Retry-After", "5")
		e := apierr.New(apierr.ConcurrencyLimit, "three run")
		w.WriteHeader(e.Status())
		_ = json.NewEncoder(w).Encode(e)
	})
	_, err := c.CreateSession(t.Context(), api.CreateSession{}, "once")
	if e := apierr.From(err); e.Code != apierr.ConcurrencyLimit || e.Message != "three run" || e.RetryAfter != 5*time.Second {
		t.Errorf("%+v", e)
	}
}

func TestExecStream(t *testing.T) {
	answer := `{"type":"stdout","data":"a"}` + "\n" + `{"type":"exit","exitCode":0,"timedOut":false,"durationMs":1,"truncated":false}` + "\n"
	c := fake(t, func(w http.ResponseWriter, _ *http.Request, body string) {
		if !strings.Contains(body, `"stream":true`) {
			t.Errorf("sent %s", body)
		}
		fmt.Fprint(w, answer)
	})
	count := func() (n int, last error) {
		for _, err := range c.ExecStream(t.Context(), "s", api.Exec{Command: "x"}) {
			if last = err; err == nil {
				n++
			}
		}
		return n, last
	}
	if n, err := count(); n != 2 || err != nil {
		t.Errorf("%d lines, %v", n, err)
	}
	for _, at := range []int{len(answer) / 2, strings.Index(answer, "\n") + 1, 0} {
		answer = answer[:at]
		if _, err := count(); err == nil {
			t.Errorf("a stream that was cut looks whole: %q", answer)
		}
	}
}

func TestFollowEvents(t *testing.T) {
	c := fake(t, func(w http.ResponseWriter, r *http.Request, _ string) {
		if r.URL.Query().Get("after") != "7" {
			t.Errorf("asked %s", r.URL)
		}
		fmt.Fprint(w, "retry: 1000\n\n: still here\n\nid: 8\ndata: {\"seq\":8,\"type\":\"exec\",\"at\":\"2026-01-01T00:00:00Z\"}\n\n")
	})
	n := 0
	for e, err := range c.FollowEvents(t.Context(), "s", P(uint64(7))) {
		if n++; err != nil || e.Seq != 8 {
			t.Errorf("%+v %v", e, err)
		}
	}
	if n != 1 {
		t.Errorf("%d events", n)
	}
}

func TestCallsEndWithTheirContext(t *testing.T) {
	c := fake(t, func(_ http.ResponseWriter, r *http.Request, _ string) { <-r.Context().Done() })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := c.Me(ctx); err == nil {
		t.Error("no error")
	}
	for _, err := range c.FollowEvents(ctx, "s", nil) {
		if err == nil {
			t.Error("an event")
		}
	}
}
