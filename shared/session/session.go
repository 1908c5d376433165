// Package session holds the product object: its durable fields, its states
// and the rules of its life, all as pure functions over plain values.
package session

import (
	"encoding/json"
	"time"

	"github.com/berth-dev/berth/shared/egress"
)

// Status is the state of a session as the API shows it.
type Status string

// The four states (spec "Session status").
const (
	Running   Status = "RUNNING"
	Paused    Status = "PAUSED"
	Completed Status = "COMPLETED"
	Error     Status = "ERROR"
)

// Ended says whether the state is final.
func (s Status) Ended() bool { return s == Completed || s == Error }

// EndReason says why a COMPLETED session ended; an ERROR session has none.
type EndReason string

// End reasons (spec "Session").
const (
	Released     EndReason = "released"
	TimedOut     EndReason = "timeout"
	Disconnected EndReason = "disconnected"
	// PausedExpired: it stayed paused for longer than PausedMax.
	PausedExpired EndReason = "paused_expired"
)

// Kind is what a session's machine has: a browser, a shell, or both. It
// chooses template, size and price.
type Kind string

// The kinds.
const (
	Browser Kind = "browser"
	Shell   Kind = "shell"
	Both    Kind = "both"
)

// Kinds lists all kinds.
func Kinds() []Kind { return []Kind{Browser, Shell, Both} }

// KindOf gives the kind of a request; ok is false when neither is asked for.
func KindOf(browser, shell bool) (k Kind, ok bool) {
	switch {
	case browser && shell:
		return Both, true
	case browser:
		return Browser, true
	case shell:
		return Shell, true
	}
	return "", false
}

// HasBrowser says whether machines of the kind run Chrome.
func (k Kind) HasBrowser() bool { return k == Browser || k == Both }

// HasShell says whether machines of the kind run bash for the customer.
func (k Kind) HasShell() bool { return k == Shell || k == Both }

// Size is what a machine of a kind gets and what billing counts.
type Size struct {
	VCPU int `json:"vcpu"` // virtual processors
	GiB  int `json:"gib"`  // memory, GiB
}

// Viewport is the size of the browser's page area in CSS pixels.
type Viewport struct {
	Width  int `json:"width"`
	Height int `json:"height"`
}

// SetupStatus is the progress of the setup commands.
type SetupStatus string

// States of setup; the empty value means that no setup was given.
const (
	SetupRunning SetupStatus = "running"
	SetupDone    SetupStatus = "done"
	SetupFailed  SetupStatus = "failed"
)

// Session is what the replicated record keeps of a session.
type Session struct {
	ID           string          `json:"id"` // UUID
	ProjectID    string          `json:"projectId"`
	Region       string          `json:"region"`
	StrictRegion bool            `json:"strictRegion,omitempty"` // only a move that asks for another leaves Region
	Kind         Kind            `json:"kind"`
	KeepAlive    bool            `json:"keepAlive"`
	Timeout      int             `json:"timeout"` // total running seconds
	Viewport     Viewport        `json:"viewport"`
	UserMetadata json.RawMessage `json:"userMetadata"` // a JSON object
	Captcha      string          `json:"captcha"`      // ask or ignore
	// Proxy is the proxy setting, nil for none; passwords in it are sealed.
	Proxy *egress.Setting `json:"proxy,omitempty"`
	// ProxySeed is random; with ProxyTurn, which rises with every rotation, it
	// makes the sticky ids under which providers keep the session's addresses.
	ProxySeed []byte `json:"proxySeed,omitempty"`
	ProxyTurn uint32 `json:"proxyTurn,omitempty"`

	Status    Status    `json:"status"`
	EndReason EndReason `json:"endReason,omitempty"`
	Error     string    `json:"error,omitempty"` // a sentence, with Status ERROR
	CreatedAt time.Time `json:"createdAt"`
	StartedAt time.Time `json:"startedAt"`
	EndedAt   time.Time `json:"endedAt"` // zero until the end
	ExpiresAt time.Time `json:"expiresAt"`

	SetupStatus SetupStatus `json:"setupStatus,omitempty"`
	SetupError  string      `json:"setupError,omitempty"`

	// Placement. Every resume and move raises Epoch; hostd refuses older orders.
	Host  string `json:"host"`
	Epoch uint64 `json:"epoch"`
	Moves int    `json:"moves"`

	// URLKeyVersion rises with every rotation of the signed URLs; tokens of an
	// older version fail.
	URLKeyVersion uint32 `json:"urlKeyVersion"`
	// URLIndex is the record's index at which URLKeyVersion became what it is.
	URLIndex uint64 `json:"urlIndex"`
	// CutBelow: sockets opened with an older version have to close, because a
	// rotation asked for it.
	CutBelow uint32 `json:"cutBelow"`
	// Op is the operation under way, nil for none: one at a time.
	Op *Operation `json:"op,omitempty"`
	// LastOp is how the operation before ended: hosts that ask late, and
	// proposals made twice, get the first verdict.
	LastOp *Verdict `json:"lastOp,omitempty"`
	// PlacedBy is the operation that put the session where it is, at PlacedAt;
	// empty and zero for the create.
	PlacedBy string    `json:"placedBy,omitempty"`
	PlacedAt time.Time `json:"placedAt"`
	// Snapshot is the last capture; nil before the first. While PAUSED the
	// session lives in it alone.
	Snapshot *Snapshot `json:"snapshot,omitempty"`
	// Key seals this session's snapshots, 32 random bytes: without it they are
	// noise, so it goes with the session.
	Key []byte `json:"key,omitempty"`
	// PausedAt is when the session paused; zero unless it is PAUSED, or ended so.
	PausedAt time.Time `json:"pausedAt"`
	// RunningSince begins the running span that is billed now; Before is what
	// earlier spans add to it. RunningSince is zero while PAUSED, and in records
	// older than it, whose one span began at StartedAt.
	RunningSince time.Time     `json:"runningSince"`
	Before       time.Duration `json:"before,omitempty"`
	// Spans are the earlier spans, so that running time can be told by day.
	Spans []Span `json:"spans,omitempty"`

	// SettingsVersion rises with every PATCH; hostd keeps the highest it saw.
	SettingsVersion uint64 `json:"settingsVersion"`
}
