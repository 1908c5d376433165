package browser

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/shared/session"
	"github.com/go-rod/rod/lib/cdp"
	"github.com/go-rod/rod/lib/proto"
)

// chrome is one running Chrome with our own CDP connection to it.
type chrome struct {
	log    *slog.Logger
	proc   *process
	socket *cdp.WebSocket
	client *cdp.Client
	addr   string
	path   string
	gone   chan struct{} // closed when the process ended or our connection broke
	done   sync.WaitGroup
	ending sync.Mutex
	over   bool // guarded by ending: nothing joins done any more
	pages  *pages
	tabs   tabs
	bare   atomic.Pointer[bare] // nil but between Strip and Page
	began  time.Time

	wanted   func() session.Viewport // the session's, now
	launched session.Viewport        // what windows of this Chrome are born with
	frame    atomic.Int32            // a window's height less its page's
}

// start launches a Chrome and waits until it shows its page at the right size.
func (b *Browser) start(ctx context.Context) (_ *chrome, err error) {
	ctx, cancel := b.cfg.Freezer.WithTimeout(ctx, freeze.Browser, startTimeout, context.DeadlineExceeded)
	defer cancel()
	if err := b.cfg.prepare(); err != nil {
		return nil, fmt.Errorf("start chrome: %w", err)
	}
	v := b.wanted()
	proc, ws, err := launch(ctx, b.cfg, b.cfg.args(v), b.log)
	if err != nil {
		return nil, err
	}
	c := &chrome{log: b.log, proc: proc, gone: make(chan struct{}), wanted: b.wanted, launched: v, pages: newPages(), began: time.Now()}
	c.frame.Store(frameHeight)
	defer func() {
		if err != nil {
			c.stop()
		}
	}()
	if err := c.attach(ctx, ws); err != nil {
		return nil, fmt.Errorf("start chrome: %w", err)
	}
	if err := c.settle(ctx); err != nil {
		return nil, fmt.Errorf("start chrome: %w", err)
	}
	return c, nil
}

// attach opens the control connection and begins to follow pages.
func (c *chrome) attach(ctx context.Context, ws string) error {
	u, err := url.Parse(ws)
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	c.addr, c.path = u.Host, u.Path
	c.socket = &cdp.WebSocket{}
	if err := c.socket.Connect(ctx, ws, nil); err != nil {
		c.socket = nil
		return fmt.Errorf("attach: %w", err)
	}
	c.client = cdp.New().Start(c.socket)
	c.done.Add(1)
	go func() {
		defer c.done.Done()
		c.follow()
	}()
	return c.call(ctx, discoverPages{Discover: true, Filter: onlyPages}, nil)
}

// stop ends this Chrome whatever state it is in.
func (c *chrome) stop() {
	c.proc.kill()
	if c.socket != nil {
		_ = c.socket.Close()
	}
	c.done.Wait()
}

func (c *chrome) dead() bool {
	select {
	case <-c.gone:
		return true
	default:
		return false
	}
}

// cause says why gone was closed.
func (c *chrome) cause() error {
	select {
	case <-c.proc.exited:
		return errors.Join(errEnded, c.proc.err)
	case <-time.After(100 * time.Millisecond):
		return errors.New("its DevTools connection broke")
	}
}

// request is a CDP command; rod's proto types are all requests.
type request interface{ ProtoReq() string }

// call sends a browser-level command and decodes its result into out unless nil.
func (c *chrome) call(ctx context.Context, req request, out any) error {
	return c.callOn(ctx, "", req, out)
}

func (c *chrome) callOn(ctx context.Context, sessionID string, req request, out any) error {
	raw, err := c.client.Call(ctx, sessionID, req.ProtoReq(), req)
	if err != nil {
		return fmt.Errorf("%s: %w", req.ProtoReq(), err)
	}
	if out == nil {
		return nil
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return fmt.Errorf("%s: %w", req.ProtoReq(), err)
	}
	return nil
}

