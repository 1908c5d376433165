package accounts

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

// noon is a moment on the last day of a month.
var noon = time.Date(2026, 10, 31, 12, 0, 0, 0, time.UTC)

func rates() Rates {
	perGB := session.Nanos(4_500_000_000)
	r := Rates{Sizes: session.DefaultSizes, Prices: DefaultPrices()}
	r.Prices.ResidentialPerGB = &perGB // datacenter stays to be announced
	return r
}

// put writes sessions and rows as a record holds them.
func put(t testing.TB, r *placement.Record, all []session.Session, rows []proxylink.Row) *placement.View {
	t.Helper()
	ctx := context.Background()
	if err := r.SetPlans(ctx, []placement.Plan{{Name: "All", ConcurrentSessions: 1_000_000, MaxTimeoutSeconds: 86400}}); err != nil {
		t.Fatal(err)
	}
	if _, err := r.PutKey(ctx, placement.Project{ID: "p", Plan: "All"}, placement.Key{Hash: "h"}); err != nil {
		t.Fatal(err)
	}
	for _, s := range all {
		end, reason := s.EndedAt, s.EndReason
		s.Status, s.EndedAt, s.EndReason = session.Running, time.Time{}, ""
		if _, _, err := r.CreateSession(ctx, s, ""); err != nil {
			t.Fatal(err)
		}
		if !end.IsZero() {
			if _, _, err := r.EndSession(ctx, s.ID, 0, end, reason, ""); err != nil {
				t.Fatal(err)
			}
		}
	}
	if err := r.RecordUsage(ctx, rows); err != nil {
		t.Fatal(err)
	}
	return r.View()
}

func data(id string, typ egress.Type, at time.Time, up, down int64) proxylink.Row {
	return proxylink.Row{SessionID: id, ProjectID: "p", Type: typ, Hour: at.Unix() / 3600, Incarnation: "i", Up: up, Down: down}
}

func ran(id string, k session.Kind, from, until time.Time) session.Session {
	s := session.Session{ID: id, ProjectID: "p", Kind: k, Status: session.Running, CreatedAt: from, StartedAt: from, RunningSince: from, EndedAt: until}
	if !until.IsZero() {
		s.EndReason = session.Released
	}
	return s
}

