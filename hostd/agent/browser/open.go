package browser

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/go-rod/rod/lib/proto"
)

const (
	// openWait is how long Open waits for pages to show themselves; slower
	// ones go on in the background.
	openWait = 3 * time.Second
	// loadWait is how long a page may load until it is scrolled, and scrollWait
	// how long it may then grow to the height it had.
	loadWait   = 60 * time.Second
	scrollWait = 5 * time.Second
)

// Open opens the pages of the state that was prepared, if there is one. What
// the network does to a page is no error.
func (b *Browser) Open(ctx context.Context) error {
	b.mu.Lock()
	p := b.prepared
	b.mu.Unlock()
	if p == nil {
		return nil
	}
	c, err := b.wait(ctx)
	if err != nil {
		return fmt.Errorf("open pages: %w", err)
	}
	if c != p.in { // it died meanwhile
		if err := b.Prepare(ctx, p.state); err != nil {
			return fmt.Errorf("open pages: %w", err)
		}
		return b.Open(ctx)
	}
	b.mu.Lock()
	b.prepared = nil
	b.mu.Unlock()
	var shown sync.WaitGroup
	for i, t := range p.tabs {
		show := sync.OnceFunc(shown.Done)
		shown.Add(1)
		if !c.background(func() {
			defer show()
			t.reopen(p.state.Tabs[i], show)
		}) {
			show()
		}
	}
	for i, t := range p.tabs {
		if p.state.Tabs[i].Active {
			if err := c.call(ctx, proto.TargetActivateTarget{TargetID: t.target}, nil); err != nil {
				c.log.Warn("the page that was in front", "err", err)
			}
		}
	}
	all := make(chan struct{})
	go func() {
		shown.Wait()
		close(all)
	}()
	select {
	case <-all:
	case <-time.After(openWait):
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return nil
}

// reopen brings a tab to where it was and leaves it; show is called when it
// shows the page.
func (t *tab) reopen(was Tab, show func()) {
	ctx, cancel := context.WithTimeout(context.Background(), loadWait)
	defer cancel()
	defer t.detach(context.WithoutCancel(ctx))
	if err := t.call(ctx, proto.PageEnable{}, nil); err != nil {
		return
	}
	t.drop()
	var nav proto.PageNavigateResult
	if err := t.call(ctx, proto.PageNavigate{URL: was.URL}, &nav); err != nil || nav.LoaderID == "" {
		return // a download, or refused
	}
	if t.next(ctx, &proto.PageFrameNavigated{}) != nil {
		return
	}
	// The empty pages of its storage are nothing to go back to.
	if err := t.call(ctx, proto.PageResetNavigationHistory{}, nil); err != nil {
		t.c.log.Warn("history of a page that was opened again", "err", err)
	}
	show()
	if (was.X == 0 && was.Y == 0) || nav.ErrorText != "" {
		return
	}
	var loaded proto.PageLoadEventFired
	if t.next(ctx, &loaded) != nil {
		return
	}
	scroll := fmt.Sprintf(`(() => { scrollTo({left: %v, top: %v, behavior: "instant"}); return String(Math.abs(scrollX - %v) < 1 && Math.abs(scrollY - %v) < 1) })()`, was.X, was.Y, was.X, was.Y)
	for end := time.Now().Add(scrollWait); time.Now().Before(end); {
		if there, err := t.ask(ctx, scroll); err != nil || there == "true" {
			return
		}
		select {
		case <-time.After(100 * time.Millisecond):
		case <-t.c.gone:
			return
		}
	}
}

// drop forgets what was heard so far.
func (t *tab) drop() {
	for {
		select {
		case <-t.events:
		default:
			return
		}
	}
}
