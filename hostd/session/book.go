package session

import (
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Book is what survives hostd: which machines exist, which session has which,
// and which sessions have ended here. Every write is durable when it returns.
type Book interface {
	PutMachine(h machine.Handle) error
	DeleteMachine(id string) error
	Machines() ([]machine.Handle, error)

	PutSession(r Record) error
	// Drop removes a session that never began, and its machine, in one step.
	Drop(r Record) error
	Sessions() ([]Record, error)

	// End writes the tombstone and removes the session and its machine (empty
	// for none) in one step: a machine in the book without a session is one
	// that never served a session, or Restore would give it to a stranger.
	End(t hostlink.Tombstone, machineID string) error
	Tombstone(id string) (hostlink.Tombstone, bool, error)
	// Tombstones are those not yet acknowledged.
	Tombstones() ([]hostlink.Tombstone, error)
	// Ack marks tombstones as taken in by the record. They stay, to refuse late
	// orders, until Forget.
	Ack(ids []string, now time.Time) error
	// Forget removes acknowledged tombstones older than before.
	Forget(before time.Time) error
}

// Record is a running session in the book.
type Record struct {
	Acquire   hostlink.Acquire    `json:"acquire"` // settings as last patched
	MachineID string              `json:"machineId"`
	Since     time.Time           `json:"since"`
	Warm      bool                `json:"warm"`
	Patched   time.Time           `json:"patched"` // when the settings came; zero: with Acquire
	Setup     session.SetupStatus `json:"setup,omitempty"`
	SetupErr  string              `json:"setupError,omitempty"`
}

// expired is when the session's time is up. A timeout patched to a moment that
// had passed counts from the patch: the machine was used until then.
func (r Record) expired() time.Time {
	if r.Patched.After(r.Acquire.ExpiresAt) {
		return r.Patched
	}
	return r.Acquire.ExpiresAt
}
