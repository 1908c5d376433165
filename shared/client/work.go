package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net/http"
	"net/url"
	"strconv"

	"github.com/berth-dev/berth/shared/api"
)

// maxLine bounds one line of a stream.
const maxLine = 8 << 20

// Exec runs a command and waits for it.
func (c *Client) Exec(ctx context.Context, id string, in api.Exec) (r api.ExecResult, err error) {
	in.Stream = nil
	return r, c.call(ctx, http.MethodPost, path(id, "/exec"), in, &r)
}

// ExecStream runs a command and yields its output as it comes, the exit line
// last; a stream that ends without one ends with an error.
func (c *Client) ExecStream(ctx context.Context, id string, in api.Exec) iter.Seq2[api.ExecLine, error] {
	return func(yield func(api.ExecLine, error) bool) {
		in.Stream = P(true)
		b, err := json.Marshal(in)
		if err != nil {
			yield(api.ExecLine{}, err)
			return
		}
		resp, err := c.send(ctx, http.MethodPost, path(id, "/exec"), bytes.NewReader(b), header("Content-Type", "application/json"))
		if err != nil {
			yield(api.ExecLine{}, err)
			return
		}
		defer resp.Body.Close()
		last := false
		for b, err := range lines(resp.Body) {
			var line api.ExecLine
			if err == nil {
				err = json.Unmarshal(b, &line)
			}
			last = line.Type == api.ExecLineTypeExit || line.Type == api.ExecLineTypeError
			if !yield(line, err) || err != nil {
				return
			}
		}
		if !last {
			yield(api.ExecLine{}, fmt.Errorf("exec: %w", io.ErrUnexpectedEOF))
		}
	}
}

// RestartShell ends a named shell; the next command gets a fresh one.
func (c *Client) RestartShell(ctx context.Context, id, shell string) error {
	return c.call(ctx, http.MethodPost, path(id, "/shell/restart"), api.RestartShell{Shell: &shell}, nil)
}

// FollowEvents yields events as they come, after nil those from now on. It
// ends without an error after the last event of an ended session.
func (c *Client) FollowEvents(ctx context.Context, id string, after *uint64) iter.Seq2[api.Event, error] {
	return func(yield func(api.Event, error) bool) {
		tail := "/events/stream"
		if after != nil {
			tail += "?after=" + strconv.FormatUint(*after, 10)
		}
		resp, err := c.send(ctx, http.MethodGet, path(id, tail), nil)
		if err != nil {
			yield(api.Event{}, err)
			return
		}
		defer resp.Body.Close()
		for b, err := range lines(resp.Body) {
			data, isData := bytes.CutPrefix(b, []byte("data: "))
			if err == nil && !isData {
				continue // id:, retry:, comments and blank lines
			}
			var e api.Event
			if err == nil {
				err = json.Unmarshal(data, &e)
			}
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// lines yields lines without their ends; each is good until the next.
func lines(r io.Reader) iter.Seq2[[]byte, error] {
	return func(yield func([]byte, error) bool) {
		in := bufio.NewScanner(r)
		in.Buffer(make([]byte, 64<<10), maxLine)
		for in.Scan() {
			if !yield(in.Bytes(), nil) {
				return
			}
		}
		if err := in.Err(); err != nil {
			yield(nil, fmt.Errorf("stream: %w", err))
		}
	}
}

func file(id, name, extra string) string {
	return path(id, "/files?path="+url.QueryEscape(name)+extra)
}

// ReadFile opens a file of the workspace; the caller closes it.
func (c *Client) ReadFile(ctx context.Context, id, name string) (io.ReadCloser, error) {
	resp, err := c.send(ctx, http.MethodGet, file(id, name, ""), nil)
	if err != nil {
		return nil, err
	}
	return resp.Body, nil
}

// WriteFile stores what r gives, in one step at its end.
func (c *Client) WriteFile(ctx context.Context, id, name string, r io.Reader) (p api.PathSize, err error) {
	resp, err := c.send(ctx, http.MethodPut, file(id, name, ""), r, header("Content-Type", "application/octet-stream"))
	if err != nil {
		return p, err
	}
	defer resp.Body.Close()
	return p, json.NewDecoder(resp.Body).Decode(&p)
}

// List lists a folder of the workspace.
func (c *Client) List(ctx context.Context, id, name string) (l api.Listing, err error) {
	return l, c.call(ctx, http.MethodGet, file(id, name, "&list=1"), nil, &l)
}

// Stat describes a file or folder.
func (c *Client) Stat(ctx context.Context, id, name string) (e api.FileEntry, err error) {
	return e, c.call(ctx, http.MethodGet, file(id, name, "&stat=1"), nil, &e)
}

// DeleteFile removes a file, or a folder with all that is in it.
func (c *Client) DeleteFile(ctx context.Context, id, name string) error {
	return c.call(ctx, http.MethodDelete, file(id, name, ""), nil, nil)
}

// WaitForFile waits until a finished file matches the pattern.
func (c *Client) WaitForFile(ctx context.Context, id, pattern string, timeoutMs int) (p api.PathSize, err error) {
	q := url.Values{"pattern": {pattern}, "timeoutMs": {strconv.Itoa(timeoutMs)}}
	return p, c.call(ctx, http.MethodGet, path(id, "/files/wait?"+q.Encode()), nil, &p)
}
