package egress

import (
	"fmt"
	"regexp"
	"strings"
	"sync"
	"testing"

	"pgregory.net/rapid"
)

func matcher(t testing.TB, patterns ...string) *Matcher {
	t.Helper()
	rules := make([]Rule, len(patterns))
	for i, p := range patterns {
		rules[i] = Rule{Type: None, DomainPattern: p}
	}
	m, err := NewMatcher(rules)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

func TestMatch(t *testing.T) {
	const none = -1
	for _, c := range []struct {
		patterns []string
		hosts    map[string]int
	}{
		{nil, map[string]int{"example.com": none}},
		{[]string{""}, map[string]int{"example.com": 0, "::1": 0, "": 0}},
		{[]string{"example"}, map[string]int{"www.example.com": 0, "WWW.EXAMPLE.COM": 0, "exampl.com": none}},
		{[]string{"EXAMPLE"}, map[string]int{"example.com": 0}},
		{[]string{`^example\.com$`}, map[string]int{"example.com": 0, "example.com.": 0, "www.example.com": none, "example.com.evil.net": none, "examplexcom": none}},
		{[]string{`(^|\.)a\.com$`, `b`, ``}, map[string]int{"a.com": 0, "x.a.com": 0, "xa.com": 2, "b.a.com": 0, "b.com": 1, "c.com": 2}},
		{[]string{"a", "a|b", "^$"}, map[string]int{"a": 0, "b": 1, "c": none}},
		{[]string{`^b|^a`}, map[string]int{"A": 0, "B": 0, "ca": none}}, // (?i) reaches over the bar
		{[]string{`^2001:db8::1$`, `^10\.`}, map[string]int{"[2001:db8::1]": 0, "2001:DB8::1": 0, "10.0.0.1": 1, "110.0.0.1": none}},
		{[]string{`443`, `http`}, map[string]int{"example.com": none}},
	} {
		m := matcher(t, c.patterns...)
		for range 2 { // decided, and remembered
			for host, want := range c.hosts {
				i, ok := m.Match(host)
				if ok != (want != none) || ok && i != want {
					t.Errorf("%q: Match(%q) = %d, %v; want %d", c.patterns, host, i, ok, want)
				}
			}
		}
	}
}

func TestNewMatcherRefuses(t *testing.T) {
	_, err := NewMatcher([]Rule{{DomainPattern: "a"}, {DomainPattern: "("}})
	if err == nil || !strings.Contains(err.Error(), "rule 1: domainPattern") {
		t.Errorf("%v", err)
	}
}

// A hit costs no allocation: it is on the way of every connection.
func TestMatchHitDoesNotAllocate(t *testing.T) {
	m := matcher(t, `(^|\.)example\.com$`, `x`)
	for _, host := range []string{"www.example.com", "other.net"} {
		m.Match(host)
		if n := testing.AllocsPerRun(1000, func() { m.Match(host) }); n != 0 {
			t.Errorf("%s: %v allocations", host, n)
		}
	}
}

// A page that makes hosts up fills no memory, and verdicts stay right.
func TestMatchCacheIsBounded(t *testing.T) {
	m := matcher(t, `[02468]\.example$`)
	for i := range 20 * cachedHosts {
		host := fmt.Sprintf("h%d.example", i)
		if _, ok := m.Match(host); ok != (i%2 == 0) {
			t.Fatalf("%s: %v", host, ok)
		}
		m.Match(strings.Repeat("x", maxHost) + host) // too long for a host: not remembered
		if n := len(m.verdicts.young) + len(m.verdicts.old); n > 2*cachedHosts {
			t.Fatalf("%d verdicts are remembered", n)
		}
	}
	for host := range m.verdicts.young {
		if len(host) > maxHost {
			t.Errorf("a text of %d bytes is remembered", len(host))
		}
	}
}

func TestMatchByManyAtOnce(t *testing.T) {
	m := matcher(t, `^even`, `^odd`)
	var all sync.WaitGroup
	for g := range 8 {
		all.Go(func() {
			for i := range 5000 {
				want := (i + g) % 2
				host := fmt.Sprintf("%s-%d.example", [2]string{"even", "odd"}[want], i%700)
				if got, ok := m.Match(host); !ok || got != want {
					t.Errorf("%s: %d %v", host, got, ok)
					return
				}
			}
		})
	}
	all.Wait()
}

// A remembered verdict is the one that deciding anew gives, with the plain
// library's reading of each pattern.
func TestMatchProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		patterns := rapid.SliceOfN(rapid.SampledFrom([]string{`a`, `^a`, `b$`, `[ab]c`, `c|d`, `^$`, `\d{2,3}`, ``}), 0, 10).Draw(t, "patterns")
		rules := make([]Rule, len(patterns))
		for i, p := range patterns {
			rules[i] = Rule{DomainPattern: p}
		}
		m, err := NewMatcher(rules)
		if err != nil {
			t.Fatal(err)
		}
		for _, host := range rapid.SliceOfN(rapid.StringMatching(`[a-dA-D0-9.]{0,6}`), 1, 20).Draw(t, "hosts") {
			want := -1
			for i, p := range patterns {
				if regexp.MustCompile("(?i)" + p).MatchString(strings.TrimSuffix(host, ".")) {
					want = i
					break
				}
			}
			for range 2 {
				if i, ok := m.Match(host); ok != (want >= 0) || ok && i != want {
					t.Fatalf("%q: Match(%q) = %d, %v; want %d", patterns, host, i, ok, want)
				}
			}
		}
	})
}

// No accepted pattern compiles to more than the bound says, and every host gets
// the same verdict twice.
func FuzzMatch(f *testing.F) {
	f.Add(`(^|\.)example\.com$`, "www.example.com")
	f.Add(`a{3}|[^\pL]{2,9}`, "A.b")
	f.Add(`((a?){30}){30}`, "aaa")
	f.Fuzz(func(t *testing.T, pattern, host string) {
		var r Rule
		if len(pattern) > 4*MaxPattern || parsePattern(&r, pattern) != "" {
			return
		}
		m, err := NewMatcher([]Rule{r})
		if err != nil {
			t.Fatalf("%q: %v", pattern, err)
		}
		first, ok := m.Match(host)
		if again, okAgain := m.Match(host); again != first || okAgain != ok || first != 0 {
			t.Fatalf("%q on %q: %d %v, then %d %v", pattern, host, first, ok, again, okAgain)
		}
	})
}

func BenchmarkMatch(b *testing.B) {
	pattern := `(^|\.)(` + strings.Repeat("shop|mail|news|", 15) + `cdn)\.example\.com$` // 255 characters
	patterns := make([]string, MaxRules)
	for i := range patterns {
		patterns[i] = pattern
	}
	m := matcher(b, patterns...)
	b.Run("remembered", func(b *testing.B) {
		for b.Loop() {
			m.Match("www.example.com")
		}
	})
	b.Run("decided", func(b *testing.B) {
		for b.Loop() {
			m.first("www.example.com")
		}
	})
	dear := matcher(b, strings.Repeat(`(\w*\d*)`, 32)+`z`, `.{0,1000}z`, `(a?.?){400}z`)
	b.Run("dearest", func(b *testing.B) {
		host := strings.Repeat("a", maxHost)
		for b.Loop() {
			dear.first(host)
		}
	})
}
