package browser

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/url"
	"slices"
	"strings"

	"github.com/go-rod/rod/lib/proto"
)

// Bounds of what a state may hold: it comes from outside the machine.
const (
	maxTabs    = 1000
	maxCookies = 20_000
	maxURL     = 2 << 20 // Chrome's own bound
)

// Check refuses what no Chrome of ours would have given.
func (s *State) Check() error {
	if v := s.Viewport; v.Width < 1 || v.Height < 1 || v.Width > 1<<14 || v.Height > 1<<14 {
		return fmt.Errorf("browser state: a viewport of %dx%d", v.Width, v.Height)
	}
	if len(s.Tabs) > maxTabs || len(s.Cookies) > maxCookies {
		return fmt.Errorf("browser state: %d tabs, %d cookies", len(s.Tabs), len(s.Cookies))
	}
	for i := range s.Tabs {
		t := &s.Tabs[i]
		if !restorable(t.URL) {
			t.URL = "about:blank"
		}
		if t.Origin != "" && !httpOrigin(t.Origin) {
			return fmt.Errorf("browser state: origin %.100q", t.Origin)
		}
	}
	for origin := range s.Local {
		if !httpOrigin(origin) {
			return fmt.Errorf("browser state: origin %.100q", origin)
		}
	}
	return nil
}

func restorable(text string) bool {
	u, err := url.Parse(text)
	if err != nil || len(text) > maxURL {
		return false
	}
	return text == "about:blank" || slices.Contains([]string{"http", "https", "data", "file", "chrome"}, u.Scheme)
}

func httpOrigin(text string) bool {
	u, err := url.Parse(text)
	return err == nil && (u.Scheme == "http" || u.Scheme == "https") && u.Host != "" && u.User == nil && text == u.Scheme+"://"+u.Host
}

// prepared is a state whose tabs wait in a Chrome to be opened.
type prepared struct {
	state State
	in    *chrome
	tabs  []*tab
}

