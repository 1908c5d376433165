// Package machine is the contract of everything that can run a session's
// machine. Several drivers implement it; machinetest is the one suite that all
// of them must pass.
package machine

import (
	"context"
	"encoding/json"
	"errors"
	"net"

	"github.com/berth-dev/berth/shared/session"
)

// ErrGone says that the machine of a handle no longer runs; whatever it left
// has been removed by the time Adopt returns it.
var ErrGone = errors.New("machine is gone")

// Slot is a machine's place in the network as a driver needs it (made by
// hostd/network ahead of time).
type Slot struct {
	Index   int    `json:"index"`   // unique on this host, from 0; also picks the machine's user id range
	Name    string `json:"name"`    // "berth-<index>", the named network namespace
	NetNS   string `json:"netns"`   // path of the namespace, owned by the host's user namespace
	UIDBase uint32 `json:"uidBase"` // host id of the machine's root; the range is 65536 wide
}

// Spec asks for a machine.
type Spec struct {
	ID        string       `json:"id"` // unique, lower-case hex
	Kind      session.Kind `json:"kind"`
	Size      session.Size `json:"size"`
	DiskBytes int64        `json:"diskBytes"` // upper layer and /workspace together
	Pids      int          `json:"pids"`
	Slot      Slot         `json:"slot"`
	// Template names what the machine was made from: a waiting machine of
	// another one serves nobody.
	Template string `json:"template"`
}

// Handle is what re-adopts a running machine after hostd restarted: written to
// disk before the machine starts, so that a crash at any moment leaves either
// a machine with a handle or something that Sweep finds.
type Handle struct {
	Driver  string          `json:"driver"`
	Version int             `json:"version"`
	Spec    Spec            `json:"spec"`
	Data    json.RawMessage `json:"data,omitempty"` // the driver's own
}

// Driver makes machines. Safe for concurrent use.
type Driver interface {
	// Name is "oci", "microvm", ...
	Name() string
	// Isolation is a sentence for the operator: what separates machines of this
	// driver from each other and from the host.
	Isolation() string
	// Check says whether the driver can work on this host at all; the error
	// says what is missing and how to get it.
	Check(ctx context.Context) error
	// Start boots a machine and returns once its agent's socket accepts
	// (whether the agent is ready is the agent's to say). On error nothing of
	// the machine is left. persist is called with the handle before anything
	// is acquired.
	Start(ctx context.Context, spec Spec, persist func(Handle) error) (Machine, error)
	// Adopt takes a machine of an earlier hostd over. ErrGone when it has died.
	Adopt(ctx context.Context, h Handle) (Machine, error)
	// Sweep removes everything of this driver on the host, processes, mounts,
	// cgroups, files, whose machine id keep refuses.
	Sweep(ctx context.Context, keep func(id string) bool) error
	// Close lets go of the machines without ending them: a later Driver adopts
	// them.
	Close() error
}

// Machine is a running machine. Safe for concurrent use.
type Machine interface {
	ID() string
	Handle() Handle
	// Dial connects to the agent: a bare *net.UnixConn or *net.TCPConn on which
	// nothing has been written (the caller sends the preface byte).
	Dial(ctx context.Context) (net.Conn, error)
	// Promote gives the machine its full CPU share; until then it runs at the
	// background share, so that refilling the pool does not slow sessions.
	Promote(ctx context.Context) error
	// Done is closed when the machine's first process has exited, whoever ended it.
	Done() <-chan struct{}
	// Stop ends the machine in whatever state it is and removes everything of
	// it: processes, mounts, cgroups, files. Idempotent; returns the first
	// call's result. It does not touch the slot.
	Stop(ctx context.Context) error
}
