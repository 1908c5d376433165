package api

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/valyala/fasthttp"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/token"
)

const (
	upgradeTime  = 30 * time.Second
	maxAgentHead = 64 << 10
)

func (c *call) connectBrowser() error {
	s, err := c.openConnect()
	if err != nil {
		return err
	}
	return c.upgrade(s, agentlink.PathCDP, false)
}

func (c *call) browserVersion() error { return c.askBrowser(agentlink.PathJSONVersion) }

func (c *call) browserTargets() error { return c.askBrowser(agentlink.PathJSONList) }

func (c *call) askBrowser(path string) error {
	s, err := c.openConnect()
	if err != nil {
		return err
	}
	header := http.Header{agentlink.ConnectURLHeader: {c.srv.cfg.Service.ConnectURL(s)}}
	return c.forwardTo(s, toAgent{method: http.MethodGet, path: path, header: header, answerType: jsonType})
}

// openConnect checks the query of connectUrl.
func (c *call) openConnect() (session.Session, error) {
	var p api.ConnectBrowserParams
	if err := c.params(&p); err != nil {
		return session.Session{}, err
	}
	s, err := c.srv.cfg.Service.OpenByToken(c.ctx, token.Connect, p.SessionId, or(p.Token))
	if err == nil {
		err = needBrowser(s)
	}
	return s, err
}

func (c *call) openTerminal() error { return c.terminal(token.Terminal) }

func (c *call) liveTerminal() error { return c.terminal(token.Live) }

func (c *call) terminal(purpose token.Purpose) error {
	s, err := c.openByToken(purpose)
	if err == nil {
		err = needShell(s)
	}
	if err != nil {
		return err
	}
	return c.upgrade(s, agentlink.PathTerminal, purpose == token.Live)
}

func (c *call) liveBrowser() error {
	s, err := c.openByToken(token.Live)
	if err == nil {
		err = needBrowser(s)
	}
	if err != nil {
		return err
	}
	return c.upgrade(s, agentlink.PathCDP+"?viewer=1", true)
}

// openByToken checks the token of a URL whose path names the session.
func (c *call) openByToken(purpose token.Purpose) (session.Session, error) {
	var p api.OpenTerminalParams // the same one parameter everywhere
	if err := c.params(&p); err != nil {
		return session.Session{}, err
	}
	return c.srv.cfg.Service.OpenByToken(c.ctx, purpose, c.sessionID(), or(p.Token))
}

func needBrowser(s session.Session) error {
	if s.Kind.HasBrowser() {
		return nil
	}
	return apierr.New(apierr.InvalidRequest, "browser: this session has none; create one with browser true")
}

func needShell(s session.Session) error {
	if s.Kind.HasShell() {
		return nil
	}
	return apierr.New(apierr.InvalidRequest, "shell: this session has none; create one with shell true")
}

