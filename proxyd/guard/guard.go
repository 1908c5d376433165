// Package guard makes the TCP connections of sessions, straight to a target or
// to a proxy: it resolves a name, checks that the address is public or opened
// by the operator, and connects to that very address.
package guard

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/berth-dev/berth/shared/egress"
)

// DialTimeout bounds resolving and connecting together.
const DialTimeout = 10 * time.Second

// keepAlive keeps idle connections known to the NATs on their way. What is not
// set is the computer's own, and a system call less for each connection.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: 60 * time.Second, Interval: -1, Count: -1}

// Guard dials. Safe for concurrent use.
type Guard struct {
	policy  egress.Policy
	dialer  net.Dialer // checks each address
	trusted net.Dialer // does not
}

// New makes a guard. resolver may be nil: the computer's own.
func New(policy egress.Policy, resolver *net.Resolver) *Guard {
	if resolver == nil {
		// Go's own resolver, which can be cancelled and needs no thread.
		resolver = &net.Resolver{PreferGo: true}
	}
	g := &Guard{policy: policy}
	g.trusted = net.Dialer{Timeout: DialTimeout, Resolver: resolver, KeepAliveConfig: keepAlive}
	g.dialer = g.trusted
	g.dialer.Control = g.check
	return g
}

// errNotPublic is what check refuses an address with.
var errNotPublic = errors.New("not a public address")

// check runs between socket and connect with the very address that connect
// gets, so no second answer of a name server can slip past it (DNS rebinding).
func (g *Guard) check(_, address string, _ syscall.RawConn) error {
	ap, err := netip.ParseAddrPort(address)
	if err != nil || !g.policy.Permits(ap.Addr()) {
		return errNotPublic
	}
	return nil
}

// CheckLiteral refuses, for a target that a proxy is to resolve, an address
// that is not public and names that mean this very computer (RFC 6761 6.3).
func (g *Guard) CheckLiteral(t egress.Target) *egress.Refusal {
	addr := t.Addr
	if t.Name == "localhost" || strings.HasSuffix(t.Name, ".localhost") {
		addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
	}
	if addr.IsValid() && !g.policy.Permits(addr) {
		return notPublic(t)
	}
	return nil
}

// Dial connects to t. Of a name's addresses only permitted ones are tried,
// both families side by side (RFC 8305). The error is always an
// *egress.Refusal with one of bad_target, port_blocked, upstream_unreachable
// and upstream_timeout. The result is a bare TCP connection.
func (g *Guard) Dial(ctx context.Context, t egress.Target) (*net.TCPConn, error) {
	return dial(ctx, &g.dialer, t, refusal)
}

// DialProxy connects to a customer's proxy, as Dial does to a target. The
// error is one of proxy_not_public, port_blocked, upstream_unreachable and
// upstream_timeout.
func (g *Guard) DialProxy(ctx context.Context, t egress.Target) (*net.TCPConn, error) {
	if r := g.CheckLiteral(t); r != nil {
		return nil, proxyRefusal(t, errNotPublic)
	}
	return dial(ctx, &g.dialer, t, proxyRefusal)
}

// DialTrusted connects to a proxy of the operator's choice, wherever it is.
func (g *Guard) DialTrusted(ctx context.Context, t egress.Target) (*net.TCPConn, error) {
	return dial(ctx, &g.trusted, t, proxyRefusal)
}

func dial(ctx context.Context, d *net.Dialer, t egress.Target, refusal func(egress.Target, error) *egress.Refusal) (*net.TCPConn, error) {
	if r := t.CheckPort(); r != nil {
		return nil, r
	}
	host := t.Host()
	if t.Name != "" {
		host += "." // absolute: the computer's search domains are not the session's
	}
	conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(t.Port))))
	if err != nil {
		r := refusal(t, err)
		r.Cause = err
		return nil, r
	}
	return conn.(*net.TCPConn), nil
}

func notPublic(t egress.Target) *egress.Refusal {
	return egress.Refuse(egress.BadTarget, "%s is not a public address", t.Host())
}

// refusal finds the reason for a failed dial to a target.
func refusal(t egress.Target, err error) *egress.Refusal {
	var dns *net.DNSError
	switch {
	case errors.Is(err, errNotPublic):
		return notPublic(t)
	case errors.As(err, &dns) && dns.IsNotFound:
		return egress.Refuse(egress.BadTarget, "%s does not resolve", t.Host())
	case timedOut(err):
		return egress.Refuse(egress.UpstreamTimeout, "%s did not answer in time", t)
	case errors.As(err, &dns):
		return egress.Refuse(egress.BadTarget, "%s does not resolve: its name servers failed", t.Host())
	}
	return egress.Refuse(egress.UpstreamUnreachable, "could not connect to %s", t)
}

// proxyRefusal finds the reason for a failed dial to a proxy.
func proxyRefusal(t egress.Target, err error) *egress.Refusal {
	var dns *net.DNSError
	switch {
	case errors.Is(err, errNotPublic):
		return egress.Refuse(egress.ProxyNotPublic, "the proxy %s has no public address", t)
	case timedOut(err):
		return egress.Refuse(egress.UpstreamTimeout, "the proxy %s did not answer in time", t)
	case errors.As(err, &dns):
		return egress.Refuse(egress.UpstreamUnreachable, "the proxy %s does not resolve", t)
	}
	return egress.Refuse(egress.UpstreamUnreachable, "could not connect to the proxy %s", t)
}

func timedOut(err error) bool { // ETIMEDOUT too
	var timed net.Error
	return errors.As(err, &timed) && timed.Timeout()
}
