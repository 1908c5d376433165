package upstream

import (
	"cmp"
	"crypto/rand"
	"encoding/hex"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

const (
	// downAfter failures in a row that may also be the site's (an error answer, no
	// answer in time) put a provider last; one that is surely its own does at once.
	downAfter = 3
	// downFor is how long a provider stays last before one connection tries it again.
	downFor = 30 * time.Second
)

// provider is a platform's proxy. Safe for concurrent use.
type provider struct {
	name               string
	types              []egress.Type
	at                 egress.Target
	tls                bool
	username, password template
	lowercase          bool
	restricted         []Pattern

	mu       sync.Mutex
	failures int       // in a row
	retry    time.Time // while failures >= downAfter: not preferred before
}

// serves says whether p has proxies of a route's type and can be told its place.
func (p *provider) serves(r *proxylink.Route) bool {
	if !slices.Contains(p.types, r.Type) {
		return false
	}
	for field, v := range map[string]string{"country": r.Country, "state": r.State, "city": r.City} {
		if v != "" && !p.username.has(field) && !p.password.has(field) {
			return false
		}
	}
	return true
}

// proxy is p as one connection of a route uses it.
func (p *provider) proxy(r *proxylink.Route) proxy {
	f := fields{country: r.Country, state: r.State, city: r.City, session: r.StickyID}
	if p.lowercase {
		f.country = strings.ToLower(f.country)
	}
	if f.session == "" {
		f.session = freshID()
	}
	return proxy{provider: p, kind: r.Type, at: p.at, tls: p.tls, restricted: p.restricted,
		auth: basic(p.username.expand(f), p.password.expand(f))}
}

// freshID names an address that nothing had before: that of a sticky rule has
// the same form.
func freshID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails since Go 1.24
	return hex.EncodeToString(b[:])
}

// outcome is how a provider did.
type outcome string

const (
	fine       outcome = "ok"
	restricted outcome = "restricted" // it works, but does not serve the site
	doubtful   outcome = "failed"     // the fault may be the site's
	broken     outcome = "broken"     // the fault is the provider's
)

// report notes how a connection through p went.
func (p *provider) report(o outcome, now time.Time) {
	if p == nil {
		return // a custom proxy
	}
	daemon.Counter(`berth_proxyd_provider_connections_total{provider="` + p.name + `",result="` + string(o) + `"}`).Inc()
	p.mu.Lock()
	defer p.mu.Unlock()
	switch o {
	case fine, restricted:
		p.failures = 0
		return
	case broken:
		p.failures = max(p.failures, downAfter)
	case doubtful:
		p.failures++
	}
	if p.failures >= downAfter {
		p.retry = now.Add(downFor)
	}
}

// up says whether p works as far as known.
func (p *provider) up() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.failures < downAfter
}

// preferred says whether p is to be tried in its turn. Of those that ask after
// downFor the first alone hears yes: one connection finds out whether p is back.
func (p *provider) preferred(now time.Time) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failures < downAfter {
		return true
	}
	if now.Before(p.retry) {
		return false
	}
	p.retry = now.Add(downFor)
	return true
}

// choose gives the providers of a route in the order to try them.
func choose(all []*provider, r *proxylink.Route, now time.Time) []*provider {
	var able []*provider
	for _, p := range all {
		if p.serves(r) {
			able = append(able, p)
		}
	}
	if len(able) < 2 {
		return able
	}
	last := make(map[*provider]int, len(able))
	for _, p := range able {
		if !p.preferred(now) {
			last[p] = 1
		}
	}
	slices.SortStableFunc(able, func(a, b *provider) int { return cmp.Compare(last[a], last[b]) })
	return able[:min(len(able), maxAttempts)]
}
