package machine

import (
	"context"
	"io"
	"iter"
	"time"
)

// PageSize is the unit of a memory delta, bytes.
const PageSize = 4096

// Keeper is the driver whose captures keep memory: processes, pages and sockets
// go on after a restore. A driver that is none still supports portable captures,
// which the agent makes.
type Keeper interface {
	Driver
	// CPUClass names what a memory capture needs to run again: accelerator, CPU
	// model and features, rate of the time stamp counter, build of the machine
	// monitor. Equal strings fit.
	CPUClass() string
	// Template is the content hash of the template that machines of a spec start
	// from on this host; it builds the template when there is none yet.
	Template(ctx context.Context, spec Spec) (hash string, err error)
	// Recipe names all that the template of a spec is made by: equal on two hosts
	// where one's template serves the other.
	Recipe(spec Spec) (string, error)
	// Made is the content hash of the template made by a recipe that is here, ""
	// for none; SetMade says that one that was taken in is by that recipe.
	Made(recipe string) string
	SetMade(recipe, hash string) error
	// OpenTemplate gives a template as one stream, for another host.
	OpenTemplate(hash string) (io.ReadCloser, error)
	// AddTemplate takes another host's template in; a stream whose content does
	// not have the hash is refused and leaves nothing.
	AddTemplate(ctx context.Context, hash string, r io.Reader) error
	// HasTemplate says whether a template is here, whole.
	HasTemplate(hash string) bool
	// PruneTemplates removes the templates that keep refuses, from which no machine
	// here runs, and that have been so for rest. Not beside a Start, a Restore or an AddTemplate.
	PruneTemplates(ctx context.Context, keep func(hash string) bool, rest time.Duration) (removed []string, err error)
	// AddLayers takes disk layers in for a Restore that is to come, which then does
	// not read them; drop lets go of them, after the Restore or without. On error
	// nothing of them is left.
	AddLayers(ctx context.Context, layers []Layer) (drop func() error, err error)
	// Restore makes a machine from a capture, completely, and leaves it frozen:
	// not one instruction of it has run when it returns, Thaw lets it go on. On
	// error nothing of the machine is left. persist as in Start.
	Restore(ctx context.Context, spec Spec, c Capture, persist func(Handle) error) (Kept, error)
}

// Kept is a machine of a Keeper. Start, Adopt and Restore of one return it.
type Kept interface {
	Machine
	// TemplateHash is that of the template's content which the machine goes back to.
	TemplateHash() string
	// Restorable says why no host like this one could restore a capture of the
	// machine, nil where one could: it was started by another build of the machine
	// monitor, say, and has outlived it.
	Restorable() error
	// AddLayer puts a new disk layer on top while the machine runs, and gives the
	// layers below, lowest first: they stand still from then on and can be shipped
	// before the stop. They may be read until the machine ends or the next AddLayer,
	// which may make one of several; but the lowest stay of them, which somebody
	// has shipped, it leaves as they are.
	AddLayer(ctx context.Context, stay int) ([]Layer, error)
	// Freeze stops the processors. The handle's state says so on disk before
	// they stop: an adopted machine is as frozen as it was. Idempotent.
	Freeze(ctx context.Context) error
	// Frozen says whether the processors stand still.
	Frozen() bool
	// Thaw lets the machine go on. Idempotent.
	Thaw(ctx context.Context) error
	// Capture describes a frozen machine; it is valid until Thaw or Stop.
	Capture(ctx context.Context) (Capture, error)
}

// Capture is a frozen machine's state as the difference from its template. Its
// parts may be read one after the other, each once or more.
type Capture interface {
	Driver() string
	CPUClass() string
	Template() string // content hash
	// Pages yields the guest's pages that differ from the template, by rising
	// index (guest address / PageSize). Data is valid until the next step; nil
	// means a page of zeros.
	Pages() iter.Seq2[Page, error]
	// Device is the devices' state, a few KiB to 1 MiB.
	Device() (io.ReadCloser, error)
	// Layers are the disk's, lowest first; the template's own are not among them.
	Layers() []Layer
	Close() error
}

// Page is one page of guest memory.
type Page struct {
	Index uint64
	Data  []byte // PageSize bytes, or nil for zeros
}

// Layer is one layer of a machine's disk.
type Layer struct {
	Name string // unique for its content for ever: a layer that stands still is never written again
	Size int64  // bytes of Open's stream
	Open func() (io.ReadCloser, error)
}
