package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/agent/browser"
	"github.com/berth-dev/berth/hostd/agent/files"
	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/identity"
	"github.com/berth-dev/berth/hostd/agent/portable"
	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/hostd/agent/shell"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
)

// Folders of a portable stream.
const (
	workspaceFolder = "workspace"
	storageFolder   = "storage" // of browser.Storage
)

// portableState is the JSON of a portable stream.
type portableState struct {
	Browser *browser.State `json:"browser,omitempty"`
	Shells  []shell.Saved  `json:"shells,omitempty"`
}

// capture is what a machine does around captures: stand still, go on, and
// carry its session's state to another machine.
type capture struct {
	machine  *machine
	freezer  *freeze.Freezer
	browser  *browser.Browser                // nil when the kind has none
	shells   *shell.Shells                   // nil likewise
	work     *os.Root                        // the workspace
	identity func(ctx context.Context) error // gives the machine another
	renew    func(lineage [16]byte)          // of session links
	mend     func(t agentlink.Thaw, asOf time.Time, log *slog.Logger) error
	log      *slog.Logger

	turn     sync.Mutex    // held by each operation
	saved    []shell.Saved // guarded by turn: since the last portable freeze
	imported bool          // guarded by turn
	thawed   bool          // guarded by turn: the customer could run something
}

// register mounts the control paths of captures.
func (c *capture) register(mux *http.ServeMux) {
	mux.HandleFunc(agentlink.ControlFreeze, c.serveFreeze)
	mux.HandleFunc(agentlink.ControlClock, serveClock)
	mux.HandleFunc(agentlink.ControlThaw, c.serveThaw)
	mux.HandleFunc(agentlink.ControlWhole, c.serveWhole)
	mux.HandleFunc(agentlink.ControlExport, c.serveExport)
	mux.HandleFunc(agentlink.ControlImport, c.serveImport)
}

// freeze makes the customer's processes stand still, and Chrome unless the
// capture is a portable one, which asks it for its state.
func (c *capture) freeze(ctx context.Context, f agentlink.Freeze) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	if f.Template {
		return c.strip(ctx)
	}
	if f.Portable && c.saved == nil && c.shells != nil {
		still := c.freezer.Frozen(freeze.Customer)
		if err := c.freezer.Shut(ctx, freeze.Customer); err != nil {
			return err
		}
		c.saved = c.shells.Save(ctx, still)
	}
	if err := c.freezer.Freeze(ctx, freeze.Customer); err != nil {
		return err
	}
	if f.Portable || c.browser == nil {
		return nil
	}
	if err := c.freezer.Freeze(ctx, freeze.Browser); err != nil {
		return errors.Join(err, c.freezer.Thaw(freeze.Customer))
	}
	return nil
}

// hold keeps the customer from running anything before a thaw.
func (c *capture) hold(ctx context.Context) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	return c.freezer.Freeze(ctx, freeze.Customer)
}

// thaw mends what the stop or the copy made wrong and lets all go on. asOf is
// when the order came.
func (c *capture) thaw(ctx context.Context, t agentlink.Thaw, asOf time.Time) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	if t.Fresh && c.machine.taken() {
		return apierr.New(apierr.InvalidRequest, "fresh: this machine has a session already")
	}
	if err := c.mend(t, asOf, c.log); err != nil {
		return err
	}
	if t.Fresh {
		if err := c.renewAll(ctx); err != nil {
			return err
		}
	}
	if err := c.freezer.Thaw(freeze.Browser); err != nil {
		return err
	}
	if c.browser != nil {
		if err := c.browser.Open(ctx); err != nil { // pages of an import
			return err
		}
	}
	if t.Proxy != nil {
		c.machine.setProxy(*t.Proxy)
	}
	if err := c.freezer.Thaw(freeze.Customer); err != nil {
		return err
	}
	if c.machine.taken() {
		c.thawed, c.saved = true, nil
	}
	return nil
}

// mend makes the machine's clock right and its kernel's randomness fresh.
func mend(t agentlink.Thaw, asOf time.Time, log *slog.Logger) error {
	return errors.Join(identity.SetClock(t.Now, asOf, log), identity.AddEntropy(t.Entropy))
}

// export writes the state of the frozen machine. Chrome answers first and then
// stands still too, until the thaw: nothing may change that was told already.
func (c *capture) export(ctx context.Context, to func() http.ResponseWriter) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	if !c.freezer.Frozen(freeze.Customer) || !c.machine.taken() {
		return apierr.New(apierr.InvalidRequest, "the machine must be frozen for an export")
	}
	s := portableState{Shells: c.saved}
	if c.browser != nil {
		if err := c.freezer.Thaw(freeze.Browser); err != nil { // an export before this one froze it
			return err
		}
		state, err := c.browser.State(ctx)
		if err != nil {
			return err
		}
		if err := c.freezer.Freeze(ctx, freeze.Browser); err != nil {
			return err
		}
		s.Browser = &state
	}
	w, err := portable.NewWriter(to(), s)
	if err != nil {
		return err
	}
	w.Skip = files.Aside
	if c.browser != nil {
		storage, err := c.browser.Storage()
		if err != nil {
			return err
		}
		defer storage.Close()
		if err := w.Folder(storageFolder, storage, browser.StorageFolders); err != nil {
			return err
		}
	}
	if err := w.Folder(workspaceFolder, c.work, nil); err != nil {
		return err
	}
	return w.Close()
}

