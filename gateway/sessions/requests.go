// Package sessions holds the use cases of the product object: create, list,
// patch, end, rotate, and the reconciling of record and hosts. No HTTP and no
// Raft here: gateway/api calls in, gateway/placement and gateway/hosts are
// called.
package sessions

import (
	"encoding/json"
	"time"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/session"
)

// CreateRequest is a checked POST /v1/sessions with defaults filled in.
type CreateRequest struct {
	Kind           session.Kind
	Timeout        int // seconds
	KeepAlive      bool
	Viewport       session.Viewport
	UserMetadata   json.RawMessage // a JSON object
	Captcha        string
	Setup          []string
	Region         string // empty: any
	StrictRegion   bool
	IdempotencyKey string
	Proxy          *egress.Setting // nil: none; passwords in the clear
}

// PatchRequest is a checked PATCH /v1/sessions/:id; nil fields stay as they are.
type PatchRequest struct {
	KeepAlive    *bool
	UserMetadata json.RawMessage
	Timeout      *int
	Captcha      *string
	Proxy        *session.ProxyPatch // passwords in the clear
}

// ListRequest is a checked GET /v1/sessions.
type ListRequest struct {
	Status   session.Status // empty: all
	Region   string
	Metadata map[string]string // metadata[key]=value, all must match
	Cursor   string
	Limit    int
}

// URLs are the fresh signed URLs of a session. Connect is empty without a
// browser, Terminal without a shell.
type URLs struct {
	Connect  string
	Live     string
	Terminal string
}

// View is a session as a response shows it: the record's session, its URLs
// and what it has cost so far.
type View struct {
	Session session.Session
	URLs    URLs
	Used    time.Duration // billed running time
	Cost    session.Nanos // of that and of its proxy data
}

// Ended says how a socket's session stands when its link broke for good.
type Ended struct {
	CloseCode int    // WebSocket close code (decisions "CDP")
	Reason    string // the endReason or one word
	At        time.Time
}

// MoveRequest is a checked POST /v1/sessions/:id/move; empty fields leave the
// choice.
type MoveRequest struct {
	Host   string
	Region string
}

// Timings say what of a move took how long.
type Timings struct {
	Capture time.Duration // the source's stop and capture
	Acquire time.Duration // a machine at the target
	Restore time.Duration // into it
	Total   time.Duration // from the order to the session going on
}
