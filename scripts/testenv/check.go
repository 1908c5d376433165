package testenv

import (
	"bytes"
	"context"
	"io"
	"mime"
	"net/http"
	"strings"
	"testing"

	"github.com/berth-dev/berth/shared/api"
)

// checked is a transport that holds every answer against openapi.yaml: status,
// content type, body and error code. Streams are checked line by line as they
// are read, file bytes not at all.
type checked struct {
	t    testing.TB
	next http.RoundTripper
}

func (c checked) RoundTrip(r *http.Request) (*http.Response, error) {
	resp, err := c.next.RoundTrip(r)
	if err != nil {
		return nil, err
	}
	op := operationOf(c.t, r)
	if op == nil {
		if resp.StatusCode != http.StatusNotFound && resp.StatusCode != http.StatusMethodNotAllowed {
			c.t.Errorf("%s %s: no such operation in openapi.yaml, answered %d", r.Method, r.URL.Path, resp.StatusCode)
		}
		return resp, nil
	}
	if resp.Header.Get("X-Request-Id") == "" {
		c.t.Errorf("%s answered %d without x-request-id", op.ID, resp.StatusCode)
	}
	return resp, c.check(op, resp)
}

func (c checked) check(op *api.Operation, resp *http.Response) error {
	kind := resp.Header.Get("Content-Type")
	see := func(body []byte) {
		if err := op.CheckResponse(resp.StatusCode, kind, body); err != nil {
			c.t.Errorf("%v\n%.500s", err, body)
		}
	}
	switch media, _, _ := mime.ParseMediaType(kind); media {
	case "application/x-ndjson", "text/event-stream":
		resp.Body = &lines{ReadCloser: resp.Body, see: see}
	case "application/json", "":
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			return err
		}
		resp.Body.Close()
		resp.Body = io.NopCloser(bytes.NewReader(body))
		see(body)
	default:
		see(nil)
	}
	return nil
}

// operationOf finds the operation of a request; of several paths that match,
// the one with fewest parameters.
func operationOf(t testing.TB, r *http.Request) *api.Operation {
	a, err := api.Load()
	if err != nil {
		t.Fatal(err)
	}
	var best *api.Operation
	for _, op := range a.Operations() {
		if op.Method == r.Method && matches(op.Path, r.URL.Path) &&
			(best == nil || strings.Count(op.Path, "{") < strings.Count(best.Path, "{")) {
			best = op
		}
	}
	return best
}

func matches(pattern, path string) bool {
	want, have := strings.Split(pattern, "/"), strings.Split(path, "/")
	if len(want) != len(have) {
		return false
	}
	for i := range want {
		if want[i] != have[i] && !strings.HasPrefix(want[i], "{") {
			return false
		}
	}
	return true
}

// lines shows the lines of a stream to see as they are read: the first
// hundreds all, then some, since a check takes longer than a line.
type lines struct {
	io.ReadCloser
	see  func([]byte)
	part []byte
	seen int
}

func (l *lines) Read(p []byte) (int, error) {
	n, err := l.ReadCloser.Read(p)
	l.part = append(l.part, p[:n]...)
	for {
		at := bytes.IndexByte(l.part, '\n')
		if at < 0 {
			return n, err
		}
		if line := bytes.TrimSpace(l.part[:at]); len(line) > 0 {
			if l.seen++; l.seen < 300 || l.seen%100 == 0 {
				l.see(append(bytes.Clone(line), '\n'))
			}
		}
		l.part = l.part[at+1:]
	}
}

// get asks one of the daemons outside the API's checks.
func get(ctx context.Context, url string) (status int, body string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := bare.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(b), err
}

// bare keeps no connections, so that none outlives its daemon.
var bare = &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
