package hostlink

import (
	"time"

	"github.com/berth-dev/berth/shared/session"
)

// Capture orders the source of an operation to stop a session's machine and to
// capture it. The machine stays stopped until the Verdict. The same order again
// gives the same answer, also after hostd restarted.
type Capture struct {
	OpID string `json:"opId"`
	// Kind is session.Pause or session.Move: the source of a pause keeps snapshot
	// and events, that of a move hands them on.
	Kind       session.OpKind `json:"kind"`
	Epoch      uint64         `json:"epoch"`              // of the session as it runs
	SnapshotID string         `json:"snapshotId"`         // what the capture is to be called
	Key        []byte         `json:"key"`                // 32 bytes: seals the snapshot, is never written to disk
	Previous   string         `json:"previous,omitempty"` // snapshot that this machine was restored from: unchanged content is taken from it
	Portable   bool           `json:"portable"`           // without memory, even where the driver keeps it
	Durable    bool           `json:"durable"`            // answer only when it is in the blob store
	To         string         `json:"to,omitempty"`       // host link address of a move's target, which is given what stands still before the machine stops; empty: nobody is
	Deadline   time.Time      `json:"deadline"`           // of the operation; without a verdict by then the machine still waits for one
}

// Captured answers Capture.
type Captured struct {
	Snapshot  session.Snapshot `json:"snapshot"`
	CaptureMs int64            `json:"captureMs"` // from where the machine began to stop
}

// Prepare asks the target of a move, while the session still runs at the source,
// to keep a place free and to have at hand what does not depend on the capture.
// NoCapacity: there is no room, or not enough memory, and nothing was stopped.
// The place is given back by the Restore, an abort, or at the deadline.
type Prepare struct {
	OpID     string       `json:"opId"`
	Kind     session.Kind `json:"kind"`
	Memory   bool         `json:"memory"`         // the capture will have memory
	From     string       `json:"from,omitempty"` // host link address of the source; empty: this host
	Key      []byte       `json:"key,omitempty"`  // as in Restore, for what comes ahead of it
	Deadline time.Time    `json:"deadline"`
}

// TemplateOf names the template that a running machine goes back to.
type TemplateOf struct {
	Template string `json:"template"` // content hash; empty: nothing could restore its memory any more
}

// MadeTemplate says whether a host has the template made by a recipe.
type MadeTemplate struct {
	Template string `json:"template,omitempty"` // content hash; empty: not yet
	Building bool   `json:"building,omitempty"` // it is being made there now
}

// Restore orders the target of an operation to make a session's machine from a
// snapshot, completely, and to keep it stopped until the Verdict. The same order
// again gives the same answer.
type Restore struct {
	OpID     string           `json:"opId"`
	Kind     session.OpKind   `json:"kind"`    // session.Resume or session.Move
	Acquire  Acquire          `json:"acquire"` // Epoch is the one after the commit
	Snapshot session.Snapshot `json:"snapshot"`
	Key      []byte           `json:"key"`
	From     string           `json:"from,omitempty"` // host link address of the host that holds the snapshot; empty: this one, or the blob store
	Deadline time.Time        `json:"deadline"`
}

// Restored answers Restore.
type Restored struct {
	Status    Status `json:"status"`
	Memory    bool   `json:"memory"` // false: a fresh machine with the portable state
	AcquireMs int64  `json:"acquireMs"`
	RestoreMs int64  `json:"restoreMs"`
}

// Verdict tells a host what the record decided about an operation. Committed:
// the target's machine goes on, the source's is discarded (a paused session's
// too; its snapshot stays). Aborted: the source's goes on, the target's is
// discarded. Told twice it does nothing the second time.
type Verdict struct {
	OpID      string `json:"opId"`
	Committed bool   `json:"committed"`
}

// Held is a stopped machine in an inventory: it waits for the verdict on Op.
type Held struct {
	OpID string `json:"opId"`
	Role Role   `json:"role"`
}

// Role is a host's part in an operation.
type Role string

// The roles.
const (
	Source Role = "source"
	Target Role = "target"
)

// Baggage is what goes with a session from host to host beside its snapshot and
// its events: what the source's hostd knows of the machine.
type Baggage struct {
	Setup      session.SetupStatus `json:"setup,omitempty"`
	SetupErr   string              `json:"setupError,omitempty"`
	HadClients bool                `json:"hadClients,omitempty"` // a CDP client has been there
	Notice     uint64              `json:"notice"`               // number of the last notice of the agent that is in the events
	LastSeq    uint64              `json:"lastSeq"`              // of the events
}
