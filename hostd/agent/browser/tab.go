package browser

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/go-rod/rod/lib/cdp"
	"github.com/go-rod/rod/lib/proto"
)

// tab is a session of our own on one page, for a short while.
type tab struct {
	c       *chrome
	target  proto.TargetTargetID
	session proto.TargetSessionID
	events  chan *cdp.Event
}

// tabs hands the events of sessions to those who wait for them.
type tabs struct {
	mu   sync.Mutex
	open map[proto.TargetSessionID]*tab // guarded by mu
}

// hear must not wait (see follow): who is far behind loses events, and then a
// wait ends by its deadline.
func (t *tabs) hear(e *cdp.Event) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if tab := t.open[proto.TargetSessionID(e.SessionID)]; tab != nil {
		select {
		case tab.events <- e:
		default:
		}
	}
}

func (c *chrome) attachTab(ctx context.Context, target proto.TargetTargetID) (*tab, error) {
	var attached proto.TargetAttachToTargetResult
	if err := c.call(ctx, proto.TargetAttachToTarget{TargetID: target, Flatten: true}, &attached); err != nil {
		return nil, err
	}
	t := &tab{c: c, target: target, session: attached.SessionID, events: make(chan *cdp.Event, 1024)}
	c.tabs.mu.Lock()
	defer c.tabs.mu.Unlock()
	if c.tabs.open == nil {
		c.tabs.open = map[proto.TargetSessionID]*tab{}
	}
	c.tabs.open[t.session] = t
	return t, nil
}

func (t *tab) detach(ctx context.Context) {
	t.c.tabs.mu.Lock()
	delete(t.c.tabs.open, t.session)
	t.c.tabs.mu.Unlock()
	_ = t.c.call(ctx, proto.TargetDetachFromTarget{SessionID: t.session}, nil) // fails when the page is gone
}

func (t *tab) call(ctx context.Context, req request, out any) error {
	return t.c.callOn(ctx, string(t.session), req, out)
}

// next waits for an event and decodes it into e, past all others.
func (t *tab) next(ctx context.Context, e proto.Event) error {
	for {
		select {
		case got := <-t.events:
			if got.Method == e.ProtoEvent() {
				return json.Unmarshal(got.Params, e)
			}
		case <-t.c.gone:
			return t.c.cause()
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", e.ProtoEvent(), context.Cause(ctx))
		}
	}
}

// ask evaluates an expression that gives a string, in a world of its own,
// where nothing that the page redefined is met.
func (t *tab) ask(ctx context.Context, expression string) (string, error) {
	var tree proto.PageGetFrameTreeResult
	if err := t.call(ctx, proto.PageGetFrameTree{}, &tree); err != nil {
		return "", err
	}
	var world proto.PageCreateIsolatedWorldResult
	if err := t.call(ctx, proto.PageCreateIsolatedWorld{FrameID: tree.FrameTree.Frame.ID}, &world); err != nil {
		return "", err
	}
	return t.evaluate(ctx, proto.RuntimeEvaluate{Expression: expression, ContextID: world.ExecutionContextID})
}

func (t *tab) evaluate(ctx context.Context, req proto.RuntimeEvaluate) (string, error) {
	var answer struct {
		Result           struct{ Value string }
		ExceptionDetails *struct{ Text string }
	}
	if err := t.call(ctx, req, &answer); err != nil {
		return "", err
	}
	if answer.ExceptionDetails != nil {
		return "", errors.New("the page threw " + answer.ExceptionDetails.Text)
	}
	return answer.Result.Value, nil
}
