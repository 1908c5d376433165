package browser

import (
	"context"
	"slices"
	"sync"

	"github.com/go-rod/rod/lib/proto"
)

// discoverPages is Target.setDiscoverTargets with the filter that rod's
// generated type lacks.
type discoverPages struct {
	Discover bool           `json:"discover"`
	Filter   []targetFilter `json:"filter"`
}

func (discoverPages) ProtoReq() string { return "Target.setDiscoverTargets" }

type targetFilter struct {
	Type    string `json:"type,omitempty"`
	Exclude bool   `json:"exclude,omitempty"`
}

// onlyPages: the first entry that matches decides (CDP Target.TargetFilter).
var onlyPages = []targetFilter{{Type: "page"}, {Exclude: true}}

// pages knows the pages of every browser context. Safe for concurrent use.
type pages struct {
	mu       sync.Mutex // guards all but first
	contexts map[proto.TargetTargetID]proto.BrowserBrowserContextID
	open     map[proto.BrowserBrowserContextID]int // pages of each context
	order    []proto.TargetTargetID                // of their opening
	// root is the default context: the one of the page Chrome opened itself.
	root  proto.BrowserBrowserContextID
	first chan proto.TargetTargetID
}

func newPages() *pages {
	return &pages{
		contexts: map[proto.TargetTargetID]proto.BrowserBrowserContextID{},
		open:     map[proto.BrowserBrowserContextID]int{},
		first:    make(chan proto.TargetTargetID, 1),
	}
}

func (p *pages) add(t *proto.TargetTargetInfo) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.contexts[t.TargetID]; known {
		return
	}
	if p.root == "" {
		p.root = t.BrowserContextID
		p.first <- t.TargetID // holds one, sent once
	}
	p.contexts[t.TargetID] = t.BrowserContextID
	p.order = append(p.order, t.TargetID)
	p.open[t.BrowserContextID]++
}

// remove says whether the default context has just lost its last page.
func (p *pages) remove(id proto.TargetTargetID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	context, known := p.contexts[id]
	if !known {
		return false
	}
	delete(p.contexts, id)
	p.order = slices.DeleteFunc(p.order, func(o proto.TargetTargetID) bool { return o == id })
	p.open[context]--
	if p.open[context] > 0 {
		return false
	}
	delete(p.open, context)
	return context == p.root
}

func (p *pages) has(id proto.TargetTargetID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, known := p.contexts[id]
	return known
}

func (p *pages) ids() []proto.TargetTargetID {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.order)
}

// ofDefault are the pages of the default context, in the order of their opening.
func (p *pages) ofDefault() (list []proto.TargetTargetID) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, id := range p.order {
		if p.contexts[id] == p.root {
			list = append(list, id)
		}
	}
	return list
}

// openPage opens an empty page in the default context, which clients such as
// Playwright expect never to be without one.
func (c *chrome) openPage(ctx context.Context) {
	if err := c.call(ctx, proto.TargetCreateTarget{URL: "about:blank"}, nil); err != nil && ctx.Err() == nil {
		c.log.Warn("no new page after the last one closed", "err", err)
	}
}
