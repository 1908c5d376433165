package session

import "time"

// OpKind is what an operation does with a session.
type OpKind string

// The operations.
const (
	Pause  OpKind = "pause"
	Resume OpKind = "resume"
	Move   OpKind = "move"
)

// Operation is a pause, resume or move under way. The record decides it: what
// comes first in the log, commit or abort, is the verdict on both hosts.
type Operation struct {
	ID         string    `json:"id"` // UUID
	Kind       OpKind    `json:"kind"`
	From       string    `json:"from,omitempty"` // host whose machine is captured; empty for a resume
	To         string    `json:"to,omitempty"`   // host that restores; empty for a pause
	SnapshotID string    `json:"snapshotId"`     // what is captured or restored
	Portable   bool      `json:"portable,omitempty"`
	Epoch      uint64    `json:"epoch"` // the session's after the commit
	StartedAt  time.Time `json:"startedAt"`
	Deadline   time.Time `json:"deadline"`         // past it the leader aborts
	Region     string    `json:"region,omitempty"` // of To
	By         string    `json:"by,omitempty"`     // the gateway's run that drives it: one that has ended drives nothing
}

// Verdict is what became of an operation.
type Verdict struct {
	OpID      string `json:"opId"`
	Committed bool   `json:"committed"`
}

// Snapshot says what a capture is and where.
type Snapshot struct {
	ID       string `json:"id"`
	Host     string `json:"host"`               // that made it and holds it
	Memory   bool   `json:"memory"`             // else portable: tabs, cookies, storage, /workspace
	Driver   string `json:"driver,omitempty"`   // a memory capture fits only a host with the same driver,
	CPUClass string `json:"cpuClass,omitempty"` // CPU class
	Template string `json:"template,omitempty"` // and template (which hosts fetch from each other)
	Bytes    int64  `json:"bytes"`              // written by this capture
	Durable  bool   `json:"durable,omitempty"`  // in the blob store, so that it outlives its host
}

// PausedMax is how long a session may stay paused (decisions "API manners").
const PausedMax = 30 * 24 * time.Hour
