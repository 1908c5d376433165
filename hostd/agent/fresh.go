package main

import (
	"context"
	"crypto/rand"
	"time"

	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/shell"
	"github.com/berth-dev/berth/shared/apierr"
)

// A template and what its clones do to be unlike each other.

// strip makes the machine one that clones can be made of: what each would have
// to end and make anew is not there, and nothing runs.
func (c *capture) strip(ctx context.Context) error {
	if c.machine.taken() {
		return apierr.New(apierr.InvalidRequest, "template: this machine has a session already")
	}
	if c.shells != nil {
		if err := c.shells.Restart(ctx, shell.Default); err != nil {
			return err
		}
	}
	if c.browser != nil {
		if err := c.browser.Strip(ctx, true); err != nil {
			return err
		}
	}
	return c.freezer.Freeze(ctx, freeze.Customer)
}

// renewAll makes a clone unlike its siblings. The kernel's randomness is fresh.
// A page and a bash come later.
func (c *capture) renewAll(ctx context.Context) error {
	var lineage [16]byte
	_, _ = rand.Read(lineage[:]) // never fails
	c.renew(lineage)
	if err := c.identity(ctx); err != nil {
		return err
	}
	if c.browser != nil {
		if err := c.browser.Renew(ctx); err != nil {
			return err
		}
	}
	if c.shells != nil {
		if err := c.shells.Restart(ctx, shell.Default); err != nil {
			return err
		}
	}
	c.machine.work.Go(func() { c.later(c.machine.ctx) })
	return nil
}

// laterAfter is when what a fresh thaw leaves for later is made, should nobody
// have needed it before. Until then the processor is that of whoever asked for
// the machine.
const laterAfter = 3 * time.Second

func (c *capture) later(ctx context.Context) {
	if c.browser != nil {
		select {
		case <-time.After(laterAfter):
		case <-ctx.Done():
		}
	}
	if err := c.whole(ctx); err != nil && ctx.Err() == nil {
		c.log.Error("a fresh machine does not become whole", "err", err)
	}
}

// whole makes what a fresh thaw leaves for later: Chrome's page, a bash.
func (c *capture) whole(ctx context.Context) error {
	if c.browser != nil {
		if err := c.browser.Page(ctx); err != nil {
			return err
		}
	}
	if c.shells != nil {
		return c.shells.Warm(ctx)
	}
	return nil
}
