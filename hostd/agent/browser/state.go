package browser

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/session"
	"github.com/go-rod/rod/lib/proto"
)

// State is what a portable capture takes of Chrome beside StorageFolders: the
// default context. Pages of contexts that clients made go with their clients.
type State struct {
	Viewport session.Viewport `json:"viewport"`
	Tabs     []Tab            `json:"tabs"` // in the order of their opening
	Cookies  []Cookie         `json:"cookies"`
	// Local is the localStorage of origins with an open page: what is on the
	// disk may be a minute old for them, while for others it is complete.
	Local map[string]Items `json:"local,omitempty"`
}

// Tab is one page.
type Tab struct {
	URL     string  `json:"url"`
	Window  int     `json:"window"` // tabs of equal numbers share a window
	Active  bool    `json:"active,omitempty"`
	X       float64 `json:"x,omitempty"` // scrolled by, CSS pixels
	Y       float64 `json:"y,omitempty"`
	Origin  string  `json:"origin,omitempty"`  // whose sessionStorage it is
	Session Items   `json:"session,omitempty"` // sessionStorage
}

// Items are a storage's, JSON as the page wrote it: [[key, value], ...]. It
// stays as it is: strings of JavaScript need not be Unicode.
type Items = json.RawMessage

// Cookie is CDP's Network.Cookie; rod's lacks the partition key's present form.
type Cookie struct {
	Name         string          `json:"name"`
	Value        string          `json:"value"`
	Domain       string          `json:"domain"`
	Path         string          `json:"path"`
	Expires      float64         `json:"expires"` // seconds since 1970, -1: with the browser
	HTTPOnly     bool            `json:"httpOnly,omitempty"`
	Secure       bool            `json:"secure,omitempty"`
	Session      bool            `json:"session,omitempty"`
	SameSite     string          `json:"sameSite,omitempty"`
	Priority     string          `json:"priority,omitempty"`
	SourceScheme string          `json:"sourceScheme,omitempty"`
	SourcePort   *int            `json:"sourcePort,omitempty"`
	PartitionKey json.RawMessage `json:"partitionKey,omitempty"`
}

// askWait is how long a page may take to tell its state. One that is busy or
// shows a dialog keeps its URL only.
const askWait = 3 * time.Second

// picture is what a page tells of itself.
const picture = `(() => {
	const list = (s) => { try { return Object.keys(s()).map((k) => [k, s().getItem(k)]) } catch { return undefined } };
	const http = /^https?:$/.test(location.protocol);
	return JSON.stringify({
		x: scrollX, y: scrollY, visible: document.visibilityState === "visible", focus: document.hasFocus(),
		origin: http ? location.origin : "", local: http ? list(() => localStorage) : undefined, session: http ? list(() => sessionStorage) : undefined,
	});
})()`

type pictured struct {
	X, Y           float64
	Visible, Focus bool
	Origin         string
	Local, Session Items
}

// State takes the state of the running Chrome.
func (b *Browser) State(ctx context.Context) (State, error) {
	if err := b.Page(ctx); err != nil {
		return State{}, fmt.Errorf("state: %w", err)
	}
	c, err := b.wait(ctx)
	if err != nil {
		return State{}, fmt.Errorf("state: %w", err)
	}
	s := State{Viewport: b.wanted(), Local: map[string]Items{}}
	ids := c.pages.ofDefault()
	seen := make([]pictured, len(ids))
	s.Tabs = make([]Tab, len(ids))
	var wg sync.WaitGroup
	for i, id := range ids {
		wg.Go(func() { s.Tabs[i], seen[i] = c.take(ctx, id) })
	}
	wg.Wait()
	for i, p := range seen {
		if len(p.Local) > 0 && s.Local[p.Origin] == nil {
			s.Local[p.Origin] = p.Local
		}
		s.Tabs[i].Active = i == active(seen)
	}
	s.Tabs = slices.DeleteFunc(s.Tabs, func(t Tab) bool { return t.URL == "" }) // closed meanwhile
	var got struct{ Cookies []Cookie }
	if err := c.call(ctx, proto.StorageGetCookies{}, &got); err != nil {
		return State{}, fmt.Errorf("state: %w", err)
	}
	s.Cookies = got.Cookies
	return s, nil
}

// active picks the page that is in front: each window shows one.
func active(seen []pictured) int {
	best, rank := len(seen)-1, 0
	for i, p := range seen {
		mine := 0
		if p.Visible {
			mine = 1
			if p.Focus {
				mine = 2
			}
		}
		if mine > rank {
			best, rank = i, mine
		}
	}
	return best
}

// take asks one page; an empty URL says that there is none.
func (c *chrome) take(ctx context.Context, id proto.TargetTargetID) (t Tab, p pictured) {
	ctx, cancel := context.WithTimeout(ctx, askWait)
	defer cancel()
	var info proto.TargetGetTargetInfoResult
	if c.call(ctx, proto.TargetGetTargetInfo{TargetID: id}, &info) != nil || info.TargetInfo == nil {
		return t, p
	}
	t.URL = info.TargetInfo.URL
	var w window
	if c.call(ctx, proto.BrowserGetWindowForTarget{TargetID: id}, &w) == nil {
		t.Window = w.WindowID
	}
	tab, err := c.attachTab(ctx, id)
	if err != nil {
		return t, p
	}
	defer tab.detach(context.WithoutCancel(ctx))
	text, err := tab.ask(ctx, picture)
	if err != nil || json.Unmarshal([]byte(text), &p) != nil {
		c.log.Warn("a page does not tell its state", "err", err)
		return t, pictured{}
	}
	t.X, t.Y, t.Origin, t.Session = p.X, p.Y, p.Origin, p.Session
	return t, p
}
