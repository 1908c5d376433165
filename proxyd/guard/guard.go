// Package guard makes the straight connections of sessions: it resolves a
// target, checks that the address is public or opened by the operator, and
// connects to that very address.
package guard

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"syscall"
	"time"

	"github.com/berth-dev/berth/shared/egress"
)

// DialTimeout bounds resolving and connecting together.
const DialTimeout = 10 * time.Second

// Guard dials. Safe for concurrent use.
type Guard struct {
	dialer net.Dialer
	policy egress.Policy
}

// New makes a guard. resolver may be nil: the computer's own.
func New(policy egress.Policy, resolver *net.Resolver) *Guard {
	if resolver == nil {
		// Go's own resolver, which can be cancelled and needs no thread.
		resolver = &net.Resolver{PreferGo: true}
	}
	g := &Guard{policy: policy}
	g.dialer = net.Dialer{Timeout: DialTimeout, Resolver: resolver, Control: g.check}
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

// Dial connects to t. Of a name's addresses only permitted ones are tried,
// both families side by side (RFC 8305). The error is always an
// *egress.Refusal with one of bad_target, port_blocked, upstream_unreachable
// and upstream_timeout. The result is a bare TCP connection.
func (g *Guard) Dial(ctx context.Context, t egress.Target) (*net.TCPConn, error) {
	if r := t.CheckPort(); r != nil {
		return nil, r
	}
	host := t.Host()
	if t.Name != "" {
		host += "." // absolute: the computer's search domains are not the session's
	}
	conn, err := g.dialer.DialContext(ctx, "tcp", net.JoinHostPort(host, strconv.Itoa(int(t.Port))))
	if err != nil {
		return nil, refusal(t, err)
	}
	return conn.(*net.TCPConn), nil
}

// refusal finds the reason for a failed dial.
func refusal(t egress.Target, err error) *egress.Refusal {
	var dns *net.DNSError
	var r *egress.Refusal
	var timed net.Error
	switch {
	case errors.Is(err, errNotPublic):
		r = egress.Refuse(egress.BadTarget, "%s is not a public address", t.Host())
	case errors.As(err, &dns) && dns.IsNotFound:
		r = egress.Refuse(egress.BadTarget, "%s does not resolve", t.Host())
	case errors.As(err, &timed) && timed.Timeout(): // ETIMEDOUT too
		r = egress.Refuse(egress.UpstreamTimeout, "%s did not answer in time", t)
	case errors.As(err, &dns):
		r = egress.Refuse(egress.BadTarget, "%s does not resolve: its name servers failed", t.Host())
	default:
		r = egress.Refuse(egress.UpstreamUnreachable, "could not connect to %s", t)
	}
	r.Cause = err
	return r
}