// load lays an exported state into this machine. Pages open at the thaw, when
// their way to the network is there.
func (c *capture) load(ctx context.Context, r *http.Request) error {
	c.turn.Lock()
	defer c.turn.Unlock()
	started := c.machine.session.Load()
	if started == nil || !started.Held || c.thawed || !c.freezer.Frozen(freeze.Customer) {
		return apierr.New(apierr.InvalidRequest, "the machine must be started with held, and not thawed, for an import")
	}
	if c.imported {
		return apierr.New(apierr.InvalidRequest, "a state was imported already")
	}
	c.imported = true // also when it fails: half a state is in
	in := &importer{capture: c}
	defer in.close()
	var err error
	read := func() error { return portable.Read(r.Body, in.begin) }
	if c.browser == nil {
		err = read()
	} else {
		err = c.browser.Replace(ctx, read)
	}
	if errors.Is(err, portable.ErrFormat) {
		return apierr.Wrap(err, apierr.InvalidRequest, "body: %v", err)
	}
	if err != nil {
		return err
	}
	return in.finish(ctx)
}

// importer is an import under way.
type importer struct {
	*capture
	state   portableState
	storage *os.Root
}

func (in *importer) close() {
	if in.storage != nil {
		_ = in.storage.Close()
	}
}

// begin checks the state and says where files go.
func (in *importer) begin(raw json.RawMessage) (map[string]*portable.Folder, error) {
	if err := json.Unmarshal(raw, &in.state); err != nil {
		return nil, fmt.Errorf("%w: state: %w", portable.ErrFormat, err)
	}
	if err := shell.Check(in.state.Shells); err != nil {
		return nil, fmt.Errorf("%w: %w", portable.ErrFormat, err)
	}
	folders := map[string]*portable.Folder{workspaceFolder: {Root: in.work}}
	if in.browser == nil || in.state.Browser == nil {
		return folders, nil
	}
	if err := in.state.Browser.Check(); err != nil {
		return nil, fmt.Errorf("%w: %w", portable.ErrFormat, err)
	}
	var err error
	if in.storage, err = in.browser.Storage(); err != nil {
		return nil, err
	}
	for _, name := range browser.StorageFolders { // what the waiting Chrome had made
		if err := in.storage.RemoveAll(name); err != nil {
			return nil, fmt.Errorf("import: %w", err)
		}
	}
	folders[storageFolder] = &portable.Folder{Root: in.storage, Only: browser.StorageFolders, Own: in.browser.OwnStorage}
	return folders, nil
}

func (in *importer) finish(ctx context.Context) error {
	if in.shells != nil {
		if err := in.shells.Restore(in.state.Shells); err != nil {
			return err
		}
	}
	if in.browser != nil && in.state.Browser != nil {
		return in.browser.Prepare(ctx, *in.state.Browser)
	}
	return nil
}

func (c *capture) serveFreeze(w http.ResponseWriter, r *http.Request) {
	serveOrder(w, r, func(f agentlink.Freeze) error { return c.freeze(r.Context(), f) })
}

func (c *capture) serveThaw(w http.ResponseWriter, r *http.Request) {
	asOf := time.Now()
	since := identity.Monotonic()
	serveOrder(w, r, func(t agentlink.Thaw) error {
		if t.AsOf != 0 {
			asOf = asOf.Add(time.Duration(t.AsOf) - since)
		}
		return c.thaw(r.Context(), t, asOf)
	})
}

func (c *capture) serveWhole(w http.ResponseWriter, r *http.Request) {
	serveOrder(w, r, func(struct{}) error { return c.whole(r.Context()) })
}

// serveClock tells the clock that a host compares its own with.
func serveClock(w http.ResponseWriter, r *http.Request) {
	if reply.Method(w, r, http.MethodGet) {
		reply.JSON(w, http.StatusOK, agentlink.Clock{Monotonic: int64(identity.Monotonic())})
	}
}

// serveOrder takes an order as JSON and answers 204 when it was carried out.
func serveOrder[T any](w http.ResponseWriter, r *http.Request, do func(T) error) {
	if !reply.Method(w, r, http.MethodPost) {
		return
	}
	var order T
	err := reply.Decode(w, r, &order)
	if err == nil {
		err = do(order)
	}
	if err != nil {
		reply.Error(w, r, told(err))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}

// told keeps an error's text, which hostd shall see and no client does.
func told(err error) error {
	var known *apierr.Error
	if errors.As(err, &known) {
		return err
	}
	return apierr.Wrap(err, apierr.Internal, "%v", err)
}

func (c *capture) serveExport(w http.ResponseWriter, r *http.Request) {
	if !reply.Method(w, r, http.MethodGet) {
		return
	}
	begun := false
	err := c.export(r.Context(), func() http.ResponseWriter {
		begun = true
		w.Header().Set("Content-Type", "application/x-tar")
		return w
	})
	switch {
	case err == nil:
	case begun:
		c.log.Error("export broke off", "err", err)
		panic(http.ErrAbortHandler) // the stream must not look whole
	default:
		reply.Error(w, r, told(err))
	}
}

func (c *capture) serveImport(w http.ResponseWriter, r *http.Request) {
	if !reply.Method(w, r, http.MethodPost) {
		return
	}
	if err := c.load(r.Context(), r); err != nil {
		c.log.Error("import failed", "err", err)
		reply.Error(w, r, told(err))
		return
	}
	w.WriteHeader(http.StatusNoContent)
}
