package placement

import (
	"cmp"
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// KeepsMemory says whether captures on the host keep memory.
func (h Host) KeepsMemory() bool { return h.CPUClass != "" }

// FitsMemory says whether a memory capture of one host runs on the other.
func (h Host) FitsMemory(other Host) bool {
	return h.KeepsMemory() && h.Driver == other.Driver && h.CPUClass == other.CPUClass
}

// fits says whether the host can restore a snapshot.
func (h Host) fits(snap session.Snapshot) bool {
	return !snap.Memory || h.FitsMemory(Host{Driver: snap.Driver, CPUClass: snap.CPUClass})
}

// MoveTargets orders the hosts that may take a running session over from the
// host that has it, best first. A host or region that is asked for binds, both
// errors of a wish name its field; without either the session stays in its
// region, and in memory if it can: the best other host, else a fresh machine on
// the same one. no_capacity when there is room nowhere.
func MoveTargets(hosts []Host, s session.Session, host, region string) ([]Host, error) {
	if err := checkWish(hosts, host, region); err != nil {
		return nil, err
	}
	if host == "" && region == "" {
		region = s.Region
	}
	var from Host
	if i := named(hosts, s.Host); i >= 0 {
		from = hosts[i]
	}
	var fit []Host
	for _, h := range hosts {
		if h.Free > 0 && (host == "" || h.Name == host) && (region == "" || h.Region == region) {
			fit = append(fit, h)
		}
	}
	if len(fit) == 0 {
		return nil, apierr.New(apierr.NoCapacity, "no host that was asked for has room for the session now: try again shortly").After(capacityRetry)
	}
	slices.SortFunc(fit, func(a, b Host) int {
		return cmp.Or(
			preferred(a.Name != s.Host, b.Name != s.Host),
			preferred(a.FitsMemory(from), b.FitsMemory(from)),
			roomier(a, b, s.Kind))
	})
	return fit, nil
}

func checkWish(hosts []Host, host, region string) error {
	if i := named(hosts, host); host != "" && i < 0 {
		return apierr.New(apierr.InvalidRequest, "host: there is no host %q now: choose one of %s", host, names(hosts))
	} else if host != "" && region != "" && hosts[i].Region != region {
		return apierr.New(apierr.InvalidRequest, "region: host %q is in %s: leave one of the two out", host, hosts[i].Region)
	}
	if region != "" && !slices.ContainsFunc(hosts, func(h Host) bool { return h.Region == region }) {
		return apierr.New(apierr.InvalidRequest, "region: there is no region %q: choose one of %s", region, regions(hosts))
	}
	return nil
}

// ResumeTargets orders the hosts that may resume a paused session, best first:
// the one that holds its snapshot, then those of its region. Away from the
// holder the snapshot has to come from it, or from the blob store. A session
// created with strictRegion stays in its region. unavailable:
// it can come from neither now; no_capacity: no host that fits has room.
func ResumeTargets(hosts []Host, s session.Session) ([]Host, error) {
	snap := *s.Snapshot
	if named(hosts, snap.Host) < 0 && !snap.Durable {
		return nil, apierr.New(apierr.Unavailable, "host %q, which keeps the session's snapshot, is away: the session stays paused and can be resumed when the host is back", snap.Host).After(awayRetry)
	}
	var fit []Host
	for _, h := range hosts {
		if h.Free > 0 && h.fits(snap) && (!s.StrictRegion || h.Region == s.Region) {
			fit = append(fit, h)
		}
	}
	if len(fit) == 0 {
		return nil, apierr.New(apierr.NoCapacity, "no host that fits the session's snapshot has room now: try again shortly").After(capacityRetry)
	}
	slices.SortFunc(fit, func(a, b Host) int {
		return cmp.Or(
			preferred(a.Name == snap.Host, b.Name == snap.Host),
			preferred(a.Region == s.Region, b.Region == s.Region),
			roomier(a, b, s.Kind))
	})
	return fit, nil
}

// awayRetry is how soon to ask again for a host that is away: a restart takes
// longer than a moment.
const awayRetry = 10 * time.Second

// preferred puts what is true before what is not.
func preferred(a, b bool) int {
	switch {
	case a == b:
		return 0
	case a:
		return -1
	}
	return 1
}

// roomier puts the host with more warm machines of a kind first, then the one
// with more room.
func roomier(a, b Host, kind session.Kind) int {
	return cmp.Or(cmp.Compare(b.Warm[kind], a.Warm[kind]), cmp.Compare(b.Free, a.Free), cmp.Compare(a.Name, b.Name))
}

func named(hosts []Host, name string) int {
	return slices.IndexFunc(hosts, func(h Host) bool { return h.Name == name })
}

func names(hosts []Host) string {
	var all []string
	for _, h := range hosts {
		all = append(all, h.Name)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}
