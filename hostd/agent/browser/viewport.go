package browser

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/berth-dev/berth/shared/session"
	"github.com/go-rod/rod/lib/proto"
)

// A viewport is made by sizing windows, not by CDP's device metrics override:
// that one belongs to the client session that set it and dies with it.

// settle waits for the page Chrome opens by itself, learns how much higher
// this Chrome's window is than its page, and mends the size if that differs
// from what the start assumed.
func (c *chrome) settle(ctx context.Context) error {
	var first proto.TargetTargetID
	select {
	case first = <-c.pages.first:
	case <-c.gone:
		return fmt.Errorf("settle: %w", c.cause())
	case <-ctx.Done():
		return fmt.Errorf("settle: no page: %w", context.Cause(ctx))
	}
	inner, err := c.pageArea(ctx, first)
	if err != nil {
		return fmt.Errorf("settle: %w", err)
	}
	c.frame.Store(int32(frameHeight + c.launched.Height - inner.Height))
	if want := c.wanted(); inner != want {
		c.log.Info("chrome's window is mended", "page", inner, "wanted", want)
		return c.size(ctx, first, want, nil)
	}
	return nil
}

// pageArea measures a page, over a session that ends with the call.
func (c *chrome) pageArea(ctx context.Context, id proto.TargetTargetID) (session.Viewport, error) {
	var attached proto.TargetAttachToTargetResult
	if err := c.call(ctx, proto.TargetAttachToTarget{TargetID: id, Flatten: true}, &attached); err != nil {
		return session.Viewport{}, fmt.Errorf("page area: %w", err)
	}
	defer func() {
		_ = c.call(ctx, proto.TargetDetachFromTarget{SessionID: attached.SessionID}, nil)
	}()
	var answer struct {
		Result struct{ Value string }
	}
	ask := proto.RuntimeEvaluate{Expression: `JSON.stringify({width: innerWidth, height: innerHeight})`}
	if err := c.callOn(ctx, string(attached.SessionID), ask, &answer); err != nil {
		return session.Viewport{}, fmt.Errorf("page area: %w", err)
	}
	var v session.Viewport
	if err := json.Unmarshal([]byte(answer.Result.Value), &v); err != nil {
		return session.Viewport{}, fmt.Errorf("page area: %w", err)
	}
	return v, nil
}

// sizeNew gives the window of a new page the wanted size if it has the size
// every new window of this Chrome is born with (--window-size, which also wins
// over what window.open asks for). One sized by a client since keeps its size.
func (c *chrome) sizeNew(ctx context.Context, id proto.TargetTargetID) {
	v := c.wanted()
	if v == c.launched {
		return // windows are born right
	}
	born := func(w window) bool {
		return w.Bounds.Width == c.launched.Width && w.Bounds.Height == c.launched.Height+frameHeight
	}
	if err := c.size(ctx, id, v, born); err != nil && ctx.Err() == nil {
		c.log.Debug("size of a new window", "err", err) // it may be closed already
	}
}

// resizeAll sizes the windows of all open pages, each window once.
func (c *chrome) resizeAll(ctx context.Context, v session.Viewport) error {
	done := map[int]bool{}
	notYet := func(w window) bool {
		seen := done[w.WindowID]
		done[w.WindowID] = true
		return !seen
	}
	for _, id := range c.pages.ids() {
		if err := c.size(ctx, id, v, notYet); err != nil && c.pages.has(id) {
			return err
		}
	}
	return nil
}

// window answers Browser.getWindowForTarget. Bounds are CSS pixels, frame included.
type window struct {
	WindowID int `json:"windowId"`
	Bounds   struct {
		Width  int `json:"width"`
		Height int `json:"height"`
	} `json:"bounds"`
}

// size makes the page area of the window that shows a page v, if the filter
// (nil: always) accepts the window.
func (c *chrome) size(ctx context.Context, id proto.TargetTargetID, v session.Viewport, filter func(window) bool) error {
	var w window
	if err := c.call(ctx, proto.BrowserGetWindowForTarget{TargetID: id}, &w); err != nil {
		return err
	}
	if filter != nil && !filter(w) {
		return nil
	}
	height := v.Height + int(c.frame.Load())
	if w.Bounds.Width == v.Width && w.Bounds.Height == height {
		return nil
	}
	return c.call(ctx, proto.BrowserSetWindowBounds{
		WindowID: proto.BrowserWindowID(w.WindowID),
		Bounds:   &proto.BrowserBounds{Width: &v.Width, Height: &height},
	}, nil)
}
