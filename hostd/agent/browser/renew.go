package browser

import (
	"context"
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/go-rod/rod/lib/proto"
)

// bare is a Chrome that has no page and no renderer. Strip makes it so, and
// what lacks comes with Page.
type bare struct {
	// areas are what processes of a clone have to find wiped, while Chrome
	// stands still after Strip. Calls of Strip and Renew come one at a time.
	areas    map[int][]area
	stripped chan struct{} // closed when Strip has ended, which would kill a page's renderer
	fill     sync.Once
	done     chan struct{} // closed when the page is there
}

// Strip leaves nothing in Chrome that was drawn at random and would have to end
// in a clone: it closes the page, whose ids in CDP were drawn, and ends all
// renderers, since V8 seeds Math.random when a process begins. It then waits
// until Chrome has done what it does once after its start, when calm is asked
// for, and has it stand still.
func (b *Browser) Strip(ctx context.Context, calm bool) error {
	c, err := b.wait(ctx)
	if err != nil {
		return fmt.Errorf("strip chrome: %w", err)
	}
	if _, err := b.strip(ctx, c, calm); err != nil {
		return fmt.Errorf("strip chrome: %w", err)
	}
	return nil
}

// strip gives what lacks then.
func (b *Browser) strip(ctx context.Context, c *chrome, calm bool) (*bare, error) {
	if was := c.bare.Load(); was != nil {
		if was.areas != nil {
			return was, nil // it was done, and Chrome has not run since
		}
		// Again: a page that is being opened has to be there to be closed.
		if err := errors.Join(b.cfg.Freezer.Thaw(freeze.Browser), b.Page(ctx)); err != nil {
			return nil, err
		}
	}
	now := &bare{stripped: make(chan struct{}), done: make(chan struct{})}
	defer close(now.stripped)
	c.bare.Store(now) // from here on no page replaces the last one
	areas, err := b.empty(ctx, c, calm)
	now.areas = areas
	return now, err
}

// empty ends Chrome's pages and renderers, and lists what is to be wiped once it
// stands still.
func (b *Browser) empty(ctx context.Context, c *chrome, calm bool) (map[int][]area, error) {
	for _, id := range c.pages.ids() {
		if err := c.call(ctx, proto.TargetCloseTarget{TargetID: id}, nil); err != nil && c.pages.has(id) {
			return nil, err
		}
	}
	if err := c.awaitPages(ctx, func() bool { return len(c.pages.ids()) == 0 }); err != nil {
		return nil, err
	}
	if err := c.endRenderers(ctx); err != nil {
		return nil, err
	}
	if calm {
		c.awaitCalm(ctx, b.cfg.Calm)
	}
	for {
		if err := b.cfg.Freezer.Freeze(ctx, freeze.Browser); err != nil {
			return nil, err
		}
		if len(c.renderers()) == 0 {
			return c.wiped()
		}
		// One that began meanwhile.
		if err := errors.Join(b.cfg.Freezer.Thaw(freeze.Browser), c.endRenderers(ctx)); err != nil {
			return nil, err
		}
	}
}

// Renew makes a Chrome whose memory was cloned share nothing random with its
// siblings; the kernel's own randomness must be fresh already. It needs the
// right to write other processes' memory. Chrome goes on without a page: Page
// makes one.
//
// What Strip leaves (browser, GPU process, zygotes) draws from the kernel at
// each need (base::RandBytes), but for BoringSSL's generators, of TLS among
// others: they are told that the process forked, which a clone is, before
// Chrome runs.
func (b *Browser) Renew(ctx context.Context) error {
	c, err := b.wait(ctx)
	if err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	lacks, err := b.strip(ctx, c, false)
	if err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	var all error
	for pid, areas := range lacks.areas {
		if err := wipe(pid, areas); err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
			all = errors.Join(all, err)
		}
	}
	if all != nil { // it stands still for ever rather than repeat what its siblings draw
		return fmt.Errorf("renew chrome: %w", all)
	}
	lacks.areas = nil
	if err := b.cfg.Freezer.Thaw(freeze.Browser); err != nil {
		return fmt.Errorf("renew chrome: %w", err)
	}
	return nil
}

// Page returns when Chrome shows a page in its default context, which it always
// does but after Renew; then this opens one. Nobody may see Chrome's targets
// before.
func (b *Browser) Page(ctx context.Context) error {
	for {
		c, err := b.wait(ctx)
		if err != nil {
			return fmt.Errorf("page: %w", err)
		}
		lacks := c.bare.Load()
		if lacks == nil {
			return nil
		}
		select {
		case <-lacks.stripped:
			lacks.fill.Do(func() { c.background(func() { b.open(c, lacks) }) })
		case <-c.gone:
			continue
		case <-ctx.Done():
			return fmt.Errorf("page: %w", context.Cause(ctx))
		}
		select {
		case <-lacks.done:
			return nil
		case <-c.gone: // the next one has a page
		case <-ctx.Done():
			return fmt.Errorf("page: %w", context.Cause(ctx))
		}
	}
}

// pageTimeout is how long a Chrome that does not stand still may take for its
// page. A variable for tests.
var pageTimeout = startTimeout

// open opens the page that lacks, at the size of the session. A Chrome that
// cannot do it is ended, so that another one starts: whoever wants the page
// waits for it, and for nothing else.
func (b *Browser) open(c *chrome, lacks *bare) {
	ctx, cancel := b.cfg.Freezer.WithTimeout(context.Background(), freeze.Browser, pageTimeout, context.DeadlineExceeded)
	defer cancel()
	go func() {
		select {
		case <-c.gone:
			cancel()
		case <-ctx.Done():
		}
	}()
	var made proto.TargetCreateTargetResult
	err := c.call(ctx, proto.TargetCreateTarget{URL: "about:blank"}, &made)
	if err == nil {
		err = c.awaitPages(ctx, func() bool { return c.pages.has(made.TargetID) })
	}
	if v := c.wanted(); err == nil && v != c.launched {
		err = c.size(ctx, made.TargetID, v, nil)
	}
	if err != nil {
		c.log.Error("no page in a renewed chrome", "err", err)
		_ = c.proc.cmd.Process.Kill() // it may be dead already
		return
	}
	c.bare.CompareAndSwap(lacks, nil)
	close(lacks.done)
}

// awaitPages waits for what Chrome tells right after an answer.
func (c *chrome) awaitPages(ctx context.Context, ok func() bool) error {
	look := time.NewTicker(time.Millisecond)
	defer look.Stop()
	for !ok() {
		select {
		case <-look.C:
		case <-c.gone:
			return c.cause()
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}
