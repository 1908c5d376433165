// Package control is hostd's client of the agent's control paths
// (shared/agentlink): plain HTTP over the machine's own socket.
//
// Whoever has taken the machine over answers in the agent's place: whatever
// comes from there is bounded in size and pace, and its errors are text for
// logs, never codes that a gateway would act on.
package control

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
	"strconv"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
)

const (
	maxLine   = 256 << 10 // one notice: an event (16 KiB) and its frame, generously
	maxAnswer = 1 << 20
	maxHeader = 64 << 10
	maxError  = 1 << 10 // of an answer's error in logs
)

// Agent speaks to one machine's agent. Safe for concurrent use.
type Agent struct {
	dial func(context.Context) (net.Conn, error)
	http *http.Client
}

// New makes a client over dial, which opens a bare connection to the agent.
func New(dial func(context.Context) (net.Conn, error)) *Agent {
	a := &Agent{dial: dial}
	a.http = &http.Client{Transport: &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return a.open(ctx, agentlink.PrefaceControl)
		},
		MaxIdleConns:           1,
		IdleConnTimeout:        time.Minute,
		MaxResponseHeaderBytes: maxHeader,
		DisableCompression:     true, // no bombs
	}}
	a.http.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	return a
}

// Tunnel opens a connection on which a transport of the session link may begin.
func (a *Agent) Tunnel(ctx context.Context) (net.Conn, error) {
	return a.open(ctx, agentlink.PrefaceLink)
}

func (a *Agent) open(ctx context.Context, preface byte) (net.Conn, error) {
	conn, err := a.dial(ctx)
	if err != nil {
		return nil, err
	}
	if _, err := conn.Write([]byte{preface}); err != nil {
		conn.Close()
		return nil, fmt.Errorf("agent preface: %w", err)
	}
	return conn, nil
}

// Close drops the idle connection.
func (a *Agent) Close() { a.http.CloseIdleConnections() }

// Ready waits until the agent says that the machine is ready, or that it never
// will be, which is an error.
func (a *Agent) Ready(ctx context.Context) error {
	st, err := a.state(ctx, agentlink.ControlState+"?wait=1")
	switch {
	case err != nil:
		return err
	case st.Failed != "":
		return fmt.Errorf("machine failed to start: %s", event.Cut(st.Failed, maxError))
	case !st.Ready:
		return fmt.Errorf("agent answered before it was ready")
	}
	return nil
}

// State asks for the agent's state now.
func (a *Agent) State(ctx context.Context) (agentlink.State, error) {
	return a.state(ctx, agentlink.ControlState)
}

func (a *Agent) state(ctx context.Context, path string) (st agentlink.State, err error) {
	return st, a.do(ctx, http.MethodGet, path, nil, &st)
}

// Start gives the machine to a session.
func (a *Agent) Start(ctx context.Context, start agentlink.Start) error {
	return a.do(ctx, http.MethodPost, agentlink.ControlStart, start, nil)
}

// Proxy says whether the shell is told of the session's proxy.
func (a *Agent) Proxy(ctx context.Context, p agentlink.Proxy) error {
	return a.do(ctx, http.MethodPost, agentlink.ControlProxy, p, nil)
}

func (a *Agent) do(ctx context.Context, method, path string, in, out any) error {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return err
		}
		body = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://agent"+path, body)
	if err != nil {
		return err
	}
	if in != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := a.http.Do(req)
	if err != nil {
		return fmt.Errorf("agent %s: %w", path, err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return fmt.Errorf("agent %s: %w", path, err)
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("agent %s: status %d: %s", path, resp.StatusCode, event.Cut(string(b), maxError))
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(b, out); err != nil {
		return fmt.Errorf("agent %s: %w", path, err)
	}
	return nil
}

// Notices yields what the agent tells after N, one connection's worth: it ends
// with the error that broke it. An agent that tells too much too quickly is
// read more slowly (pace).
func (a *Agent) Notices(ctx context.Context, after uint64) iter.Seq2[agentlink.Notice, error] {
	return func(yield func(agentlink.Notice, error) bool) {
		url := "http://agent" + agentlink.ControlEvents + "?after=" + strconv.FormatUint(after, 10)
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
		if err != nil {
			yield(agentlink.Notice{}, err)
			return
		}
		resp, err := a.http.Do(req)
		if err != nil {
			yield(agentlink.Notice{}, fmt.Errorf("agent notices: %w", err))
			return
		}
		defer resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			yield(agentlink.Notice{}, fmt.Errorf("agent notices: status %d", resp.StatusCode))
			return
		}
		slow := pace{lines: burstLines, bytes: burstBytes, at: time.Now()}
		lines := bufio.NewScanner(resp.Body)
		lines.Buffer(make([]byte, 4096), maxLine)
		for lines.Scan() {
			if err := slow.wait(ctx, len(lines.Bytes())); err != nil {
				yield(agentlink.Notice{}, err)
				return
			}
			if len(lines.Bytes()) == 0 {
				continue // a heartbeat
			}
			var n agentlink.Notice
			if err := json.Unmarshal(lines.Bytes(), &n); err != nil {
				yield(n, fmt.Errorf("agent notices: %w", err))
				return
			}
			if !yield(n, nil) {
				return
			}
		}
		err = lines.Err()
		if err == nil {
			err = io.ErrUnexpectedEOF
		}
		yield(agentlink.Notice{}, fmt.Errorf("agent notices: %w", err))
	}
}
