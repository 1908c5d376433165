package proxylink

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/trust"
)

const (
	controlDial = 2 * time.Second
	maxAnswer   = 64 << 20 // bytes; 100,000 rows have about 20 MiB
	streamQuiet = 10 * Beat
)

// Client speaks to one proxyd's control address. Safe for concurrent use.
type Client struct {
	base  string
	proof string
	http  *http.Client
}

// NewClient makes a client of the proxyd whose control address is addr.
func NewClient(addr string, secret *trust.Secret) *Client {
	return &Client{base: "http://" + addr, proof: secret.Proof(), http: &http.Client{Transport: &http.Transport{
		DialContext: (&net.Dialer{Timeout: controlDial}).DialContext, MaxIdleConnsPerHost: 2, IdleConnTimeout: time.Minute,
	}}}
}

// Close drops idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Ledger asks for every row that is not acknowledged, as of now.
func (c *Client) Ledger(ctx context.Context) (l Ledger, err error) {
	resp, err := c.do(ctx, http.MethodGet, "/v1/ledger", nil)
	if err != nil {
		return l, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(&l); err != nil {
		return l, fmt.Errorf("read a ledger: %w", err)
	}
	return l, nil
}

// Acknowledge says that the record has these rows.
func (c *Client) Acknowledge(ctx context.Context, l Ledger) error {
	resp, err := c.do(ctx, http.MethodPost, "/v1/ledger/acks", l)
	if err != nil {
		return err
	}
	return resp.Body.Close()
}

// FollowLedger calls see for each line of the ledger's stream, in order, until
// the stream or ctx ends or see fails; the error says which.
func (c *Client) FollowLedger(ctx context.Context, see func(Ledger) error) error {
	return follow(ctx, c, "/v1/ledger/stream", see)
}

// FollowRefusals calls see for each refused connection that came from host.
func (c *Client) FollowRefusals(ctx context.Context, host string, see func(Refused) error) error {
	return follow(ctx, c, "/v1/refusals?host="+url.QueryEscape(host), see)
}

// follow reads NDJSON. A stream that is silent for streamQuiet has ended: its
// other end speaks or sends blank lines once a Beat.
func follow[T any](ctx context.Context, c *Client, path string, see func(T) error) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	quiet := time.AfterFunc(streamQuiet, func() { cancel(fmt.Errorf("follow %s: silent for %s", path, streamQuiet)) })
	defer quiet.Stop()
	lines := bufio.NewReaderSize(resp.Body, 64<<10)
	for {
		line, err := lines.ReadBytes('\n')
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return cause
			}
			return fmt.Errorf("follow %s: %w", path, err)
		}
		quiet.Reset(streamQuiet)
		if len(bytes.TrimSpace(line)) == 0 {
			continue
		}
		var v T
		if err := json.Unmarshal(line, &v); err != nil {
			return fmt.Errorf("follow %s: %w", path, err)
		}
		if err := see(v); err != nil {
			return err
		}
	}
}

func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var r io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("ask proxyd: %w", err)
		}
		r = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, c.base+path, r)
	if err != nil {
		return nil, fmt.Errorf("ask proxyd: %w", err)
	}
	req.Header.Set(trust.Header, c.proof)
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("ask proxyd: %w", err)
	}
	if resp.StatusCode/100 != 2 {
		defer resp.Body.Close()
		text, _ := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
		return nil, fmt.Errorf("ask proxyd: %s %s: %w", method, path, apierr.Parse(resp.StatusCode, text))
	}
	return resp, nil
}
