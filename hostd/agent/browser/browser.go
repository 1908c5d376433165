// Package browser supervises the machine's Chrome: starts it, keeps it
// running, keeps a page open in it and gives its windows the session's size.
//
//	Run ── launch ──▶ Chrome process   (process.go, flags.go)
//	 │                   │ DevTools listening on ws://127.0.0.1:…
//	 └── attach ─────▶ control         (control.go: one CDP connection of our own)
//	                     ├── pages.go     a default context always has a page
//	                     ├── viewport.go  windows as large as the session asked
//	                     ├── state.go     what a portable capture takes, restore.go what it gives
//	                     └── renew.go     nothing random in common with a clone (processes.go)
//
// Clients never share the control connection: package cdp gives each its own.
package browser

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/session"
)

// DefaultViewport is what a Chrome that nobody sized shows, so that a session
// with the default costs no call at all.
var DefaultViewport = session.Viewport{Width: 1280, Height: 720}

// Bounds of bringing Chrome up: a start takes about a second on an idle host,
// many when a pool refills under load, and half a minute of processor time when
// instructions are emulated, which a busy computer makes minutes.
const (
	startTimeout = 3 * time.Minute
	minBackoff   = 100 * time.Millisecond
	maxBackoff   = 10 * time.Second
	steadyAfter  = 30 * time.Second // a Chrome that lived this long starts the backoff anew
	maxFailures  = 5                // starts that fail in a row before Failed says so
)

// Config says which Chrome runs and as whom.
type Config struct {
	Binary    string   // the ELF itself, not Debian's wrapper script; "" finds it
	Profile   string   // --user-data-dir, made when missing
	Home      string   // Chrome's HOME and working directory
	Downloads string   // where finished downloads land
	Proxy     string   // --proxy-server, "" for none (tests)
	UID, GID  int      // whom Chrome runs as; UID 0 leaves the caller's
	Groups    []int    // supplementary groups
	NoSandbox bool     // Chrome's own sandbox off (tests that run as root)
	Flags     []string // further flags, for tests
	// Freezer makes Chrome stand still; nil: never.
	Freezer *freeze.Freezer
	// Calm is how old Chrome is when it has done all that it puts off at its
	// start; 0: Strip does not wait for that.
	Calm time.Duration

	// Event reports what the customer should know (level "warn" or "error").
	// It must not block.
	Event func(level, text string)
}

// Endpoint is where a running Chrome takes CDP connections. Gone is closed
// when that Chrome has died; the next Endpoint is another Chrome.
type Endpoint struct {
	Addr string // 127.0.0.1:port
	Path string // /devtools/browser/<id>
	Gone <-chan struct{}
	// Page, unless nil, must have returned before anybody sees what is open.
	Page func(ctx context.Context) error
}

// Browser is the supervisor. Safe for concurrent use.
type Browser struct {
	cfg Config
	log *slog.Logger

	replacing chan replacement // from Replace to once

	mu       sync.Mutex // guards what follows
	current  *chrome    // nil while none is usable
	changed  chan struct{}
	viewport session.Viewport
	prepared *prepared // a state whose pages are still to be opened
	failed   string
	note     string
}

// New makes a supervisor; Run starts it.
func New(cfg Config, log *slog.Logger) *Browser {
	if cfg.Event == nil {
		cfg.Event = func(string, string) {}
	}
	return &Browser{cfg: cfg, log: log, viewport: DefaultViewport, changed: make(chan struct{}), replacing: make(chan replacement)}
}

