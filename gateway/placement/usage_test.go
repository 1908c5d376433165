package placement

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

func usageRow(sessionID string, t egress.Type, at time.Time, up, down int64) proxylink.Row {
	return proxylink.Row{SessionID: sessionID, ProjectID: "p", Type: t, Hour: at.Unix() / 3600, Incarnation: "i", Up: up, Down: down}
}

func (l *ledger) book(rows ...proxylink.Row) Result { return l.do(recordUsage, recordUsageData{rows}) }

func rowsOf(v *View, id string) (all []proxylink.Row) {
	for r := range v.UsageRows(id) {
		all = append(all, *r)
	}
	return all
}

func TestUsageRowsMergeByMaximum(t *testing.T) {
	l := newLedger(t)
	l.must(l.book(usageRow("a", egress.Residential, epoch, 10, 100), usageRow("a", egress.Custom, epoch, 1, 1)))
	l.must(l.book(usageRow("a", egress.Residential, epoch, 20, 50), usageRow("ab", egress.Datacenter, epoch, 7, 0)))
	l.must(l.book(usageRow("a", egress.Residential, epoch, 20, 50)))
	want := []proxylink.Row{usageRow("a", egress.Custom, epoch, 1, 1), usageRow("a", egress.Residential, epoch, 20, 100)}
	if got := rowsOf(l.View(), "a"); !slices.Equal(got, want) {
		t.Errorf("%+v", got)
	}
	if got := l.View().PlatformBytes("p", epoch); got != 127 {
		t.Errorf("%d bytes this month, want residential and datacenter alone", got)
	}
	if got := l.View().PlatformBytes("q", epoch); got != 0 {
		t.Errorf("%d bytes of another project", got)
	}
}

// The month is the calendar's in UTC, whatever the zone of the moment asked for.
func TestPlatformBytesByMonth(t *testing.T) {
	l := newLedger(t)
	first := time.Date(2026, 10, 1, 0, 0, 0, 0, time.UTC)
	l.must(l.book(usageRow("a", egress.Residential, first.Add(-time.Hour), 1, 0), usageRow("a", egress.Residential, first, 10, 0)))
	for at, want := range map[time.Time]int64{
		first: 10, first.Add(-time.Nanosecond): 1, first.AddDate(0, 1, 0): 0,
		first.In(time.FixedZone("west", -8*3600)): 10, time.Date(2027, 10, 1, 0, 0, 0, 0, time.UTC): 0,
	} {
		if got := l.View().PlatformBytes("p", at); got != want {
			t.Errorf("%s: %d, want %d", at, got, want)
		}
	}
}

