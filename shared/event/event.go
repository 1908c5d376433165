// Package event defines a session's events (spec "Session event") and the
// contract of the sequenced log that hostd keeps of them.
package event

import (
	"encoding/json"
	"time"
	"unicode/utf8"
)

// Type is the kind of an event.
type Type string

// Event types built so far; console, navigation, action and captcha join with
// the work that emits them.
const (
	// Network is a connection that proxyd refused: data {method, url, status,
	// resourceType, errorText, proxyError, bytesIn, bytesOut}, or {refused} when
	// it stands for that many more.
	Network   Type = "network"
	Lifecycle Type = "lifecycle" // data {state, reason}; setup steps {step, command, exitCode}
	Exec      Type = "exec"      // data {command, shell, exitCode, timedOut, durationMs}
	Error     Type = "error"     // data {name, message}
)

// AllTypes are the types a client may filter by (spec "Events"), whether or
// not anything emits them yet.
var AllTypes = []Type{"console", Network, "navigation", Error, Lifecycle, "action", Exec, "captcha"}

// Bounds of the log (decisions "Streams").
const (
	MaxEventBytes = 16 << 10           // one event, as JSON
	MaxPerSession = 10_000             // older ones are dropped
	KeepAfterEnd  = 7 * 24 * time.Hour // then the whole log goes
	DefaultPage   = 500
	MaxPage       = 2000
)

// Event is one entry. Seq rises by one within a session and is never used
// twice; it starts at 1.
type Event struct {
	Seq   uint64          `json:"seq"`
	At    time.Time       `json:"at"`
	Type  Type            `json:"type"`
	Level string          `json:"level,omitempty"`
	Text  string          `json:"text,omitempty"`
	URL   string          `json:"url,omitempty"`
	TabID string          `json:"tabId,omitempty"`
	Data  json.RawMessage `json:"data,omitempty"`
}

// Cut shortens s to about n bytes without splitting a rune.
func Cut(s string, n int) string {
	if len(s) <= n {
		return s
	}
	for n > 0 && !utf8.RuneStart(s[n]) {
		n--
	}
	return s[:n] + "…"
}
