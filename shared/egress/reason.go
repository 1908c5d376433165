package egress

import "fmt"

// ReasonHeader carries the reason of a refusal on HTTP answers (spec "Proxy
// connection failures").
const ReasonHeader = "X-Service-Proxy-Error"

// MaxConnections is how many connections of one session may be open at once.
const MaxConnections = 512

// Reason says why a connection was refused (spec "Proxy connection failures").
type Reason string

// The reasons, values as the spec prints them.
const (
	TargetRestricted     Reason = "target_restricted"      // the provider does not serve this site
	PortBlocked          Reason = "port_blocked"           // an outgoing mail port
	ProxyNotPublic       Reason = "proxy_not_public"       // a custom proxy's address is not public
	ProxyAuthFailed      Reason = "proxy_auth_failed"      // the proxy refused user name or password
	ProxyTypeUnavailable Reason = "proxy_type_unavailable" // no provider of the type is configured
	UpstreamTimeout      Reason = "upstream_timeout"       // no answer in time
	UpstreamUnreachable  Reason = "upstream_unreachable"   // the connection failed
	UpstreamError        Reason = "upstream_error"         // the proxy answered with an error
	TooManyConnections   Reason = "too_many_connections"   // more than MaxConnections
	BadTarget            Reason = "bad_target"             // no valid host and port, not resolvable, or not public
	BadRoute             Reason = "bad_route"              // a rule leads to a proxy that the session does not have
	TokenInvalid         Reason = "token_invalid"          // the session's pass is no longer valid
)

// Reasons lists all reasons.
func Reasons() []Reason {
	return []Reason{TargetRestricted, PortBlocked, ProxyNotPublic, ProxyAuthFailed, ProxyTypeUnavailable, UpstreamTimeout,
		UpstreamUnreachable, UpstreamError, TooManyConnections, BadTarget, BadRoute, TokenInvalid}
}

// Refusal is the error of a connection that is not made.
type Refusal struct {
	Reason Reason
	Detail string // a sentence for the client; no secret
	Cause  error  // for logs only; may be nil
}

// Refuse makes a Refusal.
func Refuse(reason Reason, format string, args ...any) *Refusal {
	return &Refusal{Reason: reason, Detail: fmt.Sprintf(format, args...)}
}

// Error is for logs.
func (r *Refusal) Error() string {
	if r.Cause != nil {
		return fmt.Sprintf("%s: %s: %v", r.Reason, r.Detail, r.Cause)
	}
	return fmt.Sprintf("%s: %s", r.Reason, r.Detail)
}

// Unwrap gives the cause.
func (r *Refusal) Unwrap() error { return r.Cause }

// MailPorts are closed to all session traffic.
var MailPorts = []uint16{25, 465, 587, 2525}

// portBlocked says whether port is one of MailPorts.
func portBlocked(port uint16) bool {
	for _, p := range MailPorts {
		if p == port {
			return true
		}
	}
	return false
}
