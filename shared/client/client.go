// Package client is the Go client of Berth's API: sessions, shell, files and
// events over REST. Requests and answers are the types of shared/api; errors
// are *apierr.Error, rebuilt from the answer. For CDP use shared/cdpclient, or
// any CDP library, with Session.ConnectUrl.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
)

// Client speaks to one endpoint as one project. Safe for concurrent use.
type Client struct {
	base string
	key  string
	http *http.Client
}

// New makes a client of the API at base ("http://127.0.0.1:8080") with an API
// key. hc nil means a client of its own that keeps connections.
func New(base, key string, hc *http.Client) *Client {
	if hc == nil {
		t := http.DefaultTransport.(*http.Transport).Clone()
		t.Proxy, t.MaxIdleConnsPerHost = nil, 64
		hc = &http.Client{Transport: t}
	}
	return &Client{strings.TrimSuffix(base, "/"), key, hc}
}

// Base is the endpoint's address.
func (c *Client) Base() string { return c.base }

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// option changes a request before it is sent.
type option func(*http.Request)

func header(name, value string) option {
	return func(r *http.Request) { r.Header.Set(name, value) }
}

// call sends in as JSON, unless nil, and decodes the answer into out, unless nil.
func (c *Client) call(ctx context.Context, method, path string, in, out any, opts ...option) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
		opts = append(opts, header("Content-Type", "application/json"))
	}
	resp, err := c.send(ctx, method, path, body, opts...)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		_, err = io.Copy(io.Discard, resp.Body) // so that the connection is used again
		return err
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("%s %s: %w", method, path, err)
	}
	return nil
}

// send gives the answer of a request that went well, else its error.
func (c *Client) send(ctx context.Context, method, path string, body io.Reader, opts ...option) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set("X-Api-Key", c.key)
	for _, o := range opts {
		o(req)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10)) // what came of it is enough
	e := apierr.Parse(resp.StatusCode, b)
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e = e.After(time.Duration(s) * time.Second)
	}
	return nil, e
}