func TestRowsThatCannotBeBookedChangeNothing(t *testing.T) {
	l := newLedger(t)
	good := usageRow("a", egress.Custom, epoch, 1, 1)
	for name, change := range map[string]func(*proxylink.Row){
		"no session":     func(r *proxylink.Row) { r.SessionID = "" },
		"zero byte":      func(r *proxylink.Row) { r.SessionID = "a\x00b" },
		"no project":     func(r *proxylink.Row) { r.ProjectID = "" },
		"straight":       func(r *proxylink.Row) { r.Type = egress.None },
		"foreign type":   func(r *proxylink.Row) { r.Type = "x" },
		"below zero":     func(r *proxylink.Row) { r.Down = -1 },
		"no incarnation": func(r *proxylink.Row) { r.Incarnation = "" },
		"long":           func(r *proxylink.Row) { r.Incarnation = strings.Repeat("x", 101) },
		"huge":           func(r *proxylink.Row) { r.Up = 1 << 62 },
		"old":            func(r *proxylink.Row) { r.Hour = -1 },
	} {
		bad := good
		change(&bad)
		if err := l.book(good, bad).Err(); !apierr.Is(err, apierr.Internal) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := count(l, tabUsage); n != 0 {
		t.Errorf("%d rows", n)
	}
}

// Whatever comes late, twice, in another order or across a restore, a key has
// its maximum and the month is the sum of the keys.
func TestUsageMergeProperty(t *testing.T) {
	row := rapid.Custom(func(t *rapid.T) proxylink.Row {
		r := usageRow(rapid.SampledFrom([]string{"a", "b"}).Draw(t, "session"),
			rapid.SampledFrom([]egress.Type{egress.Residential, egress.Datacenter, egress.Custom}).Draw(t, "type"),
			epoch.Add(time.Duration(rapid.IntRange(0, 2).Draw(t, "hour"))*time.Hour),
			rapid.Int64Range(0, 1<<40).Draw(t, "up"), rapid.Int64Range(0, 1<<40).Draw(t, "down"))
		r.Incarnation = rapid.SampledFrom([]string{"i", "j"}).Draw(t, "incarnation")
		return r
	})
	rapid.Check(t, func(rt *rapid.T) {
		all := rapid.SliceOfN(row, 1, 30).Draw(rt, "rows")
		want := map[string]proxylink.Row{}
		for _, r := range all {
			key := string(usageKey(r))
			known := want[key]
			r.Up, r.Down = max(r.Up, known.Up), max(r.Down, known.Down)
			want[key] = r
		}
		l, m := newLedger(t), newLedger(t)
		for _, r := range all {
			l.must(l.book(r))
		}
		shuffled := rapid.Permutation(append(slices.Clone(all), all...)).Draw(rt, "order")
		for chunk := range slices.Chunk(shuffled, rapid.IntRange(1, 9).Draw(rt, "chunk")) {
			m.must(m.book(chunk...))
			if rapid.Bool().Draw(rt, "restore") {
				fresh := NewState()
				if err := fresh.Restore(bytes.NewReader(dump(t, m.State))); err != nil {
					rt.Fatal(err)
				}
				m.State = fresh
			}
		}
		for _, x := range []*ledger{l, m} {
			got, sum := append(rowsOf(x.View(), "a"), rowsOf(x.View(), "b")...), int64(0)
			for _, r := range got {
				if want[string(usageKey(r))] != r {
					rt.Fatalf("got %+v", r)
				}
				if r.Type.Platform() {
					sum += r.Up + r.Down
				}
			}
			if len(got) != len(want) || x.View().PlatformBytes("p", epoch) != sum {
				rt.Fatalf("%d rows of %d, the month has %d of %d", len(got), len(want), x.View().PlatformBytes("p", epoch), sum)
			}
		}
	})
}

func TestSessionsSince(t *testing.T) {
	l := newLedger(t)
	l.must(l.do(putKey, putKeyData{Project{ID: "p", Plan: "Five"}, Key{ID: "k", Hash: "h", ProjectID: "p"}}))
	for i, id := range []string{"a", "b", "c"} {
		l.must(l.create(id, ""))
		if id != "c" {
			l.must(l.do(endSession, endSessionData{ID: id, At: epoch.Add(time.Duration(i+1) * time.Hour), Reason: session.Released}))
		}
	}
	for from, want := range map[time.Time]string{
		{}: "a b c", epoch.Add(time.Hour): "a b c", epoch.Add(time.Hour + 1): "b c", epoch.Add(3 * time.Hour): "c", epoch.AddDate(200, 0, 0): "c",
	} {
		var got []string
		for s := range l.View().SessionsSince("p", from) {
			got = append(got, s.ID)
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %s", from, got, want)
		}
	}
	for range l.View().SessionsSince("o", time.Time{}) { // the project before p in the index
		t.Error("another project's session")
	}
}

// A hundred thousand rows of one project cost a check of the allowance nothing.
func BenchmarkPlatformBytes(b *testing.B) {
	l := newLedger(b)
	for i := range 200 {
		rows := make([]proxylink.Row, 500)
		for j := range rows {
			rows[j] = usageRow(fmt.Sprintf("s%d", i*100+j%100), egress.Residential, epoch.Add(time.Duration(j/100)*time.Hour), 1, 1)
		}
		l.must(l.book(rows...))
	}
	v := l.View()
	for b.Loop() {
		if v.PlatformBytes("p", epoch) != 200_000 {
			b.Fatal("lost rows")
		}
	}
}
