package upstream

import (
	"context"
	"crypto/tls"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"strings"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// proxy is an upstream as one connection uses it.
type proxy struct {
	provider   *provider // nil: the session's own
	kind       egress.Type
	at         egress.Target
	tls        bool
	auth       string // value of Proxy-Authorization; empty: none
	restricted []Pattern
}

// custom is the session's own proxy of a route.
func custom(r *proxylink.Route) (proxy, *egress.Refusal) {
	at, useTLS, err := parseServer(r.Server)
	if err != nil || strings.Contains(r.Username, ":") {
		return proxy{}, egress.Refuse(egress.BadRoute, "the rule's proxy is not one that can be used")
	}
	return proxy{kind: egress.Custom, at: at, tls: useTLS, auth: basic(r.Username, r.Password)}, nil
}

// basic is the value of Proxy-Authorization (RFC 7617), empty without a login.
func basic(username, password string) string {
	if username == "" && password == "" {
		return ""
	}
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(username+":"+password))
}

// called is what a client is told p is: providers have no names outside.
func (p proxy) called() string {
	if p.provider == nil {
		return "the proxy " + p.at.String()
	}
	return "the " + string(p.kind) + " proxy"
}

// open connects to p, with TLS where it is an HTTPS proxy. The result is a bare
// *net.TCPConn where it is not.
func (u *Upstreams) open(ctx context.Context, p proxy) (proxylink.HalfCloser, *failure) {
	ctx, cancel := context.WithTimeout(ctx, u.timeouts.Open)
	defer cancel()
	dial := u.dialer.DialProxy
	if p.provider != nil {
		dial = u.dialer.DialTrusted
	}
	conn, err := dial(ctx, p.at)
	if err != nil {
		return nil, &failure{p.dialRefusal(err), broken}
	}
	if !p.tls {
		return conn, nil
	}
	config := u.tls.Clone()
	config.ServerName = p.at.Host()
	secure := tls.Client(conn, config)
	if err := secure.HandshakeContext(ctx); err != nil {
		conn.Close()
		return nil, &failure{p.handshakeRefusal(err), broken}
	}
	return &tlsConn{Conn: secure, tcp: conn}, nil
}

func (p proxy) dialRefusal(err error) *egress.Refusal {
	var r *egress.Refusal
	if !errors.As(err, &r) {
		return because(egress.UpstreamUnreachable, err, "could not connect to %s", p.called())
	}
	if p.provider != nil { // its address is the operator's business
		return because(r.Reason, r, "could not connect to %s", p.called())
	}
	return r
}

func (p proxy) handshakeRefusal(err error) *egress.Refusal {
	var invalid *tls.CertificateVerificationError
	switch {
	case errors.As(err, &invalid):
		return because(egress.UpstreamUnreachable, err, "the certificate of %s is not valid for it", p.called())
	case timedOut(err):
		return p.late(err)
	}
	return because(egress.UpstreamUnreachable, err, "%s does not speak TLS as it should", p.called())
}

func (p proxy) late(err error) *egress.Refusal {
	return because(egress.UpstreamTimeout, err, "%s did not answer in time", p.called())
}

func timedOut(err error) bool {
	var timed net.Error
	return errors.Is(err, context.DeadlineExceeded) || errors.As(err, &timed) && timed.Timeout()
}

// because is egress.Refuse with a cause.
func because(reason egress.Reason, cause error, format string, args ...any) *egress.Refusal {
	r := egress.Refuse(reason, format, args...)
	r.Cause = cause
	return r
}

// tlsConn is a TLS connection that can be relayed and cut like a TCP one.
type tlsConn struct {
	*tls.Conn
	tcp *net.TCPConn
}

// Read takes an orderly end of TCP for the end of the stream: not every proxy
// says goodbye in TLS, and whoever cares about truncation has TLS inside.
func (c *tlsConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.ErrUnexpectedEOF) {
		err = io.EOF
	}
	return n, err
}

// SetLinger is for cuts: from then on Close says nothing in TLS either.
func (c *tlsConn) SetLinger(seconds int) error {
	err := c.tcp.SetLinger(seconds)
	if seconds == 0 {
		c.tcp.Close()
	}
	return err
}
