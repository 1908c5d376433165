package session

import (
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Book is what survives hostd: which machines exist, which session has which,
// which of them stand still for an operation, which sessions went on from here,
// and which have ended. Every write is durable when it returns.
type Book interface {
	PutMachine(h machine.Handle) error
	DeleteMachine(id string) error
	Machines() ([]machine.Handle, error)

	// PutSession writes a session whose place is this host.
	PutSession(r Record) error
	// Drop removes a session that never began, and its machine, in one step.
	Drop(r Record) error
	Sessions() ([]Record, error)

	// PutTarget writes a session that is restored here but whose place this is
	// not before the record says so. It may be here as a source at the same time.
	PutTarget(r Record) error
	Targets() ([]Record, error)
	// GoOn writes, in one step, that the machine of r goes on: a target becomes
	// the session. It remembers the verdict.
	GoOn(r Record, v hostlink.Verdict) error
	// Discard removes the record of r's role and its machine in one step. It
	// remembers the verdict, nil for none, and where a source went, nil for
	// nowhere.
	Discard(r Record, v *hostlink.Verdict, left *Left) error
	// Left finds where a session went that was here last.
	Left(id string) (Left, bool, error)
	// Verdict finds what was decided here about an operation.
	Verdict(opID string) (hostlink.Verdict, bool, error)

	// End writes the tombstone and removes the session and its machine (empty
	// for none) in one step: a machine in the book without a session is one
	// that never served a session, or Adopt would give it to a stranger.
	End(t hostlink.Tombstone, machineID string) error
	Tombstone(id string) (hostlink.Tombstone, bool, error)
	// Tombstones are those not yet acknowledged.
	Tombstones() ([]hostlink.Tombstone, error)
	// Ack marks tombstones as taken in by the record. They stay, to refuse late
	// orders, until Forget.
	Ack(ids []string, now time.Time) error
	// Forget removes acknowledged tombstones and verdicts older than before, and
	// sessions that left so long before it that no pause lasts until then.
	Forget(before time.Time) error
}

// Record is a session in the book.
type Record struct {
	Acquire   hostlink.Acquire    `json:"acquire"` // settings as last patched
	MachineID string              `json:"machineId"`
	Since     time.Time           `json:"since"`
	Warm      bool                `json:"warm"`
	Patched   time.Time           `json:"patched"` // when the settings came; zero: with Acquire
	Setup     session.SetupStatus `json:"setup,omitempty"`
	SetupErr  string              `json:"setupError,omitempty"`
	// Stood is how long the machine stood still for operations that came to
	// nothing: its time is up that much later.
	Stood time.Duration `json:"stood,omitempty"`
	// Snapshot is what the machine was restored from, if it was.
	Snapshot string `json:"snapshot,omitempty"`
	// Op is what the machine stands still for, nil while it runs.
	Op *Op `json:"op,omitempty"`
}

// Op is a machine's part in an operation.
type Op struct {
	ID         string         `json:"id"`
	Kind       session.OpKind `json:"kind"`
	Role       hostlink.Role  `json:"role"`
	SnapshotID string         `json:"snapshotId"`
	Memory     bool           `json:"memory"`
	Since      time.Time      `json:"since"` // since when the machine stands still
	// Captured and Restored are the answer to the order, nil until the work is
	// done: before that no verdict can be for a target or against a source.
	Captured *hostlink.Captured `json:"captured,omitempty"`
	Restored *hostlink.Restored `json:"restored,omitempty"`
	// Fetched: at a target, log and snapshot came from elsewhere for this
	// operation, and go if it comes to nothing.
	Fetched    bool `json:"fetched,omitempty"`
	HadClients bool `json:"hadClients,omitempty"` // a CDP client had been there before a portable capture
	// Going: the verdict was for this machine, which has yet to go on.
	Going bool `json:"going,omitempty"`
}

// Left says that a session was here and went on: it is paused in a snapshot, or
// another host has it. Orders of its epoch and older ones come too late.
type Left struct {
	SessionID  string           `json:"sessionId"`
	Epoch      uint64           `json:"epoch"`
	At         time.Time        `json:"at"`
	Kind       session.OpKind   `json:"kind"`
	SnapshotID string           `json:"snapshotId"`
	Memory     bool             `json:"memory"`
	Bytes      int64            `json:"bytes"` // written for the snapshot
	Baggage    hostlink.Baggage `json:"baggage"`
}

// paused says that the session is in a snapshot here, as far as this host knows.
func (l Left) paused() bool { return l.Kind == session.Pause }

// deadline is when the session's time is up.
func (r Record) deadline() time.Time { return r.Acquire.ExpiresAt.Add(r.Stood) }

// expired is when the session's time is up. A timeout patched to a moment that
// had passed counts from the patch: the machine was used until then.
func (r Record) expired() time.Time {
	if r.Patched.After(r.deadline()) {
		return r.Patched
	}
	return r.deadline()
}
