package session

import (
	"math"
	"math/bits"
	"time"
)

// Span is a stretch of running time that is over: from a start or resume until
// the pause. Unix milliseconds; Until is not part of it.
type Span struct {
	From  int64 `json:"f"`
	Until int64 `json:"u"`
}

// MaxSpans is how many spans a session keeps. Beyond it neighbours become one,
// the oldest first and within a UTC day if there are such: sum and days stay
// exact, and only where within the day the time lies is lost.
const MaxSpans = 64

const dayMillis = 24 * 3600 * 1000

func (s Span) length() int64 { return max(0, s.Until-s.From) }

// addSpan gives the spans with one more. It never writes to what it was given.
func addSpan(spans []Span, since, until time.Time) []Span {
	fresh := Span{since.UnixMilli(), until.UnixMilli()}
	if fresh.length() == 0 {
		return spans
	}
	all := append(append(make([]Span, 0, len(spans)+1), spans...), fresh)
	if len(all) <= MaxSpans {
		return all
	}
	join := 0
	for i := range len(all) - 1 {
		if all[i].Until/dayMillis == (all[i+1].Until-1)/dayMillis {
			join = i
			break
		}
	}
	all[join].Until += all[join+1].length() // the later one moves up to the earlier one's end
	return append(all[:join+1], all[join+2:]...)
}

// UsedUntil is how much of the running time billed by now lies before t, in
// whole milliseconds. It only grows with t, up to Usage: so what lies between
// the edges of windows that touch adds up to the whole. Running time that a
// record older than spans has without saying when lies at the start.
func UsedUntil(s Session, t, now time.Time) time.Duration {
	edge, end := int64(math.MaxInt64), now
	if !s.EndedAt.IsZero() {
		end = s.EndedAt
	}
	if t.Before(end) { // else all of it, whatever clocks say that disagree
		edge = t.UnixMilli()
	}
	used, kept := int64(0), int64(0)
	for _, p := range s.Spans {
		kept += p.length()
		used += before(p, edge)
	}
	if unsaid := s.Before.Milliseconds() - kept; unsaid > 0 {
		start := s.StartedAt.UnixMilli()
		used += before(Span{start, start + unsaid}, edge)
	}
	if since, ok := span(s); ok {
		used += before(Span{since.UnixMilli(), end.UnixMilli()}, edge)
	}
	return time.Duration(used) * time.Millisecond
}

// before is how much of a span lies before edge.
func before(s Span, edge int64) int64 { return Span{s.From, min(s.Until, edge)}.length() }

// RanWithin says whether the session ran at some moment from from until before
// to, as of now.
func RanWithin(s Session, from, to, now time.Time) bool {
	end := now
	if !s.EndedAt.IsZero() {
		end = s.EndedAt
	}
	if s.StartedAt.Equal(end) { // it was over at once, and was there all the same
		return !s.StartedAt.Before(from) && s.StartedAt.Before(to)
	}
	return UsedUntil(s, to, now) > UsedUntil(s, from, now)
}

// GB is how many bytes a gigabyte of proxy data has (spec "Billing").
const GB = 1_000_000_000

// DataCost is the price of bytes at perGB, rounded half up to a billionth of a
// dollar. Neither may be below zero; what no int64 holds comes out as the largest.
func DataCost(bytes int64, perGB Nanos) Nanos {
	hi, lo := bits.Mul64(uint64(bytes), uint64(perGB))
	lo, carry := bits.Add64(lo, GB/2, 0)
	if hi += carry; hi >= GB {
		return math.MaxInt64
	}
	cost, _ := bits.Div64(hi, lo, GB)
	return Nanos(min(cost, math.MaxInt64))
}
