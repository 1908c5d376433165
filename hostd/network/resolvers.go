package network

import (
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"
)

const (
	resolvConf     = "/etc/resolv.conf"
	resolvRecheck  = 5 * time.Second
	maxResolvers   = 3 // as many as resolv.conf(5) reads
	defaultDNSPort = 53
)

// resolvers gives the host's DNS servers, read again when the file changed.
type resolvers struct {
	path  string // empty: fixed
	mu    sync.Mutex
	known []netip.AddrPort
	check time.Time // when to look at the file again
	stamp time.Time // its modification time when read
}

func newResolvers(fixed []netip.AddrPort) *resolvers {
	if len(fixed) > 0 {
		return &resolvers{known: fixed}
	}
	return &resolvers{path: resolvConf}
}

func (r *resolvers) list() []netip.AddrPort {
	r.mu.Lock()
	defer r.mu.Unlock()
	now := time.Now()
	if r.path == "" || now.Before(r.check) {
		return r.known
	}
	r.check = now.Add(resolvRecheck)
	info, err := os.Stat(r.path)
	if err != nil || info.ModTime().Equal(r.stamp) {
		return r.known
	}
	if b, err := os.ReadFile(r.path); err == nil {
		r.known, r.stamp = parseResolvConf(string(b)), info.ModTime()
	}
	return r.known
}

// parseResolvConf reads the nameserver lines (resolv.conf(5)); without one the
// local host answers, as the man page says.
func parseResolvConf(text string) []netip.AddrPort {
	var out []netip.AddrPort
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 2 || f[0] != "nameserver" || len(out) == maxResolvers {
			continue
		}
		if addr, err := netip.ParseAddr(f[1]); err == nil {
			out = append(out, netip.AddrPortFrom(addr, defaultDNSPort))
		}
	}
	if len(out) == 0 {
		out = append(out, netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), defaultDNSPort))
	}
	return out
}
