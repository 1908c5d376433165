package cdpclient

import (
	"context"
	"encoding/json"
	"fmt"
)

// Page is one attached page target.
type Page struct {
	client    *Client
	SessionID string
	TargetID  string
}

// FirstPage attaches to the first page of the default context.
func (c *Client) FirstPage(ctx context.Context) (*Page, error) {
	var targets struct {
		TargetInfos []struct{ TargetID, Type string }
	}
	if err := c.Call(ctx, "", "Target.getTargets", nil, &targets); err != nil {
		return nil, err
	}
	for _, t := range targets.TargetInfos {
		if t.Type == "page" {
			return c.Attach(ctx, t.TargetID)
		}
	}
	return nil, fmt.Errorf("cdp: the browser has no page")
}

// Attach attaches to a page by its target id.
func (c *Client) Attach(ctx context.Context, target string) (*Page, error) {
	var attached struct{ SessionID string }
	err := c.Call(ctx, "", "Target.attachToTarget", map[string]any{"targetId": target, "flatten": true}, &attached)
	if err != nil {
		return nil, err
	}
	return &Page{c, attached.SessionID, target}, nil
}

// Call asks the page.
func (p *Page) Call(ctx context.Context, method string, params, result any) error {
	return p.client.Call(ctx, p.SessionID, method, params, result)
}

// Goto navigates and waits for the load event.
func (p *Page) Goto(ctx context.Context, url string) error {
	if err := p.Call(ctx, "Page.enable", nil, nil); err != nil {
		return err
	}
	loaded := p.client.Events(p.SessionID, "Page.loadEventFired")
	var nav struct{ ErrorText string }
	if err := p.Call(ctx, "Page.navigate", map[string]any{"url": url}, &nav); err != nil {
		return err
	}
	if nav.ErrorText != "" {
		return fmt.Errorf("cdp: open %s: %s", url, nav.ErrorText)
	}
	select {
	case <-loaded:
		return nil
	case <-p.client.Done():
		return p.client.Err()
	case <-ctx.Done():
		return fmt.Errorf("cdp: open %s: %w", url, context.Cause(ctx))
	}
}

// Evaluate runs an expression, waits for its promise, and decodes its value
// into result unless that is nil.
func (p *Page) Evaluate(ctx context.Context, expression string, result any) error {
	var out struct {
		Result           struct{ Value json.RawMessage }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	err := p.Call(ctx, "Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &out)
	switch {
	case err != nil:
		return err
	case out.ExceptionDetails != nil:
		return fmt.Errorf("cdp: %s %s", out.ExceptionDetails.Text, out.ExceptionDetails.Exception.Description)
	case result == nil || out.Result.Value == nil:
		return nil
	}
	return json.Unmarshal(out.Result.Value, result)
}

// Screenshot takes a PNG of the viewport.
func (p *Page) Screenshot(ctx context.Context) ([]byte, error) {
	var shot struct{ Data []byte } // base64 in JSON
	err := p.Call(ctx, "Page.captureScreenshot", map[string]any{"format": "png"}, &shot)
	return shot.Data, err
}

// Click presses and releases the left button in the middle of the first
// element that matches a CSS selector, as a mouse would.
func (p *Page) Click(ctx context.Context, selector string) error {
	quoted, err := json.Marshal(selector)
	if err != nil {
		return err
	}
	var at struct{ X, Y float64 }
	err = p.Evaluate(ctx, `(()=>{const e=document.querySelector(`+string(quoted)+`);e.scrollIntoView({block:"center"});`+
		`const r=e.getBoundingClientRect();return{X:r.x+r.width/2,Y:r.y+r.height/2}})()`, &at)
	if err != nil {
		return err
	}
	for _, kind := range []string{"mouseMoved", "mousePressed", "mouseReleased"} {
		err := p.Call(ctx, "Input.dispatchMouseEvent", map[string]any{"type": kind, "x": at.X, "y": at.Y, "button": "left", "clickCount": 1}, nil)
		if err != nil {
			return err
		}
	}
	return nil
}
