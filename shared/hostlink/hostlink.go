// Package hostlink is the contract between gateway and hostd: HTTP/1.1 with
// JSON, errors as the apierr envelope, and the client the gateway uses.
//
//	POST   /v1/sessions               Acquire → Status (201; 200 when it already holds this session and epoch)
//	GET    /v1/sessions               → Inventory
//	PATCH  /v1/sessions/{id}          Settings → Status
//	DELETE /v1/sessions/{id}?epoch=N&reason=R → Tombstone; the same again for one already ended
//	POST   /v1/acks                   Acks: tombstones the record has taken in
//	GET    /v1/sessions/{id}/events?after=&types=&limit=  → EventPage
//	GET    /v1/sessions/{id}/events/stream?after=&types=  → NDJSON of event.Event; ends after the last event of an ended session, is cut when it ends for another reason; blank lines keep it alive
//	GET    /v1/watch                  → endless NDJSON of Notice, the first of them Inventory
//	GET    /v1/sessions/{id}/tunnel?epoch=N  Upgrade: berth-tunnel → 101, then bytes to the agent after PrefaceLink; Unavailable while the machine is held
//	POST   /v1/sessions/{id}/prepare      Prepare → 204
//	GET    /v1/sessions/{id}/template     → TemplateOf, for another host
//	POST   /v1/sessions/{id}/capture  Capture → Captured
//	POST   /v1/sessions/{id}/restore  Restore → Restored
//	POST   /v1/sessions/{id}/verdict  Verdict → 204; 404 for an operation that the host does not know
//	GET    /v1/sessions/{id}/baggage?snapshot=ID → Baggage, for the host that restores the snapshot
//	GET    /v1/snapshots/{id}?have=   → the snapshot as one stream, for another host, without the parts that it has
//	DELETE /v1/snapshots/{id}?session= → 204, also when there is none
//	GET    /v1/templates?recipe=          → MadeTemplate, for another host
//	GET    /v1/templates/{hash}       → the template as one stream, for another host
//
// Every request carries the cluster secret (shared/trust).
package hostlink

import (
	"encoding/json"
	"math"
	"time"

	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/session"
)

// TunnelProtocol is the Upgrade token of the tunnel.
const TunnelProtocol = "berth-tunnel"

// FromNow as the after of an event stream means: only events still to come.
const FromNow uint64 = math.MaxUint64

// Acquire asks a host for a machine for a session.
type Acquire struct {
	SessionID string           `json:"sessionId"`
	ProjectID string           `json:"projectId"`
	Epoch     uint64           `json:"epoch"`
	Kind      session.Kind     `json:"kind"`
	Viewport  session.Viewport `json:"viewport"`
	Setup     []string         `json:"setup,omitempty"`
	Settings
}

// Settings are what PATCH may change while a session runs. hostd keeps the
// highest Version and ignores lower ones.
type Settings struct {
	Version   uint64    `json:"version"`
	KeepAlive bool      `json:"keepAlive"`
	ExpiresAt time.Time `json:"expiresAt"`
	// Pass is the session's credential at proxyd (proxylink.Pass, sealed), good
	// until PassExpires. One of the same Version that expires later renews it.
	Pass        []byte    `json:"pass,omitempty"`
	PassExpires time.Time `json:"passExpires"`
	// PassEpoch is the epoch that Pass is for. A change whose pass is for another
	// one than the session has here came across a move, and is ignored: the status
	// shows the old Version, so it comes again. 0 is not compared.
	PassEpoch uint64 `json:"passEpoch,omitempty"`
	// ShellProxy: shells started from now on are told of the proxy too.
	ShellProxy bool `json:"shellProxy,omitempty"`
	// Proxy is the session's proxy as the API shows it, empty for none, and
	// ProxyTurn how often it has taken new addresses: for the session's events.
	Proxy     json.RawMessage `json:"proxy,omitempty"`
	ProxyTurn uint32          `json:"proxyTurn,omitempty"`
}

// Status is what hostd knows of a session it runs.
type Status struct {
	SessionID string              `json:"sessionId"`
	Epoch     uint64              `json:"epoch"`
	Since     time.Time           `json:"since"` // when the machine was acquired
	Warm      bool                `json:"warm"`  // taken from the pool
	Clients   int                 `json:"clients"`
	Setup     session.SetupStatus `json:"setup,omitempty"`
	SetupErr  string              `json:"setupError,omitempty"`
	Version   uint64              `json:"version"` // of its settings
	// PassExpires is when its pass has to have been renewed.
	PassExpires time.Time `json:"passExpires"`
	Held        *Held     `json:"held,omitempty"` // its machine stands still and waits for a verdict
}

// Tombstone says that a session's machine is gone from this host for good.
// Either Reason or Error is set.
type Tombstone struct {
	SessionID string            `json:"sessionId"`
	Epoch     uint64            `json:"epoch"`
	EndedAt   time.Time         `json:"endedAt"`
	Reason    session.EndReason `json:"reason,omitempty"`
	Error     string            `json:"error,omitempty"`
}

// Inventory is everything a host holds: running sessions and the tombstones
// not yet acknowledged.
type Inventory struct {
	Host       string      `json:"host"`
	Sessions   []Status    `json:"sessions"`
	Tombstones []Tombstone `json:"tombstones"`
	Snapshots  []string    `json:"snapshots,omitempty"` // ids of those on this host
	Durable    []string    `json:"durable,omitempty"`   // those of Snapshots that are in the blob store by now
}

// Acks names tombstones by session id.
type Acks struct {
	SessionIDs []string `json:"sessionIds"`
}

// Notice is one line of the watch: exactly one field is set.
type Notice struct {
	Inventory *Inventory `json:"inventory,omitempty"`
	Status    *Status    `json:"status,omitempty"` // setup or settings changed
	Ended     *Tombstone `json:"ended,omitempty"`
	Ping      bool       `json:"ping,omitempty"` // every 5 s, so that a dead link is seen
}

// EventPage is one page of a session's log, oldest first. NextAfter is the
// seq of its last event, or the request's after when it is empty.
type EventPage struct {
	Data      []event.Event `json:"data"`
	NextAfter uint64        `json:"nextAfter"`
}
