// Package upstream leads connections of sessions through proxies: the
// customers' own and those of the platform's providers.
//
// A tunnel is asked for with CONNECT; plain HTTP goes to the proxy in absolute
// form, because many refuse CONNECT to port 80. A site's name goes on as it
// is: the proxy resolves it. Refusals are *egress.Refusal, told apart by who is
// at fault:
//
//	bad_route               the rule has no proxy that can be used
//	proxy_type_unavailable  no provider of the rule's type and place
//	proxy_not_public        a custom proxy's address is not public
//	upstream_unreachable    no connection or no TLS with the proxy
//	upstream_timeout        it did not answer in its Timeouts
//	proxy_auth_failed       407
//	target_restricted       an answer that the provider's Restricted describes
//	upstream_error          any other answer than 2xx, or none that is HTTP
//
// Of several providers the next one is tried when one cannot be reached, does
// not answer in time, refuses its login or answers with a 5xx status.
package upstream

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/http"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// Timeouts bound what a proxy takes. Zero fields are those of DefaultTimeouts.
type Timeouts struct {
	Open   time.Duration // resolve, connect, TLS
	Answer time.Duration // from CONNECT to the end of the answer's head
	First  time.Duration // both together, for a provider that another can stand in for
	Plain  time.Duration // from the end of a plain request to its answer: a site may think long over it
}

// DefaultTimeouts are those of production.
var DefaultTimeouts = Timeouts{Open: 10 * time.Second, Answer: 20 * time.Second, First: 10 * time.Second, Plain: 2 * time.Minute}

func (t Timeouts) complete() Timeouts {
	d := DefaultTimeouts
	return Timeouts{cmp.Or(t.Open, d.Open), cmp.Or(t.Answer, d.Answer), cmp.Or(t.First, d.First), cmp.Or(t.Plain, d.Plain)}
}

// maxAttempts is how many providers a connection tries.
const maxAttempts = 3

// Dialer connects to proxies; its error is an *egress.Refusal in terms of the
// proxy, proxy_not_public where DialProxy must not connect.
type Dialer interface {
	DialProxy(ctx context.Context, t egress.Target) (*net.TCPConn, error)   // a customer's: its address must be public
	DialTrusted(ctx context.Context, t egress.Target) (*net.TCPConn, error) // a provider's: the operator chose it
}

// Config is what an Upstreams is made of.
type Config struct {
	Dialer    Dialer
	Providers []ProviderConfig // in order of preference
	Roots     *x509.CertPool   // of HTTPS proxies' certificates; nil: the computer's
	Timeouts  Timeouts
}

// Upstreams opens ways through proxies. Safe for concurrent use.
type Upstreams struct {
	dialer    Dialer
	providers []*provider
	tls       *tls.Config
	timeouts  Timeouts
}

// New makes an Upstreams.
func New(c Config) (*Upstreams, error) {
	providers, err := newProviders(c.Providers)
	if err != nil {
		return nil, err
	}
	for _, p := range providers {
		daemon.Gauge(`berth_proxyd_provider_up{provider="`+p.name+`"}`, func() float64 {
			if p.up() {
				return 1
			}
			return 0
		})
	}
	return &Upstreams{dialer: c.Dialer, providers: providers, tls: &tls.Config{RootCAs: c.Roots, MinVersion: tls.VersionTLS12},
		timeouts: c.Timeouts.complete()}, nil
}

// Link is a connection through a proxy.
type Link struct {
	// Conn is a bare *net.TCPConn where the proxy speaks HTTP without TLS.
	Conn  proxylink.HalfCloser
	Early []byte // a tunnel's: what the site sent with the proxy's answer
	// Authorization is the value of Proxy-Authorization that each plain request
	// needs; empty: none.
	Authorization string

	p proxy
}

// PlainTimeout is how long a proxy's answer to a plain request may take to begin
// once the request is out.
func (u *Upstreams) PlainTimeout() time.Duration { return u.timeouts.Plain }

// Tunnel opens a tunnel to t by a route.
func (u *Upstreams) Tunnel(ctx context.Context, r *proxylink.Route, t egress.Target) (*Link, *egress.Refusal) {
	return u.attempt(ctx, r, func(ctx context.Context, p proxy) (*Link, *failure) {
		conn, failed := u.open(ctx, p)
		if failed != nil {
			return nil, failed
		}
		early, failed := u.connect(ctx, p, conn, t)
		if failed != nil {
			conn.Close()
			return nil, failed
		}
		return &Link{Conn: conn, Early: early, p: p}, nil
	})
}

// Plain connects to a route's proxy for requests in absolute form. Judge must
// see their answers.
func (u *Upstreams) Plain(ctx context.Context, r *proxylink.Route) (*Link, *egress.Refusal) {
	return u.attempt(ctx, r, func(ctx context.Context, p proxy) (*Link, *failure) {
		conn, failed := u.open(ctx, p)
		if failed != nil {
			return nil, failed
		}
		return &Link{Conn: conn, Authorization: p.auth, p: p}, nil
	})
}

// Judge says whether the answer to a plain request is the proxy's refusal. Any
// status but 407 may be the site's own and is none, unless the provider's
// patterns describe it.
func (l *Link) Judge(status int, header http.Header) *egress.Refusal {
	failed := l.p.judge(answer{status: status, header: header})
	if failed == nil || failed.refusal.Reason == egress.UpstreamError {
		l.p.provider.report(fine, time.Now())
		return nil
	}
	l.p.provider.report(failed.how, time.Now())
	return failed.refusal
}

// failure is a refusal with what it says of the provider.
type failure struct {
	refusal *egress.Refusal
	how     outcome
}

// attempt tries the proxies of a route in turn.
func (u *Upstreams) attempt(ctx context.Context, r *proxylink.Route, try func(context.Context, proxy) (*Link, *failure)) (*Link, *egress.Refusal) {
	switch {
	case r.Type == egress.Custom:
		p, refused := custom(r)
		if refused != nil {
			return nil, refused
		}
		l, failed := try(ctx, p)
		if failed != nil {
			return nil, failed.refusal
		}
		return l, nil
	case !r.Type.Platform():
		return nil, egress.Refuse(egress.BadRoute, "the rule leads to a proxy of type %q, which there is not", r.Type)
	}
	return u.platform(ctx, r, try)
}

// platform tries the providers of a route in turn.
func (u *Upstreams) platform(ctx context.Context, r *proxylink.Route, try func(context.Context, proxy) (*Link, *failure)) (*Link, *egress.Refusal) {
	able := choose(u.providers, r, time.Now())
	refused := egress.Refuse(egress.ProxyTypeUnavailable, "no provider of %s proxies is set up for what the rule asks for", r.Type)
	for i, provider := range able {
		one, cancel := ctx, context.CancelFunc(func() {})
		if i < len(able)-1 {
			one, cancel = context.WithTimeout(ctx, u.timeouts.First)
		}
		l, failed := try(one, provider.proxy(r))
		cancel()
		if failed == nil {
			provider.report(fine, time.Now())
			return l, nil
		}
		refused = failed.refusal
		if ctx.Err() != nil {
			return nil, refused // the client left: that says nothing of the provider
		}
		provider.report(failed.how, time.Now())
		if failed.how == fine || failed.how == restricted {
			return nil, refused
		}
	}
	return nil, refused
}
