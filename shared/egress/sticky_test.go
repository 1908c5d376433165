package egress

import (
	"regexp"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

var seed = []byte("0123456789abcdef")

func TestStickyID(t *testing.T) {
	us := Rule{Type: Residential, Country: "US", IP: Sticky}
	de := Rule{Type: Residential, Country: "DE", IP: Sticky}
	id := StickyID(seed, 0, []Rule{us}, 0)
	if !regexp.MustCompile("^[0-9a-f]{16}$").MatchString(id) {
		t.Fatalf("id %q", id)
	}
	for name, same := range map[string]string{
		"again":               StickyID(seed, 0, []Rule{us}, 0),
		"elsewhere in a list": StickyID(seed, 0, []Rule{de, us}, 1),
		"another scope":       StickyID(seed, 0, []Rule{{Type: Residential, Country: "US", IP: Sticky, Scope: ScopeAll}}, 0),
		"a twin after":        StickyID(seed, 0, []Rule{us, us}, 0),
	} {
		if same != id {
			t.Errorf("%s: %s, want %s", name, same, id)
		}
	}
	for name, other := range map[string]string{
		"another session": StickyID([]byte("another"), 0, []Rule{us}, 0),
		"another turn":    StickyID(seed, 1, []Rule{us}, 0),
		"another country": StickyID(seed, 0, []Rule{de}, 0),
		"the twin":        StickyID(seed, 0, []Rule{us, us}, 1),
		"another type":    StickyID(seed, 0, []Rule{{Type: Datacenter, Country: "US", IP: Sticky}}, 0),
		"another pattern": StickyID(seed, 0, []Rule{{Type: Residential, Country: "US", IP: Sticky, DomainPattern: "a"}}, 0),
	} {
		if other == id || other == "" {
			t.Errorf("%s: %q", name, other)
		}
	}
	for name, r := range map[string]Rule{"rotating": {Type: Residential, IP: Rotating}, "none": {Type: None, IP: Sticky}} {
		if got := StickyID(seed, 0, []Rule{r}, 0); got != "" {
			t.Errorf("%s has the id %s", name, got)
		}
	}
}

// No two rules of a setting share an address, and a change of the list keeps
// the ids of the rules that stay.
func TestStickyIDProperty(t *testing.T) {
	rule := rapid.Custom(func(t *rapid.T) Rule {
		return Rule{Type: rapid.SampledFrom([]Type{Residential, Datacenter, Custom}).Draw(t, "type"), IP: Sticky,
			Country: rapid.SampledFrom([]string{"", "US", "DE"}).Draw(t, "country"), City: rapid.SampledFrom([]string{"", "US", "a"}).Draw(t, "city"),
			DomainPattern: rapid.SampledFrom([]string{"", "a", "aa"}).Draw(t, "pattern")}
	})
	rapid.Check(t, func(t *rapid.T) {
		rules := rapid.SliceOfN(rule, 1, MaxRules).Draw(t, "rules")
		ids := idsOf(rules)
		sorted := slices.Sorted(slices.Values(ids))
		if len(slices.Compact(sorted)) != len(ids) {
			t.Fatalf("two rules of %+v share an id: %v", rules, ids)
		}
		added := rule.Draw(t, "added")
		for i, id := range idsOf(append(slices.Clone(rules), added))[:len(rules)] {
			if id != ids[i] {
				t.Fatalf("rule %d changed its id when one came after", i)
			}
		}
	})
}

func idsOf(rules []Rule) []string {
	ids := make([]string, len(rules))
	for i := range rules {
		ids[i] = StickyID(seed, 3, rules, i)
	}
	return ids
}
