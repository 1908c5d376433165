// Package proxylink is the contract between hostd, gateway and proxyd.
//
// hostd makes one TCP connection for each connection that a machine opens to
// its egress listener. It begins with a Hello and then carries the client's own
// bytes:
//
//	"BPX2" | length of the Hello, uint16 big endian | length of the pass, uint16 | Hello as JSON | pass
//
// There is no answer: what follows is the HTTP proxy request or the SOCKS5
// greeting of the client, and its answer. A Hello that proxyd does not accept
// closes the connection; a pass that it does not accept is answered in the
// client's own protocol, with token_invalid.
//
// On its control address proxyd serves plain HTTP to daemons of the cluster
// (shared/trust), JSON, errors as the apierr envelope:
//
//	GET  /v1/ledger         → Ledger: every row that is not acknowledged yet, brought up to date first
//	GET  /v1/ledger/stream  → NDJSON of Ledger, the first at once with all rows, then what changed, at least one line every Beat (without rows when nothing did): its end says that this proxyd is gone
//	POST /v1/ledger/acks    Ledger → 204: the record has these rows, at these values
//	GET  /v1/refusals?host=NAME → endless NDJSON of Refused, for connections that came from that host; blank lines keep it alive
package proxylink

import (
	"time"

	"github.com/berth-dev/berth/shared/egress"
)

// Hello says for whom a connection is. Proof is trust.Secret.Proof.
type Hello struct {
	Proof     string `json:"proof"`
	Host      string `json:"host"` // name of the hostd that dials, which hears of refusals
	SessionID string `json:"sessionId"`
	Epoch     uint64 `json:"epoch"`

	// Pass is the session's sealed pass; it goes beside the JSON.
	Pass []byte `json:"-"`
}

// Beat is how often at least a ledger stream says something.
const Beat = time.Second

// Row is what one proxyd, in one run of it, carried for a session through
// proxies of one type within one hour. The numbers only grow: of two rows with
// the same key the larger numbers are right.
type Row struct {
	SessionID   string      `json:"sessionId"`
	ProjectID   string      `json:"projectId"`
	Type        egress.Type `json:"type"`        // residential, datacenter, custom
	Hour        int64       `json:"hour"`        // hours since 1970 UTC
	Incarnation string      `json:"incarnation"` // one start of one proxyd
	Up          int64       `json:"up"`          // bytes from the session
	Down        int64       `json:"down"`        // bytes to the session
}

// Ledger is a set of rows, each key once.
type Ledger struct {
	Rows []Row `json:"rows"`
}

// Refused is a connection that proxyd refused, for the session's events.
type Refused struct {
	SessionID string        `json:"sessionId"`
	Epoch     uint64        `json:"epoch"`
	At        time.Time     `json:"at"`
	Method    string        `json:"method"` // CONNECT, SOCKS5, or that of a plain request
	Target    string        `json:"target"` // host:port as the client wrote it, cut to 300 bytes; may be empty
	Reason    egress.Reason `json:"reason"`
	Detail    string        `json:"detail"` // a sentence without secrets
}