// Prepare puts a state, checked, into a Chrome that shows nothing but its first
// page, without a byte to the network: the pages are opened by Open.
func (b *Browser) Prepare(ctx context.Context, s State) error {
	if err := b.SetViewport(ctx, s.Viewport); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	c, err := b.wait(ctx)
	if err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	if err := c.setCookies(ctx, s.Cookies); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	p := &prepared{state: s, in: c}
	if err := c.prepareTabs(ctx, p); err != nil {
		return fmt.Errorf("prepare: %w", err)
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	b.prepared = p
	return nil
}

func (c *chrome) prepareTabs(ctx context.Context, p *prepared) error {
	first := c.pages.ofDefault()
	if len(first) != 1 {
		return fmt.Errorf("chrome has %d pages", len(first))
	}
	id, windows := first[0], map[int]bool{}
	for i, t := range p.state.Tabs {
		if i > 0 {
			var made proto.TargetCreateTargetResult
			if err := c.call(ctx, proto.TargetCreateTarget{URL: "about:blank", NewWindow: !windows[t.Window]}, &made); err != nil {
				return err
			}
			id = made.TargetID
		}
		windows[t.Window] = true
		tab, err := c.attachTab(ctx, id)
		if err != nil {
			return err
		}
		p.tabs = append(p.tabs, tab)
	}
	if len(p.tabs) == 0 {
		return nil
	}
	for origin, items := range p.state.Local {
		if err := p.tabs[0].store(ctx, origin, "localStorage", items); err != nil {
			return err
		}
	}
	for i, t := range p.state.Tabs {
		if t.Origin != "" && len(t.Session) > 0 {
			if err := p.tabs[i].store(ctx, t.Origin, "sessionStorage", t.Session); err != nil {
				return err
			}
		}
	}
	return nil
}

// store fills a storage of an origin in this tab, at an empty page that stands
// for the origin's own.
func (t *tab) store(ctx context.Context, origin, storage string, items Items) error {
	if err := t.visitEmpty(ctx, origin+"/"); err != nil {
		return fmt.Errorf("storage of %s: %w", origin, err)
	}
	text, err := json.Marshal(string(items))
	if err != nil {
		return err
	}
	script := fmt.Sprintf(`(() => { const s = %s, list = JSON.parse(%s); s.clear(); for (const [k, v] of list) s.setItem(k, v); return "" })()`, storage, text)
	if _, err := t.evaluate(ctx, proto.RuntimeEvaluate{Expression: script}); err != nil {
		return fmt.Errorf("storage of %s: %w", origin, err)
	}
	return nil
}

// visitEmpty shows an empty page under a URL; all requests are answered here.
func (t *tab) visitEmpty(ctx context.Context, at string) error {
	ctx, cancel := context.WithTimeout(ctx, loadWait)
	defer cancel()
	all := proto.FetchEnable{Patterns: []*proto.FetchRequestPattern{{URLPattern: "*"}}}
	if err := t.call(ctx, all, nil); err != nil {
		return err
	}
	answering, stop := context.WithCancel(ctx)
	answered := make(chan error, 1)
	go func() { answered <- t.answer(answering, at) }()
	var done proto.PageNavigateResult
	err := t.call(ctx, proto.PageNavigate{URL: at}, &done)
	stop()
	<-answered
	if err == nil && done.ErrorText != "" {
		err = errors.New(done.ErrorText)
	}
	return errors.Join(err, t.call(ctx, proto.FetchDisable{}, nil))
}

const emptyPage = `<!doctype html><link rel="icon" href="data:,">`

func (t *tab) answer(ctx context.Context, at string) error {
	for {
		var paused proto.FetchRequestPaused
		if err := t.next(ctx, &paused); err != nil {
			return err
		}
		var reply request = proto.FetchFailRequest{RequestID: paused.RequestID, ErrorReason: proto.NetworkErrorReasonBlockedByClient}
		if paused.Request.URL == at {
			reply = proto.FetchFulfillRequest{
				RequestID: paused.RequestID, ResponseCode: 200, Body: []byte(emptyPage),
				ResponseHeaders: []*proto.FetchHeaderEntry{{Name: "Content-Type", Value: "text/html"}},
			}
		}
		if err := t.call(ctx, reply, nil); err != nil {
			return err
		}
	}
}

// cookieParam is CDP's Network.CookieParam.
type cookieParam struct {
	Name         string          `json:"name"`
	Value        string          `json:"value"`
	URL          string          `json:"url,omitempty"`
	Domain       string          `json:"domain,omitempty"`
	Path         string          `json:"path,omitempty"`
	Expires      *float64        `json:"expires,omitempty"`
	HTTPOnly     bool            `json:"httpOnly,omitempty"`
	Secure       bool            `json:"secure,omitempty"`
	SameSite     string          `json:"sameSite,omitempty"`
	Priority     string          `json:"priority,omitempty"`
	SourceScheme string          `json:"sourceScheme,omitempty"`
	SourcePort   *int            `json:"sourcePort,omitempty"`
	PartitionKey json.RawMessage `json:"partitionKey,omitempty"`
}

type setCookies struct {
	Cookies []cookieParam `json:"cookies"`
}

func (setCookies) ProtoReq() string { return "Storage.setCookies" }

func (k *Cookie) param() cookieParam {
	p := cookieParam{
		Name: k.Name, Value: k.Value, Path: k.Path, HTTPOnly: k.HTTPOnly, Secure: k.Secure, SameSite: k.SameSite,
		Priority: k.Priority, SourceScheme: k.SourceScheme, SourcePort: k.SourcePort, PartitionKey: k.PartitionKey,
	}
	if !k.Session && k.Expires >= 0 {
		p.Expires = &k.Expires
	}
	if strings.HasPrefix(k.Domain, ".") {
		p.Domain = k.Domain
		return p
	}
	// With a domain the cookie would be for the hosts below too.
	scheme, host := "http", k.Domain
	if k.Secure {
		scheme = "https"
	}
	if ip := net.ParseIP(host); ip != nil && ip.To4() == nil {
		host = "[" + host + "]"
	}
	p.URL = scheme + "://" + host + "/"
	return p
}

// setCookies sets them all at once, or, when Chrome refuses one, each alone:
// it may have expired on the way.
func (c *chrome) setCookies(ctx context.Context, cookies []Cookie) error {
	if len(cookies) == 0 {
		return nil
	}
	var all setCookies
	for i := range cookies {
		all.Cookies = append(all.Cookies, cookies[i].param())
	}
	if c.call(ctx, all, nil) == nil {
		return nil
	}
	refused := 0
	for _, one := range all.Cookies {
		if err := c.call(ctx, setCookies{[]cookieParam{one}}, nil); err != nil {
			refused++
		}
		if c.dead() || ctx.Err() != nil {
			return fmt.Errorf("cookies: %w", errors.Join(c.cause(), context.Cause(ctx)))
		}
	}
	c.log.Warn("chrome refused cookies", "refused", refused, "of", len(all.Cookies))
	return nil
}
