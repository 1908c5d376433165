package session

import (
	"encoding/json"
	"math"
	"math/big"
	"testing"
	"time"

	"pgregory.net/rapid"
)

func TestPricesOfTheSpec(t *testing.T) {
	for _, c := range []struct {
		kind Kind
		used time.Duration
		want string
	}{
		{Browser, time.Hour, "0.045"},
		{Both, time.Hour, "0.084"}, // the spec's own example
		{Shell, time.Hour, "0.058"},
		{Browser, 24 * time.Hour, "1.08"},
		{Browser, time.Second, "0.0000125"},
		{Both, time.Millisecond, "0.000000023"}, // 23.33 billionths
		{Both, 0, "0"},
	} {
		if got := Cost(c.kind, c.used, DefaultSizes, DefaultPrices).String(); got != c.want {
			t.Errorf("%s for %s costs %s, want %s", c.kind, c.used, got, c.want)
		}
	}
}

func TestUsage(t *testing.T) {
	s := running()
	if got := Usage(s, t0.Add(1500*time.Millisecond+999*time.Microsecond)); got != 1500*time.Millisecond {
		t.Errorf("running: %s", got)
	}
	if got := Usage(s, t0.Add(-time.Second)); got != 0 {
		t.Errorf("a clock behind: %s", got)
	}
	s, err := End(s, t0.Add(time.Minute), Released, "")
	if got := Usage(s, t0.Add(time.Hour)); err != nil || got != time.Minute {
		t.Errorf("after the end: %s, %v", got, err)
	}
}

func TestCostIsExact(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		ms := rapid.Int64Range(0, 400*24*3600*1000).Draw(rt, "ms")
		rate := rapid.Int64Range(0, 2_000*int64(Dollar)/100).Draw(rt, "rate")
		got := Cost(Browser, time.Duration(ms)*time.Millisecond, nil, Prices{Browser: Nanos(rate)})
		exact := big.NewRat(1, 1).SetFrac(new(big.Int).Mul(big.NewInt(ms), big.NewInt(rate)), big.NewInt(3_600_000))
		off := new(big.Rat).Sub(new(big.Rat).SetInt64(int64(got)), exact)
		if off.Abs(off).Cmp(big.NewRat(1, 2)) > 0 {
			rt.Fatalf("%d ms at %d: %d, exactly %s", ms, rate, got, exact.FloatString(3))
		}
	})
}

func TestNanosRoundTrip(t *testing.T) {
	for n, want := range map[Nanos]string{0: "0", 1: "0.000000001", -1: "-0.000000001", Dollar: "1", 45_000_000: "0.045",
		10 * Dollar: "10", math.MinInt64: "-9223372036.854775808"} {
		if n.String() != want {
			t.Errorf("%d: %s, want %s", int64(n), n, want)
		}
	}
	rapid.Check(t, func(rt *rapid.T) {
		n := Nanos(rapid.Int64().Draw(rt, "n"))
		raw, err := json.Marshal(n)
		var back Nanos
		if err == nil {
			err = json.Unmarshal(raw, &back)
		}
		if err != nil || back != n {
			rt.Fatalf("%d wrote %s, read %d: %v", int64(n), raw, int64(back), err)
		}
	})
}

func TestNanosRefusesWhatIsNoAmount(t *testing.T) {
	for _, bad := range []string{`"1"`, `true`, `1e-10`, `0.0000000001`, `1e999999999`, `1e18`, `99999999999`, `1/2`, `0x1p3`} {
		var n Nanos
		if err := n.UnmarshalJSON([]byte(bad)); err == nil {
			t.Errorf("%s became %s", bad, n)
		}
	}
	var n Nanos
	if err := json.Unmarshal([]byte(`4.5e-2`), &n); err != nil || n != 45_000_000 {
		t.Errorf("4.5e-2: %s, %v", n, err)
	}
}