// follow reads the control connection's events until it breaks. rod's client
// stalls when events are not taken, so nothing here may wait for an answer.
func (c *chrome) follow() {
	defer func() {
		c.ending.Lock()
		c.over = true
		c.ending.Unlock()
		close(c.gone)
	}()
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	defer work.Wait()
	defer cancel()
	for e := range c.client.Event() {
		switch e.Method {
		case proto.TargetTargetCreated{}.ProtoEvent():
			var p proto.TargetTargetCreated
			if json.Unmarshal(e.Params, &p) == nil && p.TargetInfo != nil && p.TargetInfo.Type == proto.TargetTargetInfoTypePage {
				c.pages.add(p.TargetInfo)
				work.Go(func() { c.sizeNew(ctx, p.TargetInfo.TargetID) })
			}
		case proto.TargetTargetDestroyed{}.ProtoEvent():
			var p proto.TargetTargetDestroyed
			if json.Unmarshal(e.Params, &p) == nil && c.pages.remove(p.TargetID) && c.bare.Load() == nil {
				work.Go(func() { c.openPage(ctx) })
			}
		default:
			c.tabs.hear(e)
		}
	}
}

// background runs f beside this Chrome unless it has died; what f waits for must
// end with gone.
func (c *chrome) background(f func()) bool {
	c.ending.Lock()
	defer c.ending.Unlock()
	if !c.over {
		c.done.Go(f)
	}
	return !c.over
}

// prepare makes the profile with Berth's preferences and the folders Chrome
// writes to, owned by Chrome's user.
func (c Config) prepare() error {
	defaults := filepath.Join(c.Profile, "Default")
	for _, dir := range []string{c.Profile, defaults, c.Downloads} {
		if err := c.ownDir(dir); err != nil {
			return err
		}
	}
	// A killed Chrome leaves its lock; the one that replaces it is alone here.
	for _, name := range []string{"SingletonLock", "SingletonSocket", "SingletonCookie"} {
		_ = os.Remove(filepath.Join(c.Profile, name))
	}
	prefs := filepath.Join(defaults, "Preferences")
	if _, err := os.Stat(prefs); err == nil {
		return nil
	}
	// Preferences rather than Browser.setDownloadBehavior: a client's own call
	// takes that over, and its leaving resets it (Chrome's BrowserHandler), but
	// falls back to these.
	body, err := json.Marshal(map[string]any{
		"download":  map[string]any{"default_directory": c.Downloads, "prompt_for_download": false},
		"savefile":  map[string]any{"default_directory": c.Downloads},
		"translate": map[string]any{"enabled": false},
		// Else the first word typed makes Chrome fetch a dictionary; an absent
		// "dictionary" is the locale's, whatever the list says.
		"browser":    map[string]any{"enable_spellchecking": false},
		"spellcheck": map[string]any{"dictionaries": []string{}, "dictionary": ""},
	})
	if err != nil {
		return fmt.Errorf("preferences: %w", err)
	}
	if err := os.WriteFile(prefs, body, 0o600); err != nil {
		return fmt.Errorf("preferences: %w", err)
	}
	return c.own(prefs)
}

// ownDir makes a folder with its missing parents, all owned by Chrome's user.
func (c Config) ownDir(dir string) error {
	if _, err := os.Stat(dir); err == nil {
		return nil
	}
	if err := c.ownDir(filepath.Dir(dir)); err != nil {
		return err
	}
	if err := os.Mkdir(dir, 0o755); err != nil {
		return fmt.Errorf("folder of chrome: %w", err)
	}
	return c.own(dir)
}

func (c Config) own(path string) error {
	if c.UID == 0 {
		return nil
	}
	uid, gid := c.owner()
	if err := os.Lchown(path, uid, gid); err != nil {
		return fmt.Errorf("folder of chrome: %w", err)
	}
	return nil
}

// owner is whom Chrome's files belong to.
func (c Config) owner() (uid, gid int) {
	if len(c.Groups) > 0 {
		return c.UID, c.Groups[0]
	}
	return c.UID, c.GID
}