func text(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestReport(t *testing.T) {
	hour := func(h float64) time.Time { return noon.Add(time.Duration(h * float64(time.Hour))) }
	view := put(t, record(t), []session.Session{
		ran("browser", session.Browser, hour(0), hour(1)),    // $0.045
		ran("both", session.Both, hour(11), time.Time{}),     // runs over midnight, two hours until now: $0.168
		ran("before", session.Shell, hour(-10), hour(-9)),    // not in the window
		ran("short", session.Shell, hour(0.5), hour(0.5)),    // over at once
		ran("edge", session.Shell, hour(-2), hour(-1+0.001)), // 3.6 s in the window
	}, []proxylink.Row{
		data("browser", egress.Residential, hour(0), 1_000_000_000, 500_000_000), // $6.75
		data("both", egress.Datacenter, hour(12), 0, 7),                          // its price is to be announced
		data("both", egress.Custom, hour(11), 1, 1),
		data("before", egress.Residential, hour(-10), 1, 1),
		data("unknown", egress.Residential, hour(0), 1e9, 1e9), // of no session
	})
	got := text(t, Report(view, "p", Window{hour(-1), Forever}, hour(13), rates()))
	want := `{"sessions":4,"browserSeconds":3600,"sandboxVcpuSeconds":7203.6,"sandboxGibSeconds":21603.6,` +
		`"proxy":{"residentialGb":1.5,"datacenterGb":0.000000007,"customGb":0.000000002,"costUsd":6.75},"costUsd":6.963058,` +
		`"byDay":[{"date":"2026-10-31","seconds":7203.6,"costUsd":6.879058},{"date":"2026-11-01","seconds":3600,"costUsd":0.084}]}`
	if got != want {
		t.Errorf("\n%s, want\n%s", got, want)
	}
	if got := text(t, Report(view, "q", Window{hour(-1), Forever}, hour(13), rates())); got !=
		`{"sessions":0,"browserSeconds":0,"sandboxVcpuSeconds":0,"sandboxGibSeconds":0,"proxy":{"residentialGb":0,"datacenterGb":0,"customGb":0,"costUsd":0},"costUsd":0,"byDay":[]}` {
		t.Errorf("a project without sessions: %s", got)
	}
}

func TestMonthToDate(t *testing.T) {
	w := MonthToDate(time.Date(2026, 11, 1, 3, 0, 0, 0, time.FixedZone("east", 9*3600)))
	if want := time.Date(2026, 10, 1, 0, 0, 0, 0, time.UTC); !w.From.Equal(want) || w.To != Forever {
		t.Errorf("%+v", w)
	}
}

// Whatever sessions did, windows that touch add up to the whole, days too, and
// the whole is the sum of what the sessions cost.
func TestReportAddsUpProperty(t *testing.T) {
	r := record(t)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		project := fmt.Sprintf("p%d", n)
		all, rows, now := drawUse(rt, project)
		view := load(t, r, project, all, rows)
		price := session.Nanos(rapid.Int64Range(0, 20_000_000_000).Draw(rt, "price"))
		rates := rates()
		rates.Prices.DatacenterPerGB, rates.Prices.CustomPerGB = &price, nil
		begin := noon.AddDate(0, 0, -1)
		whole := Report(view, project, Window{begin, Forever}, now, rates)
		var sum Usage
		for from := begin; from.Before(now); {
			to := from.Add(time.Duration(rapid.Int64Range(1, 40*3600*1e9).Draw(rt, "window")))
			if to.After(now) {
				to = Forever
			}
			add(&sum, Report(view, project, Window{from, to}, now, rates))
			from = to
		}
		sum.Sessions = whole.Sessions // one that ran in two windows counts in both
		if whole.ByDay, sum.ByDay = nil, nil; text(t, sum) != text(t, whole) {
			rt.Fatalf("the parts add up to\n%s, the whole is\n%s", text(t, sum), text(t, whole))
		}
		var cost session.Nanos
		for s := range view.SessionsSince(project, time.Time{}) {
			cost += rates.Session(view, *s, now)
		}
		if cost != whole.CostUSD {
			rt.Fatalf("sessions cost %s, the report says %s", cost, whole.CostUSD)
		}
	})
}

func TestDaysAddUpProperty(t *testing.T) {
	r := record(t)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		n++
		project := fmt.Sprintf("p%d", n)
		all, rows, now := drawUse(rt, project)
		view := load(t, r, project, all, rows)
		u := Report(view, project, Window{noon.AddDate(0, 0, -1), Forever}, now, rates())
		var cost session.Nanos
		var ms Seconds
		for i, d := range u.ByDay {
			cost, ms = cost+d.CostUSD, ms+d.Seconds
			if i > 0 && d.Date <= u.ByDay[i-1].Date {
				rt.Fatalf("%s after %s", d.Date, u.ByDay[i-1].Date)
			}
			day, _ := time.Parse(time.DateOnly, d.Date)
			alone := Report(view, project, Window{day, day.AddDate(0, 0, 1)}, now, rates())
			if len(alone.ByDay) != 1 || alone.ByDay[0] != d {
				rt.Fatalf("the day alone is %+v, among others %+v", alone.ByDay, d)
			}
		}
		if cost != u.CostUSD || ms != u.BrowserSeconds+u.VCPUSeconds { // every size has one vCPU
			rt.Fatalf("days have %s and %s, the whole %s", cost, ms, text(t, u))
		}
	})
}

func add(sum *Usage, u Usage) {
	sum.BrowserSeconds += u.BrowserSeconds
	sum.VCPUSeconds += u.VCPUSeconds
	sum.GiBSeconds += u.GiBSeconds
	sum.Proxy.Residential += u.Proxy.Residential
	sum.Proxy.Datacenter += u.Proxy.Datacenter
	sum.Proxy.Custom += u.Proxy.Custom
	sum.Proxy.CostUSD += u.Proxy.CostUSD
	sum.CostUSD += u.CostUSD
}

