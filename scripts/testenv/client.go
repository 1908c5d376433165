package testenv

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
)

// requestTime bounds a request whose test gives no context of its own.
const requestTime = 90 * time.Second

// NewKey makes an API key, in a new project, of a plan.
func (e *Env) NewKey(t testing.TB, plan string) string {
	t.Helper()
	return e.NewKeyOf(t, fmt.Sprintf("p%d-%d", time.Now().UnixNano(), e.keys.Add(1)), plan)
}

// NewKeyOf makes an API key of a named project.
func (e *Env) NewKeyOf(t testing.TB, project, plan string) string {
	t.Helper()
	out, err := e.Berth("keys", "create", "--home", filepath.Join(e.Home, Gateway), "--project", project, "--plan", plan)
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(out)
}

// Berth runs the berth command and gives what it prints.
func (e *Env) Berth(args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	return output(ctx, filepath.Join(e.parts.Bin, "berth"), args...)
}

// Client calls the API as one project. Its short calls fail the test on any
// error; Do and Send show the answer as it is. Safe for concurrent use, but
// only the test's own goroutine may use the calls that fail the test.
type Client struct {
	Env  *Env
	Key  string
	HTTP *http.Client // checks every answer against openapi.yaml

	t testing.TB
}

// Client makes a project of a plan and a client of it. Its sessions are
// released when the test ends.
func (e *Env) Client(t testing.TB, plan string) *Client {
	t.Helper()
	c := e.ClientOf(t, e.NewKey(t, plan))
	t.Cleanup(func() {
		if err := e.agentRaces(); err != nil {
			t.Error(err)
		}
		if _, ended := e.daemons[Gateway].exited(); !ended {
			c.Do(http.MethodPost, "/v1/sessions/release-all", nil)
		}
	})
	return c
}

// ClientOf is a client with a key, which may be wrong.
func (e *Env) ClientOf(t testing.TB, key string) *Client {
	transport := &http.Transport{MaxIdleConnsPerHost: 16}
	t.Cleanup(transport.CloseIdleConnections)
	return &Client{Env: e, Key: key, t: t, HTTP: &http.Client{Transport: checked{t, transport}}}
}

// Answer is a response, read whole.
type Answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// Code is the error code of an answer that is an error.
func (a Answer) Code() apierr.Code { return apierr.Parse(a.Status, a.Body).Code }

