package session

import (
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// life plays pauses and resumes, with clocks that may disagree, and gives the
// session with the moment that it has come to.
func life(t *rapid.T, most int) (Session, time.Time) {
	now := time.Date(2026, 10, 31, 20, 0, 0, 0, time.UTC)
	s := Session{ID: "s", Kind: Both, Status: Running, Timeout: 86400, CreatedAt: now, StartedAt: now, RunningSince: now, Host: "h", Epoch: 1}
	pass := func() {
		if rapid.IntRange(0, 9).Draw(t, "clock") == 0 { // another gateway's is behind
			now = now.Add(-time.Duration(rapid.Int64Range(0, 60_000).Draw(t, "behind")) * time.Millisecond)
			return
		}
		now = now.Add(time.Duration(rapid.Int64Range(0, 10*3600*1000).Draw(t, "ms")) * time.Millisecond)
	}
	for range rapid.IntRange(0, most).Draw(t, "operations") {
		pass()
		var err error
		op := Operation{ID: "o", Kind: Pause, From: "h", SnapshotID: "x", Epoch: s.Epoch}
		if s.Status == Paused {
			op = Operation{ID: "o", Kind: Resume, To: "h", SnapshotID: "x", Epoch: s.Epoch + 1}
		}
		if s, err = Open(s, op, nil); err != nil {
			t.Fatal(err)
		}
		if s, _, err = Commit(s, "o", &Snapshot{ID: "x"}, now); err != nil {
			t.Fatal(err)
		}
	}
	pass()
	if rapid.Bool().Draw(t, "ends") {
		s, _ = End(s, now, Released, "")
		pass()
	}
	return s, now.Add(time.Duration(rapid.IntRange(0, 999_999).Draw(t, "ns")))
}

// Whatever a session lived through, its running time in windows that touch adds
// up to the whole.
func TestUsedUntilAddsUpProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s, now := life(t, 20)
		if rapid.Bool().Draw(t, "of a time before spans") {
			s.Spans = nil
		}
		whole := Usage(s, now)
		if got := UsedUntil(s, now.AddDate(1, 0, 0), now); got != whole {
			t.Fatalf("until now %v, want %v", got, whole)
		}
		if got := UsedUntil(s, s.StartedAt.AddDate(0, 0, -1), now); got != 0 {
			t.Fatalf("before the start %v", got)
		}
		var sum, last time.Duration
		for at := s.StartedAt.AddDate(0, 0, -1); at.Before(now); at = at.Add(time.Duration(rapid.Int64Range(1, 30*3600*1e9).Draw(t, "window"))) {
			used := UsedUntil(s, at, now)
			if used < last {
				t.Fatalf("less until %s than before", at)
			}
			sum, last = sum+used-last, used
		}
		sum += UsedUntil(s, now.AddDate(1, 0, 0), now) - last
		if sum != whole {
			t.Fatalf("the parts add up to %v, want %v", sum, whole)
		}
	})
}

// So many pauses that spans had to be joined: the days know no difference.
func TestJoinedSpansKeepTheirDaysProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		now := time.Date(2026, 10, 31, 23, 0, 0, 0, time.UTC)
		var exact, kept []Span
		for range rapid.IntRange(MaxSpans, 3*MaxSpans).Draw(t, "spans") {
			from := now.Add(time.Duration(rapid.Int64Range(0, 3600*1000).Draw(t, "pause")) * time.Millisecond)
			now = from.Add(time.Duration(rapid.Int64Range(1, 3600*1000).Draw(t, "run")) * time.Millisecond)
			exact = append(exact, Span{from.UnixMilli(), now.UnixMilli()})
			kept = addSpan(kept, from, now)
		}
		if len(kept) > MaxSpans {
			t.Fatalf("%d spans kept", len(kept))
		}
		for day := time.Date(2026, 11, 1, 0, 0, 0, 0, time.UTC); day.Before(now.AddDate(0, 0, 2)); day = day.AddDate(0, 0, 1) {
			var a, b int64
			for _, s := range exact {
				a += before(s, day.UnixMilli())
			}
			for _, s := range kept {
				b += before(s, day.UnixMilli())
			}
			if a != b {
				t.Fatalf("until %s: %d ms, want %d", day, b, a)
			}
		}
	})
}

func TestAddSpanLeavesTheOldListAlone(t *testing.T) {
	at := time.UnixMilli(0)
	old := addSpan(nil, at, at.Add(time.Second))
	a := addSpan(old, at.Add(2*time.Second), at.Add(3*time.Second))
	b := addSpan(old, at.Add(5*time.Second), at.Add(6*time.Second))
	if len(old) != 1 || a[1].From != 2000 || b[1].From != 5000 {
		t.Errorf("%v %v %v", old, a, b)
	}
	if got := addSpan(old, at.Add(time.Hour), at); len(got) != 1 {
		t.Errorf("a span that goes backwards: %v", got)
	}
	var far []Span // one a day, for longer than there is room
	for i := range 2 * MaxSpans {
		from := at.AddDate(0, 0, i)
		far = addSpan(far, from, from.Add(time.Hour))
	}
	sum := int64(0)
	for _, s := range far {
		sum += s.length()
	}
	if len(far) != MaxSpans || sum != 2*MaxSpans*3600*1000 {
		t.Errorf("%d spans of %d ms", len(far), sum)
	}
}

func TestRanWithin(t *testing.T) {
	start := time.Date(2026, 11, 1, 12, 0, 0, 0, time.UTC)
	hour := func(n int) time.Time { return start.Add(time.Duration(n) * time.Hour) }
	now := hour(10)
	s := Session{Status: Completed, StartedAt: start, RunningSince: hour(4), EndedAt: hour(5), Before: time.Hour, Spans: []Span{{start.UnixMilli(), hour(1).UnixMilli()}}}
	for _, c := range []struct {
		from, to int
		want     bool
	}{{-2, 0, false}, {-2, 1, true}, {1, 4, false}, {1, 5, true}, {4, 5, true}, {5, 9, false}, {0, 9, true}} {
		if got := RanWithin(s, hour(c.from), hour(c.to), now); got != c.want {
			t.Errorf("from %d to %d: %v", c.from, c.to, got)
		}
	}
	short := Session{Status: Error, StartedAt: start, EndedAt: start}
	if !RanWithin(short, hour(0), hour(1), now) || RanWithin(short, hour(-1), hour(0), now) || RanWithin(short, hour(1), hour(2), now) {
		t.Error("a session that was over at once")
	}
}

func TestDataCostProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.Int64Range(0, math.MaxInt64).Draw(t, "bytes")
		price := Nanos(rapid.Int64Range(0, 1000*int64(Dollar)).Draw(t, "price"))
		want := new(big.Int).Mul(big.NewInt(n), big.NewInt(int64(price)))
		want.Div(want.Add(want, big.NewInt(GB/2)), big.NewInt(GB))
		if !want.IsInt64() {
			want.SetInt64(math.MaxInt64)
		}
		if got := DataCost(n, price); int64(got) != want.Int64() {
			t.Fatalf("%d at %s: %d, want %s", n, price, got, want)
		}
	})
	if got := DataCost(math.MaxInt64, math.MaxInt64); got != math.MaxInt64 {
		t.Error(got)
	}
	if got := DataCost(1_500_000_000, 4_500_000_000).String(); got != "6.75" {
		t.Error(got)
	}
}