// drawUse makes sessions with pauses, and rows whose hours need not agree with
// the gateway's clock.
func drawUse(t *rapid.T, project string) (all []session.Session, rows []proxylink.Row, now time.Time) {
	ms := func(max time.Duration, label string) time.Duration {
		return time.Duration(rapid.Int64Range(0, max.Milliseconds()).Draw(t, label)) * time.Millisecond
	}
	now = noon.AddDate(0, 0, 5).Add(ms(time.Hour, "now"))
	for i := range rapid.IntRange(0, 5).Draw(t, "sessions") {
		at := noon.Add(ms(4*24*time.Hour, "start"))
		s := ran(fmt.Sprintf("%s-%d", project, i), rapid.SampledFrom(session.Kinds()).Draw(t, "kind"), at, time.Time{})
		s.ProjectID = project
		for range rapid.IntRange(0, 4).Draw(t, "pauses") {
			from := at
			at = at.Add(ms(8*time.Hour, "ran"))
			s.Spans = append(s.Spans, session.Span{From: from.UnixMilli(), Until: at.UnixMilli()})
			s.Before += at.Sub(from)
			at = at.Add(ms(30*time.Hour, "paused"))
		}
		s.RunningSince = at
		if rapid.Bool().Draw(t, "ended") {
			s.EndedAt, s.EndReason = at.Add(ms(24*time.Hour, "last")), session.Released
		}
		for range rapid.IntRange(0, 8).Draw(t, "rows") {
			r := data(s.ID, rapid.SampledFrom([]egress.Type{egress.Residential, egress.Datacenter, egress.Custom}).Draw(t, "type"),
				s.StartedAt.Add(ms(50*time.Hour, "hour")-time.Hour), rapid.Int64Range(0, 1<<40).Draw(t, "up"), rapid.Int64Range(0, 1<<40).Draw(t, "down"))
			r.ProjectID, r.Incarnation = project, rapid.SampledFrom([]string{"i", "j"}).Draw(t, "incarnation")
			rows = append(rows, r)
		}
		all = append(all, s)
	}
	return all, rows, now
}

// load is put for another project of the same record.
func load(t *testing.T, r *placement.Record, project string, all []session.Session, rows []proxylink.Row) *placement.View {
	t.Helper()
	if _, err := r.PutKey(t.Context(), placement.Project{ID: project, Plan: "Scale"}, placement.Key{Hash: project}); err != nil {
		t.Fatal(err)
	}
	return put(t, r, all, rows)
}

func TestNumbersAreExact(t *testing.T) {
	for want, got := range map[string]any{
		"0": Seconds(0), "0.001": Seconds(1), "12": Seconds(12_000), "9223372036854775.807": Seconds(1<<63 - 1),
		"0.000000001": Gigabytes(1), "1.5": Gigabytes(1_500_000_000), "9223372036.854775807": Gigabytes(1<<63 - 1),
	} {
		if text(t, got) != want {
			t.Errorf("%s, want %s", text(t, got), want)
		}
	}
}

// A hundred thousand rows of two thousand sessions in one month.
func BenchmarkReport(b *testing.B) {
	r := record(b)
	all := make([]session.Session, 2_000)
	for i := range all {
		at := noon.Add(time.Duration(i) * time.Second)
		all[i] = ran(fmt.Sprintf("s%05d", i), session.Both, at, at.Add(60*time.Hour))
	}
	var rows []proxylink.Row
	for h := range 50 {
		for _, s := range all {
			rows = append(rows, data(s.ID, egress.Residential, noon.Add(time.Duration(h)*time.Hour), 1e6, 1e6))
		}
	}
	view, rates := put(b, r, all, rows), rates()
	for b.Loop() {
		if u := Report(view, "p", Window{noon.AddDate(0, 0, -1), Forever}, noon.AddDate(0, 0, 3), rates); u.Sessions != 2_000 || u.Proxy.Residential != 200*1e9 {
			b.Fatalf("%+v", u)
		}
	}
}