// Send makes a request; body is nil, an io.Reader of raw bytes, or anything
// that becomes JSON. The caller closes the response's body.
func (c *Client) Send(ctx context.Context, method, path string, body any, header ...string) (*http.Response, error) {
	var r io.Reader
	kind := ""
	switch b := body.(type) {
	case nil:
	case io.Reader:
		r, kind = b, "application/octet-stream"
	default:
		encoded, err := json.Marshal(b)
		if err != nil {
			return nil, err
		}
		r, kind = bytes.NewReader(encoded), "application/json"
	}
	req, err := http.NewRequestWithContext(ctx, method, c.Env.BaseURL+path, r)
	if err != nil {
		return nil, err
	}
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	if c.Key != "" {
		req.Header.Set("X-Api-Key", c.Key)
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	return c.HTTP.Do(req)
}

// Try makes a request and reads the answer; it never fails the test by itself.
func (c *Client) Try(ctx context.Context, method, path string, body any, header ...string) (Answer, error) {
	resp, err := c.Send(ctx, method, path, body, header...)
	if err != nil {
		return Answer{}, err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return Answer{resp.StatusCode, resp.Header, b}, err
}

// TryInto is Try that gives another status as an error, and decodes the answer
// into result unless that is nil.
func (c *Client) TryInto(ctx context.Context, status int, method, path string, body, result any) error {
	a, err := c.Try(ctx, method, path, body)
	if err == nil && a.Status != status {
		err = fmt.Errorf("got %d, want %d: %.600s", a.Status, status, a.Body)
	}
	if err == nil && result != nil {
		err = json.Unmarshal(a.Body, result)
	}
	if err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// Do is Try that fails the test when there is no answer.
func (c *Client) Do(method, path string, body any, header ...string) Answer {
	c.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), requestTime)
	defer cancel()
	a, err := c.Try(ctx, method, path, body, header...)
	if err != nil {
		c.t.Fatalf("%s %s: %v", method, path, err)
	}
	return a
}

// Want is Do that fails the test on another status, and decodes the answer
// into result unless that is nil.
func (c *Client) Want(status int, method, path string, body, result any, header ...string) Answer {
	c.t.Helper()
	a := c.Do(method, path, body, header...)
	if a.Status != status {
		c.t.Fatalf("%s %s: got %d, want %d: %.600s", method, path, a.Status, status, a.Body)
	}
	if result != nil {
		if err := json.Unmarshal(a.Body, result); err != nil {
			c.t.Fatalf("%s %s: %v: %.600s", method, path, err, a.Body)
		}
	}
	return a
}

// Refused is Do that wants an error with a code whose message has a phrase.
func (c *Client) Refused(code apierr.Code, phrase, method, path string, body any, header ...string) Answer {
	c.t.Helper()
	a := c.Do(method, path, body, header...)
	got := apierr.Parse(a.Status, a.Body)
	if want := apierr.New(code, "").Status(); a.Status != want || got.Code != code || !strings.Contains(got.Message, phrase) {
		c.t.Fatalf("%s %s: got %d %q, want %d %s with %q", method, path, a.Status, a.Body, want, code, phrase)
	}
	return a
}

// Fields is a JSON object.
type Fields = map[string]any

// Create starts a session.
func (c *Client) Create(f Fields) api.Session {
	c.t.Helper()
	var s api.Session
	var body any // none at all for no fields
	if f != nil {
		body = f
	}
	c.Want(http.StatusCreated, http.MethodPost, "/v1/sessions", body, &s)
	return s
}

// Shell starts a session with a shell only.
func (c *Client) Shell() api.Session {
	c.t.Helper()
	return c.Create(Fields{"browser": false, "shell": true})
}

// Get shows a session.
func (c *Client) Get(id string) api.Session {
	c.t.Helper()
	var s api.Session
	c.Want(http.StatusOK, http.MethodGet, "/v1/sessions/"+id, nil, &s)
	return s
}

// Release ends a session.
func (c *Client) Release(id string) api.Session {
	c.t.Helper()
	var s api.Session
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+id+"/release", nil, &s)
	return s
}

// Exec runs a command in the default shell.
func (c *Client) Exec(id, command string) agentlink.ExecResult {
	c.t.Helper()
	return c.ExecWith(id, Fields{"command": command})
}

// ExecWith runs a command with fields of its own.
func (c *Client) ExecWith(id string, f Fields) agentlink.ExecResult {
	c.t.Helper()
	var r agentlink.ExecResult
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+id+"/exec", f, &r)
	return r
}

// Output runs a command that must succeed and gives its output, trimmed.
func (c *Client) Output(id, command string) string {
	c.t.Helper()
	r := c.Exec(id, command)
	if r.ExitCode == nil || *r.ExitCode != 0 {
		c.t.Fatalf("%s: %+v", command, r)
	}
	return strings.TrimSpace(r.Stdout)
}

// Events lists a session's events so far.
func (c *Client) Events(id string) []event.Event {
	c.t.Helper()
	var page struct{ Data []event.Event }
	c.Want(http.StatusOK, http.MethodGet, "/v1/sessions/"+id+"/events?limit=2000", nil, &page)
	return page.Data
}

// FilePath is the path of a file's endpoint.
func FilePath(id, path string) string {
	return "/v1/sessions/" + id + "/files?path=" + url.QueryEscape(path)
}

// Wait polls until done says true; what names it when it never does.
func Wait(t testing.TB, within time.Duration, what string, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(within); !done(); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("after %s still not: %s", within, what)
		}
	}
}
