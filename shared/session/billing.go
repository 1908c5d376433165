package session

import (
	"fmt"
	"math/big"
	"strconv"
	"strings"
	"time"
)

// Nanos is an amount of money in billionths of a US dollar. In JSON it is a
// plain number of dollars, exact to the last digit.
type Nanos int64

// Dollar is one US dollar.
const Dollar Nanos = 1_000_000_000

// String gives dollars in decimal without trailing zeros: 0.045.
func (n Nanos) String() string {
	sign, abs := "", uint64(n)
	if n < 0 {
		sign, abs = "-", -abs // right for the least int64 too
	}
	s := fmt.Sprintf("%s%d.%09d", sign, abs/uint64(Dollar), abs%uint64(Dollar))
	return strings.TrimSuffix(strings.TrimRight(s, "0"), ".")
}

// MarshalJSON writes dollars as a JSON number.
func (n Nanos) MarshalJSON() ([]byte, error) { return []byte(n.String()), nil }

// UnmarshalJSON reads a JSON number of dollars; digits beyond the ninth, and
// what is no number, are refused.
func (n *Nanos) UnmarshalJSON(b []byte) error {
	text := string(b)
	if len(text) > 40 || strings.ContainsAny(text, "/xXpP_") {
		return fmt.Errorf("%q is not an amount of dollars", text)
	}
	if exp := strings.IndexAny(text, "eE"); exp >= 0 {
		if e, err := strconv.Atoi(text[exp+1:]); err != nil || e < -18 || e > 18 {
			return fmt.Errorf("%q is not an amount of dollars", text) // 1e999999 would eat memory
		}
	}
	r, ok := new(big.Rat).SetString(text)
	if !ok {
		return fmt.Errorf("%q is not an amount of dollars", text)
	}
	r.Mul(r, new(big.Rat).SetInt64(int64(Dollar)))
	if !r.IsInt() || !r.Num().IsInt64() {
		return fmt.Errorf("%s dollars is finer than a billionth or too large", text)
	}
	*n = Nanos(r.Num().Int64())
	return nil
}

// Prices are what running time costs, per hour (spec "Billing").
type Prices struct {
	Browser Nanos `json:"browserHour"` // a browser-only session
	VCPU    Nanos `json:"vcpuHour"`    // one vCPU of a session with a shell
	GiB     Nanos `json:"gibHour"`     // one GiB of memory of a session with a shell
}

// DefaultPrices are the spec's: $0.045, $0.045 and $0.013.
var DefaultPrices = Prices{Browser: 45_000_000, VCPU: 45_000_000, GiB: 13_000_000}

// Hour is the price of one running hour of a kind on a machine of size.
func (p Prices) Hour(k Kind, size Size) Nanos {
	if !k.HasShell() {
		return p.Browser
	}
	return Nanos(size.VCPU)*p.VCPU + Nanos(size.GiB)*p.GiB
}

// Usage is the running time billed until now, in whole milliseconds: what the
// spans so far add up to. It stands still while the session is paused and once
// it has ended.
func Usage(s Session, now time.Time) time.Duration {
	used := s.Before
	if since, ok := span(s); ok {
		until := now
		if !s.EndedAt.IsZero() {
			until = s.EndedAt
		}
		used += max(0, until.Sub(since))
	}
	return used.Truncate(time.Millisecond)
}

// span is when the running span that is billed now began; after the end, the
// last one, unless the session ended paused.
func span(s Session) (since time.Time, ok bool) {
	switch {
	case !s.RunningSince.IsZero():
		return s.RunningSince, true
	case s.Status == Paused || !s.PausedAt.IsZero():
		return since, false
	}
	return s.StartedAt, true // a record older than spans
}

// Cost is the price of running a session of a kind for used, rounded half up
// to a billionth of a dollar. Every sum of costs adds these, so that totals
// equal the sum of what sessions show.
func Cost(k Kind, used time.Duration, sizes Sizes, prices Prices) Nanos {
	const hour = int64(time.Hour / time.Millisecond)
	// 30 days at $1000 an hour are 2.6e21: beyond int64, hence the split into
	// whole hours and the rest.
	ms, rate := used.Milliseconds(), int64(prices.Hour(k, sizes[k]))
	return Nanos(ms/hour*rate + (ms%hour*rate+hour/2)/hour)
}
