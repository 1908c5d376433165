package hostlink

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/trust"
)

const (
	maxAnswer  = 64 << 20 // an inventory of a large host, a page of events
	maxLine    = 16 << 20 // one line of a stream; an inventory is one
	maxRefusal = 64 << 10
	watchQuiet = 20 * time.Second
	dialTime   = 5 * time.Second
	tunnelTime = 10 * time.Second // the host's answer to a tunnel: it only dials a machine beside it
)

// Client speaks to one host. Safe for concurrent use.
type Client struct {
	addr  string
	proof string
	http  *http.Client
}

// NewClient makes a client of the hostd at addr (host:port).
func NewClient(addr string, secret *trust.Secret) *Client {
	return &Client{addr: addr, proof: secret.Proof(), http: &http.Client{Transport: &http.Transport{
		MaxIdleConnsPerHost: 64,
		IdleConnTimeout:     time.Minute,
		DialContext:         (&net.Dialer{Timeout: dialTime}).DialContext,
	}}}
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Acquire asks for a machine.
func (c *Client) Acquire(ctx context.Context, a Acquire) (st Status, err error) {
	return st, c.do(ctx, http.MethodPost, "/v1/sessions", a, &st)
}

// Inventory asks for everything the host holds.
func (c *Client) Inventory(ctx context.Context) (inv Inventory, err error) {
	return inv, c.do(ctx, http.MethodGet, "/v1/sessions", nil, &inv)
}

// Patch changes a running session's settings.
func (c *Client) Patch(ctx context.Context, id string, set Settings) (st Status, err error) {
	return st, c.do(ctx, http.MethodPatch, "/v1/sessions/"+url.PathEscape(id), set, &st)
}

// End ends a session; t says which epoch, and why.
func (c *Client) End(ctx context.Context, t Tombstone) (out Tombstone, err error) {
	q := url.Values{"epoch": {strconv.FormatUint(t.Epoch, 10)}, "reason": {string(t.Reason)}, "error": {t.Error}}
	return out, c.do(ctx, http.MethodDelete, "/v1/sessions/"+url.PathEscape(t.SessionID)+"?"+q.Encode(), nil, &out)
}

// Ack says which tombstones the record has taken in.
func (c *Client) Ack(ctx context.Context, ids []string) error {
	return c.do(ctx, http.MethodPost, "/v1/acks", Acks{ids}, nil)
}

// Events reads one page of a session's log.
func (c *Client) Events(ctx context.Context, id string, after uint64, types []event.Type, limit int) (p EventPage, err error) {
	return p, c.do(ctx, http.MethodGet, eventsPath(id, "", after, types)+"&limit="+strconv.Itoa(limit), nil, &p)
}

func eventsPath(id, tail string, after uint64, types []event.Type) string {
	names := make([]string, len(types))
	for i, t := range types {
		names[i] = string(t)
	}
	q := url.Values{"after": {strconv.FormatUint(after, 10)}, "types": {strings.Join(names, ",")}}
	return "/v1/sessions/" + url.PathEscape(id) + "/events" + tail + "?" + q.Encode()
}

// FollowEvents yields a session's events after the given seq as they come. It
// ends without an error after the last event of an ended session.
func (c *Client) FollowEvents(ctx context.Context, id string, after uint64, types []event.Type) iter.Seq2[event.Event, error] {
	return follow[event.Event](ctx, c, eventsPath(id, "/stream", after, types), 0)
}

// Watch yields the host's notices, its inventory first. It ends with the error
// that broke the connection; a host silent for 20 s counts as broken.
func (c *Client) Watch(ctx context.Context) iter.Seq2[Notice, error] {
	return follow[Notice](ctx, c, "/v1/watch", watchQuiet)
}

// follow yields the lines of an NDJSON answer. quiet, if not 0, is the longest
// silence it takes for life.
func follow[T any](ctx context.Context, c *Client, path string, quiet time.Duration) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		var zero T
		ctx, cancel := context.WithCancelCause(ctx)
		defer cancel(nil)
		var silence *time.Timer
		if quiet > 0 {
			silence = time.AfterFunc(quiet, func() { cancel(fmt.Errorf("host silent for %s", quiet)) })
			defer silence.Stop()
		}
		resp, err := c.send(ctx, http.MethodGet, path, nil)
		if err != nil {
			yield(zero, err)
			return
		}
		defer resp.Body.Close()
		in := bufio.NewScanner(resp.Body)
		in.Buffer(make([]byte, 4096), maxLine)
		for in.Scan() {
			if silence != nil {
				silence.Reset(quiet)
			}
			if len(in.Bytes()) == 0 {
				continue
			}
			v := zero
			if err := json.Unmarshal(in.Bytes(), &v); err != nil {
				yield(zero, fmt.Errorf("host link stream: %w", err))
				return
			}
			if !yield(v, nil) {
				return
			}
		}
		if err := in.Err(); err != nil {
			if cause := context.Cause(ctx); cause != nil {
				err = cause
			}
			yield(zero, fmt.Errorf("host link stream: %w", err))
		}
	}
}