// Run keeps a Chrome running until ctx ends, then kills it and whatever it
// started. It returns nil then, and an error only when Chrome is not installed.
func (b *Browser) Run(ctx context.Context) error {
	binary, err := findBinary(b.cfg.Binary)
	if err != nil {
		b.fail(err.Error())
		return err
	}
	b.cfg.Binary = binary
	backoff, failures := minBackoff, 0
	for ctx.Err() == nil {
		began := time.Now()
		died, err := b.once(ctx)
		if ctx.Err() != nil {
			return nil
		}
		if errors.Is(err, errReplaced) {
			continue
		}
		if time.Since(began) > steadyAfter {
			backoff = minBackoff
		}
		if died {
			failures = 0
			b.log.Warn("chrome died", "err", err)
			b.cfg.Event("warn", "Chrome died and is being started again.")
		} else if failures++; !b.withoutSandbox(err) {
			b.log.Error("chrome did not start", "err", err, "failures", failures)
			if failures == maxFailures {
				b.fail(fmt.Sprintf("Chrome did not start %d times in a row: %v", failures, err))
				b.cfg.Event("error", "Chrome does not start.")
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(backoff):
		}
		backoff = min(2*backoff, maxBackoff)
	}
	return nil
}

// once runs one Chrome to its end; died says that it had been usable.
func (b *Browser) once(ctx context.Context) (died bool, err error) {
	c, err := b.start(ctx)
	if err != nil {
		return false, err
	}
	defer c.stop()
	b.publish(c)
	defer b.publish(nil)
	select {
	case <-ctx.Done():
		return true, ctx.Err()
	case <-c.gone:
		return true, c.cause()
	case r := <-b.replacing:
		b.publish(nil)
		c.stop()
		r.done <- r.between()
		return false, errReplaced
	}
}

// withoutSandbox gives up Chrome's own sandbox when the kernel refuses it to
// this machine, and says so: a browser with one wall less beats none.
func (b *Browser) withoutSandbox(err error) bool {
	if b.cfg.NoSandbox || !errors.Is(err, errNoSandbox) {
		return false
	}
	b.cfg.NoSandbox = true
	note := "Chrome runs without its own sandbox: this machine allows no user namespaces."
	b.mu.Lock()
	b.note = note
	b.mu.Unlock()
	b.log.Warn("chrome sandbox is unavailable", "err", err)
	b.cfg.Event("warn", note)
	return true
}

func (b *Browser) publish(c *chrome) {
	b.mu.Lock()
	b.current = c
	if c != nil {
		b.failed = ""
	}
	close(b.changed)
	b.changed = make(chan struct{})
	b.mu.Unlock()
}

func (b *Browser) fail(why string) {
	b.mu.Lock()
	b.failed = strings.TrimSpace(why)
	close(b.changed)
	b.changed = make(chan struct{})
	b.mu.Unlock()
}

// Ready says whether a Chrome runs that answered CDP and has shown its page.
func (b *Browser) Ready() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.current != nil
}

// Failed is a sentence when Chrome cannot be brought up, else empty.
func (b *Browser) Failed() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failed
}

// Note is a sentence about a weakness of this Chrome that the operator should
// know (no sandbox of its own), else empty.
func (b *Browser) Note() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.note
}

// Endpoint waits until a Chrome is usable.
func (b *Browser) Endpoint(ctx context.Context) (Endpoint, error) {
	c, err := b.wait(ctx)
	if err != nil {
		return Endpoint{}, fmt.Errorf("wait for chrome: %w", err)
	}
	e := Endpoint{Addr: c.addr, Path: c.path, Gone: c.gone}
	if c.bare.Load() != nil {
		e.Page = b.Page
	}
	return e, nil
}

// Await waits until a Chrome is usable, or fails once none can be brought up.
func (b *Browser) Await(ctx context.Context) error {
	for {
		b.mu.Lock()
		ready, failed, changed := b.current != nil, b.failed, b.changed
		b.mu.Unlock()
		switch {
		case ready:
			return nil
		case failed != "":
			return errors.New(failed)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		}
	}
}

func (b *Browser) wait(ctx context.Context) (*chrome, error) {
	for {
		b.mu.Lock()
		c, changed := b.current, b.changed
		b.mu.Unlock()
		if c != nil && !c.dead() { // Run may not have noticed yet
			return c, nil
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-changed:
		}
	}
}

// SetViewport makes the page area of every window of ordinary size v: those
// open now, those opened later and those of a Chrome started again. It costs
// nothing when v is what windows have already.
func (b *Browser) SetViewport(ctx context.Context, v session.Viewport) error {
	b.mu.Lock()
	same := b.viewport == v
	b.viewport = v
	b.mu.Unlock()
	if same {
		return nil
	}
	c, err := b.wait(ctx)
	if err != nil {
		return fmt.Errorf("set viewport: %w", err)
	}
	if err := c.resizeAll(ctx, v); err != nil {
		return fmt.Errorf("set viewport: %w", err)
	}
	return nil
}

func (b *Browser) wanted() session.Viewport {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.viewport
}

// GuestConfig is the configuration inside a machine.
func GuestConfig() Config {
	return Config{
		Profile:   "/home/" + agentlink.UserName + "/.config/chromium",
		Home:      "/home/" + agentlink.UserName,
		Downloads: agentlink.Downloads,
		Proxy:     fmt.Sprintf("http://%s:%d", agentlink.SlotAddr, agentlink.EgressPort),
		Calm:      70 * time.Second,
		UID:       agentlink.UserUID,
		GID:       agentlink.BrowserGID,
		Groups:    []int{agentlink.UserGID},
	}
}
