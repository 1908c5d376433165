// Package pass opens the passes that connections bring, and keeps what that
// costs to make: a pass is read and its rules are compiled once, however many
// connections come with it.
//
// A pass says all that there is to know of a session, so a Book forgets without
// harm. It remembers, as a hint, the newest pass it saw of a session: one that a
// change replaced is refused, although its time is not over.
package pass

import (
	"bytes"
	"errors"
	"sync"
	"time"

	"github.com/berth-dev/berth/proxyd/recent"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

const (
	maxPasses   = 4096  // kept open, one a session; one takes some 10 KiB, at most about 2 MiB with ten of the largest rules
	maxSessions = 65536 // of which the newest pass is remembered; one takes about 150 bytes
)

// Pass is an opened pass. Safe for concurrent use; nobody changes it.
type Pass struct {
	proxylink.Pass
	sealed  []byte
	matcher *egress.Matcher // nil: its rules cannot be followed
}

// Route gives the route for a host, nil for straight out. A rule that cannot
// be followed is a refusal with bad_route.
func (p *Pass) Route(host string) (*proxylink.Route, *egress.Refusal) {
	if p.matcher == nil {
		return nil, egress.Refuse(egress.BadRoute, "the session's rules cannot be read")
	}
	i, ok := p.matcher.Match(host)
	if !ok || p.Routes[i].Type == egress.None {
		return nil, nil
	}
	return &p.Routes[i], nil
}

// version orders the passes of a session.
type version struct{ epoch, settings uint64 }

func (v version) olderThan(w version) bool {
	return v.epoch < w.epoch || v.epoch == w.epoch && v.settings < w.settings
}

func (p *Pass) version() version { return version{p.Epoch, p.Version} }

// Book opens passes. Safe for concurrent use.
type Book struct {
	secret *trust.Secret

	mu     sync.Mutex
	open   *recent.Map[string, *Pass]   // by session: one that another replaced is of no more use
	newest *recent.Map[string, version] // by session
}

// NewBook makes a book of passes that secret seals.
func NewBook(secret *trust.Secret) *Book {
	return &Book{secret: secret, open: recent.New[string, *Pass](maxPasses), newest: recent.New[string, version](maxSessions)}
}

// Open gives the pass of a session; a refusal has token_invalid. newer says
// that the session had an older one here.
func (b *Book) Open(now time.Time, sessionID string, sealed []byte) (p *Pass, newer bool, refused *egress.Refusal) {
	p, known := b.known(now, sessionID, sealed)
	if !known {
		opened, err := proxylink.OpenPass(b.secret, now, sessionID, sealed)
		switch {
		case errors.Is(err, proxylink.ErrPassExpired):
			return nil, false, invalid(err, "the session's pass for the proxy has expired")
		case err != nil:
			return nil, false, invalid(err, "this is no pass of the session for the proxy")
		}
		p = compile(opened, bytes.Clone(sealed))
	}
	return b.admit(p, known)
}

// Known says whether Open has that pass open, so that it takes no time.
func (b *Book) Known(now time.Time, sessionID string, sealed []byte) bool {
	_, known := b.known(now, sessionID, sealed)
	return known
}

func (b *Book) known(now time.Time, sessionID string, sealed []byte) (*Pass, bool) {
	b.mu.Lock()
	p, known := b.open.Get(sessionID)
	b.mu.Unlock()
	// What opened for a session before is good for it now, unless its time is over.
	return p, known && now.Before(p.Expires) && bytes.Equal(p.sealed, sealed)
}

// admit checks that p is not one that another replaced, and keeps it.
func (b *Book) admit(p *Pass, known bool) (*Pass, bool, *egress.Refusal) {
	b.mu.Lock()
	defer b.mu.Unlock()
	last, seen := b.newest.Get(p.SessionID)
	if seen && p.version().olderThan(last) {
		return nil, false, invalid(nil, "the session's pass for the proxy was replaced: new connections use the current proxy")
	}
	newer := seen && last.olderThan(p.version())
	if !seen || newer {
		b.newest.Put(p.SessionID, p.version())
	}
	if !known {
		b.open.Put(p.SessionID, p)
	}
	return p, newer, nil
}

// Replaced says whether a newer pass of p's session was seen.
func (b *Book) Replaced(p *Pass) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	last, seen := b.newest.Get(p.SessionID)
	return seen && p.version().olderThan(last)
}

func invalid(cause error, detail string) *egress.Refusal {
	r := egress.Refuse(egress.TokenInvalid, "%s", detail)
	r.Cause = cause
	return r
}

func compile(p proxylink.Pass, sealed []byte) *Pass {
	rules := make([]egress.Rule, len(p.Routes))
	for i, r := range p.Routes {
		rules[i] = r.Rule
	}
	out := &Pass{Pass: p, sealed: sealed}
	if m, err := egress.NewMatcher(rules); err == nil { // else a gateway of another version made it
		out.matcher = m
	}
	return out
}
