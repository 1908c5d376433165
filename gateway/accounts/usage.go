package accounts

import (
	"cmp"
	"slices"
	"time"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/session"
)

// Window is a stretch of time: To is not part of it.
type Window struct{ From, To time.Time }

// Forever ends a window that has no end.
var Forever = time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)

// MonthToDate is the calendar month (UTC) of now until what comes.
func MonthToDate(now time.Time) Window {
	y, m, _ := now.UTC().Date()
	return Window{From: time.Date(y, m, 1, 0, 0, 0, 0, time.UTC), To: Forever}
}

// Usage is the answer of GET /v1/usage (spec "Usage report"). Its numbers are
// exact: in JSON they have all their digits.
type Usage struct {
	Sessions       int           `json:"sessions"`           // those that ran within the window
	BrowserSeconds Seconds       `json:"browserSeconds"`     // of browser-only sessions
	VCPUSeconds    Seconds       `json:"sandboxVcpuSeconds"` // of sessions with a shell: vCPUs times running time
	GiBSeconds     Seconds       `json:"sandboxGibSeconds"`
	Proxy          ProxyUsage    `json:"proxy"`
	CostUSD        session.Nanos `json:"costUsd"` // running time and proxy data
	ByDay          []DayUsage    `json:"byDay"`   // UTC days with use, in order
}

// ProxyUsage is proxy data, both directions.
type ProxyUsage struct {
	Residential Gigabytes     `json:"residentialGb"`
	Datacenter  Gigabytes     `json:"datacenterGb"`
	Custom      Gigabytes     `json:"customGb"`
	CostUSD     session.Nanos `json:"costUsd"`
}

// DayUsage is one UTC day of the window.
type DayUsage struct {
	Date    string        `json:"date"`    // 2026-11-21
	Seconds Seconds       `json:"seconds"` // running time of all sessions
	CostUSD session.Nanos `json:"costUsd"` // running time and proxy data
}

// Report adds up what a project's sessions used within a window, as of now.
//
// What a part of a session costs is the difference of what the session had cost
// at the part's two ends. So each amount is rounded but once, the parts of a
// session over windows and days that touch add up to its whole, and a window
// that holds all of them has the sum of what the sessions show.
//
// Running time is cut at the window's edges to the millisecond. Proxy data is
// known by the hour: it counts at the begin of its hour, but not before its
// session's start nor after its end.
func Report(view *placement.View, project string, w Window, now time.Time, rates Rates) Usage {
	r := report{Usage: Usage{ByDay: []DayUsage{}}, w: w, now: now, rates: rates, days: map[int64]*DayUsage{}}
	for s := range view.SessionsSince(project, w.From) {
		if s.StartedAt.Before(w.To) {
			r.running(*s)
			r.data(view, *s)
		}
	}
	for _, d := range r.days {
		r.ByDay = append(r.ByDay, *d)
	}
	slices.SortFunc(r.ByDay, func(a, b DayUsage) int { return cmp.Compare(a.Date, b.Date) })
	return r.Usage
}

// report is one under way.
type report struct {
	Usage
	w     Window
	now   time.Time
	rates Rates
	days  map[int64]*DayUsage // by days since 1970
}

// running adds a session's running time, cut at the window's edges and at the
// borders of days.
func (r *report) running(s session.Session) {
	if session.RanWithin(s, r.w.From, r.w.To, r.now) {
		r.Sessions++
	}
	used := session.UsedUntil(s, r.w.From, r.now)
	from, to := latest(r.w.From, s.StartedAt), earliest(r.w.To, r.end(s))
	for from.Before(to) {
		next := earliest(dayBegin(dayOf(from)+1), to)
		until := session.UsedUntil(s, next, r.now)
		if until > used {
			r.ran(s.Kind, dayOf(from), used, until)
		}
		from, used = next, until
	}
}

// ran adds the running time of a session on one day; used and until are its
// totals before and after.
func (r *report) ran(k session.Kind, day int64, used, until time.Duration) {
	time := Seconds((until - used).Milliseconds())
	if size := r.rates.Sizes[k]; k.HasShell() {
		r.VCPUSeconds += Seconds(size.VCPU) * time
		r.GiBSeconds += Seconds(size.GiB) * time
	} else {
		r.BrowserSeconds += time
	}
	r.spend(day, r.rates.running(k, until)-r.rates.running(k, used)).Seconds += time
}

// data adds a session's proxy data. Its rows come by type and hour, so that what
// a row costs is what it adds to the price of those before it.
func (r *report) data(view *placement.View, s session.Session) {
	carried := map[egress.Type]int64{}
	for row := range view.UsageRows(s.ID) {
		before := carried[row.Type]
		carried[row.Type] += row.Up + row.Down
		at := earliest(latest(placement.HourBegin(row.Hour), s.StartedAt), r.lastOf(s))
		if at.Before(r.w.From) || !at.Before(r.w.To) {
			continue
		}
		price := r.rates.Prices.perGB(row.Type)
		cost := session.DataCost(carried[row.Type], price) - session.DataCost(before, price)
		*r.proxied(row.Type) += Gigabytes(row.Up + row.Down)
		r.Proxy.CostUSD += cost
		r.spend(dayOf(at), cost)
	}
}

func (r *report) proxied(t egress.Type) *Gigabytes {
	switch t {
	case egress.Residential:
		return &r.Proxy.Residential
	case egress.Datacenter:
		return &r.Proxy.Datacenter
	}
	return &r.Proxy.Custom
}

// spend adds a cost to a day and to the whole.
func (r *report) spend(day int64, cost session.Nanos) *DayUsage {
	r.CostUSD += cost
	d := r.days[day]
	if d == nil {
		d = &DayUsage{Date: dayBegin(day).Format(time.DateOnly)}
		r.days[day] = d
	}
	d.CostUSD += cost
	return d
}

// end is until when a session's running time is known.
func (r *report) end(s session.Session) time.Time {
	if s.EndedAt.IsZero() {
		return r.now
	}
	return s.EndedAt
}

// lastOf is the latest moment at which a session's data counts.
func (r *report) lastOf(s session.Session) time.Time {
	if s.EndedAt.IsZero() {
		return Forever.Add(-1)
	}
	return s.EndedAt
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

const daySeconds = 24 * 3600

func dayOf(t time.Time) int64 { return t.Unix() / daySeconds }

func dayBegin(day int64) time.Time { return time.Unix(day*daySeconds, 0).UTC() }
