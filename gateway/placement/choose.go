package placement

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// Host is what gossip says of a host: a hint, perhaps seconds old.
type Host struct {
	Name   string
	Region string
	Driver string               // how it isolates machines, for people
	Free   int                  // slots left
	Warm   map[session.Kind]int // machines that wait
	// CPUClass says which memory captures fit; empty where captures keep none.
	CPUClass string
	Addr     string // of its host link, for the other hosts
}

// capacityRetry is how soon a host may have room again.
const capacityRetry = 2 * time.Second

// Choose orders the hosts that may take a session of a kind, best first: in the
// region asked for, then those with more warm machines of the kind, then with
// more free slots. Without strict, hosts of other regions follow; an empty
// region means any. Errors: invalid_request for a region that has no host at
// all while others have, no_capacity when no host has room.
func Choose(hosts []Host, kind session.Kind, region string, strict bool) ([]Host, error) {
	inRegion := func(h Host) bool { return region == "" || h.Region == region }
	if len(hosts) > 0 && !slices.ContainsFunc(hosts, inRegion) {
		return nil, apierr.New(apierr.InvalidRequest, "region: there is no region %q: choose one of %s", region, regions(hosts))
	}
	var fit []Host
	for _, h := range hosts {
		if h.Free > 0 && (inRegion(h) || !strict) {
			fit = append(fit, h)
		}
	}
	if len(fit) == 0 {
		return nil, apierr.New(apierr.NoCapacity, "no host has room for another session now: try again shortly").After(capacityRetry)
	}
	slices.SortFunc(fit, func(a, b Host) int {
		return cmp.Or(preferred(inRegion(a), inRegion(b)), roomier(a, b, kind))
	})
	return fit, nil
}

// regions lists the regions of hosts, for people.
func regions(hosts []Host) string {
	var names []string
	for _, h := range hosts {
		names = append(names, h.Region)
	}
	slices.Sort(names)
	return strings.Join(slices.Compact(names), ", ")
}
