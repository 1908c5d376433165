package egress

import "fmt"

// ReasonHeader carries the reason of a refusal on HTTP answers (spec "Proxy
// connection failures").
const ReasonHeader = "X-Service-Proxy-Error"

// MaxConnections is how many connections of one session may be open at once.
const MaxConnections = 512

// Reason says why a connection was refused. These are the ones that straight
// connections can meet; those of upstream proxies join with them.
type Reason string

// The reasons, values as the spec prints them.
const (
	BadTarget           Reason = "bad_target"           // no valid host and port, not resolvable, or not public
	PortBlocked         Reason = "port_blocked"         // an outgoing mail port
	UpstreamUnreachable Reason = "upstream_unreachable" // the connection failed
	UpstreamTimeout     Reason = "upstream_timeout"     // no answer in time
	TooManyConnections  Reason = "too_many_connections" // more than MaxConnections
)

// Reasons lists all reasons.
func Reasons() []Reason {
	return []Reason{BadTarget, PortBlocked, UpstreamUnreachable, UpstreamTimeout, TooManyConnections}
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