func (c *Client) do(ctx context.Context, method, path string, in, out any) error {
	resp, err := c.send(ctx, method, path, in)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if out == nil {
		_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxAnswer)) // so that the connection is used again
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(out); err != nil {
		return fmt.Errorf("host link %s: %w", path, err)
	}
	return nil
}

// send gives the answer of a request that went well, else its error: the
// host's own, or Unavailable when it could not be asked.
func (c *Client) send(ctx context.Context, method, path string, in any) (*http.Response, error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return nil, err
		}
		body = bytes.NewReader(b)
	}
	return c.sendBody(ctx, method, path, body)
}

// sendBody is send with a body as it is.
func (c *Client) sendBody(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://"+c.addr+path, body)
	if err != nil {
		return nil, err
	}
	req.Header.Set(trust.Header, c.proof)
	resp, err := c.http.Do(req)
	if err != nil {
		if cause := context.Cause(ctx); cause != nil {
			return nil, cause
		}
		return nil, apierr.Wrap(err, apierr.Unavailable, "the session's host does not answer; try again soon").After(time.Second)
	}
	if resp.StatusCode < 300 {
		return resp, nil
	}
	return nil, refusal(resp)
}

// refusal is the error of an answer, which it closes.
func refusal(resp *http.Response) error {
	defer resp.Body.Close()
	b, _ := io.ReadAll(io.LimitReader(resp.Body, maxRefusal)) // what came of it is enough
	e := apierr.Parse(resp.StatusCode, b)
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil {
		e = e.After(time.Duration(s) * time.Second)
	}
	return e
}

// Tunnel opens a bare connection to a session's agent, for one transport of
// the session link. The host's refusal (session gone, other epoch) is its
// *apierr.Error.
func (c *Client) Tunnel(ctx context.Context, id string, epoch uint64) (net.Conn, error) {
	conn, err := (&net.Dialer{Timeout: dialTime}).DialContext(ctx, "tcp", c.addr)
	if err != nil {
		return nil, apierr.Wrap(err, apierr.Unavailable, "the session's host does not answer; try again soon").After(time.Second)
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(tunnelTime))
	rest, err := c.upgrade(conn, id, epoch)
	if !stop() {
		err = context.Cause(ctx)
	} else if err == nil {
		err = conn.SetDeadline(time.Time{})
	}
	if err == nil && rest > 0 {
		err = fmt.Errorf("tunnel: the agent spoke before it was spoken to")
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return conn, nil
}

func (c *Client) upgrade(conn net.Conn, id string, epoch uint64) (buffered int, err error) {
	_, err = fmt.Fprintf(conn, "GET /v1/sessions/%s/tunnel?epoch=%d HTTP/1.1\r\nHost: %s\r\n%s: %s\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n",
		url.PathEscape(id), epoch, c.addr, trust.Header, c.proof, TunnelProtocol)
	if err != nil {
		return 0, fmt.Errorf("tunnel: %w", err)
	}
	in := bufio.NewReaderSize(conn, 1024)
	resp, err := http.ReadResponse(in, nil)
	if err != nil {
		return 0, fmt.Errorf("tunnel: %w", err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return 0, refusal(resp)
	}
	return in.Buffered(), nil
}