// upgrade asks the agent for a WebSocket and, when it agrees, joins the two
// connections. Whatever else the agent answers is an ordinary answer. A paused
// session is resumed first, unless the client only looks.
func (c *call) upgrade(s session.Session, path string, looks bool) error {
	if err := c.checkHandshake(); err != nil {
		return err
	}
	ready := c.srv.cfg.Service.Awake
	if looks {
		ready = c.looking
	}
	opened := s.URLKeyVersion
	s, err := ready(c.ctx, s)
	if err != nil {
		return err
	}
	s.URLKeyVersion = opened // the URL's: they may have been rotated meanwhile
	conn, resp, rest, err := c.reachAgent(s, path)
	if errors.Is(err, link.ErrLineage) { // moved without its memory in that moment: once more, to the new machine
		conn, resp, rest, err = c.reachAgent(s, path)
	}
	if err != nil {
		return c.agentError(s, err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer conn.Close()
		return errorOf(resp)
	}
	c.hijack(&socket{srv: c.srv, id: c.id, op: c.op.ID, session: s, looks: looks, agent: conn, rest: rest, head: c.switching(resp)})
	return nil
}

// reachAgent opens a stream to the agent and speaks the upgrade on it; rest is
// what the agent sent after its head.
func (c *call) reachAgent(s session.Session, path string) (conn net.Conn, resp *http.Response, rest []byte, err error) {
	ctx, cancel := context.WithTimeoutCause(c.ctx, upgradeTime,
		apierr.New(apierr.Unavailable, "the session's machine did not answer within %s; try again", upgradeTime))
	defer cancel()
	if conn, err = c.srv.cfg.Service.DialAgent(ctx, s); err != nil {
		return nil, nil, nil, err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	resp, rest, err = c.handshake(conn, path)
	if !stop() && err == nil {
		err = context.Cause(ctx)
	}
	if err != nil {
		_ = conn.Close()
		if cause := context.Cause(ctx); cause != nil {
			err = cause
		}
	}
	return conn, resp, rest, err
}

// checkHandshake refuses what is no WebSocket handshake (RFC 6455 section 4.2.1).
func (c *call) checkHandshake() error {
	h := &c.rc.Request.Header
	if !strings.EqualFold(string(h.Peek("Upgrade")), "websocket") || !h.ConnectionUpgrade() || len(h.Peek("Sec-WebSocket-Key")) == 0 {
		return apierr.New(apierr.InvalidRequest, "upgrade: this is a WebSocket; connect to it with ws:// or wss://")
	}
	if c.body != nil || !h.IsHTTP11() {
		return apierr.New(apierr.InvalidRequest, "upgrade: a WebSocket handshake is HTTP/1.1 without a body")
	}
	return nil
}

// Headers of the handshake that client and agent settle between them. Origin
// stays out: the token is the permission.
var askedHeaders = []string{"Sec-WebSocket-Key", "Sec-WebSocket-Version", "Sec-WebSocket-Protocol", "Sec-WebSocket-Extensions"}
var grantedHeaders = []string{"Sec-WebSocket-Accept", "Sec-WebSocket-Protocol", "Sec-WebSocket-Extensions"}

// handshake speaks the upgrade on a fresh stream; rest is what the agent sent
// after its head.
func (c *call) handshake(conn net.Conn, path string) (resp *http.Response, rest []byte, err error) {
	var b bytes.Buffer
	fmt.Fprintf(&b, "GET %s HTTP/1.1\r\nHost: agent\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n", path)
	for _, name := range askedHeaders {
		if v := c.rc.Request.Header.Peek(name); len(v) > 0 {
			fmt.Fprintf(&b, "%s: %s\r\n", name, v)
		}
	}
	b.WriteString("\r\n")
	if _, err := conn.Write(b.Bytes()); err != nil {
		return nil, nil, err
	}
	limited := &io.LimitedReader{R: conn, N: maxAgentHead}
	br := bufio.NewReader(limited)
	resp, err = http.ReadResponse(br, nil)
	if err != nil {
		return nil, nil, err
	}
	limited.N = math.MaxInt64
	if resp.StatusCode == http.StatusSwitchingProtocols {
		rest, _ = br.Peek(br.Buffered())
	}
	return resp, rest, nil
}

// switching makes the client's 101.
func (c *call) switching(resp *http.Response) []byte {
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nX-Request-Id: %s\r\n", c.id)
	for _, name := range grantedHeaders {
		if v := resp.Header.Get(name); v != "" {
			fmt.Fprintf(&b, "%s: %s\r\n", name, v)
		}
	}
	b.WriteString("\r\n")
	return b.Bytes()
}

// socket is a WebSocket whose handshake is done.
type socket struct {
	srv     *Server
	id, op  string
	session session.Session
	looks   bool // it is of the live view
	agent   net.Conn
	rest    []byte // from the agent, behind its head
	head    []byte // the client's 101
}

// hijack takes the client's connection from fasthttp once the handler is done.
func (c *call) hijack(k *socket) {
	c.srv.sockets.Add(1)
	c.srv.unclaimed.Store(c.rc.Conn(), k)
	c.rc.SetStatusCode(http.StatusSwitchingProtocols)
	c.rc.HijackSetNoResponse(true) // the 101 is ours to write
	c.rc.Hijack(k.run)
}

// abandon gives the agent's stream back when the hijack did not come.
func (k *socket) abandon() {
	_ = k.agent.Close()
	k.srv.sockets.Done()
}

// run owns the client's connection; fasthttp closes it after.
func (k *socket) run(hijacked net.Conn) {
	client, early := unwrap(hijacked)
	if _, ok := k.srv.unclaimed.LoadAndDelete(client); !ok {
		return // abandoned already
	}
	defer k.srv.sockets.Done()
	openSockets.Add(1)
	defer openSockets.Add(-1)
	defer client.Close()
	defer k.agent.Close()
	if _, err := client.Write(k.head); err != nil {
		return
	}
	began := time.Now()
	ends, stop := k.watchEnd()
	m := machine{standings: k.srv.cfg.Service, session: k.session, looks: k.looks}
	why := newRelay(m, client, early, k.agent, k.rest).run(ends, k.srv.leaving.Done())
	stop()
	k.srv.cfg.Log.Debug("socket closed", "request", k.id, "operation", k.op, "session", k.session.ID, "why", why, "took", time.Since(began))
}

// watchEnd gives how the session ended, when it did.
func (k *socket) watchEnd() (ends <-chan sessions.Ended, stop func()) {
	ch := make(chan sessions.Ended, 1)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if e := k.srv.cfg.Service.WatchEnd(ctx, k.session); !e.At.IsZero() {
			ch <- e
		}
	}()
	return ch, func() { cancel(); <-done }
}

// unwrap finds the bare connection inside fasthttp's and what its reader holds
// already: a client may send frames right behind its handshake.
func unwrap(hijacked net.Conn) (bare net.Conn, early []byte) {
	w, ok := hijacked.(interface{ UnsafeConn() net.Conn })
	if !ok {
		return hijacked, nil
	}
	bare = w.UnsafeConn()
	_ = bare.SetReadDeadline(time.Unix(1, 0)) // the buffer answers, the connection does not
	buf := make([]byte, maxHeaderBytes)
	for {
		n, err := hijacked.Read(buf)
		early = append(early, buf[:n]...)
		if err != nil {
			break
		}
	}
	_ = bare.SetReadDeadline(time.Time{})
	return bare, early
}

var _ fasthttp.HijackHandler = (&socket{}).run
