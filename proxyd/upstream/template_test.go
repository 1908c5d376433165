package upstream

import (
	"strings"
	"testing"
)

func TestTemplates(t *testing.T) {
	full := fields{country: "US", state: "us_new_york", city: "new_york", session: "0123456789abcdef"}
	for _, c := range []struct {
		text   string
		fields fields
		want   string
	}{
		{"", full, ""},
		{"cust-x", full, "cust-x"},
		{"cust-x[-country-{country}][-state-{state}][-city-{city}]-session-{session}", full, "cust-x-country-US-state-us_new_york-city-new_york-session-0123456789abcdef"},
		{"cust-x[-country-{country}][-state-{state}][-city-{city}]-session-{session}", fields{country: "DE", session: "s"}, "cust-x-country-DE-session-s"},
		{"[a{country}b{city}]c", fields{country: "DE"}, "c"},
		{"{country}[x][]", fields{}, "x"},
		{"a{session}{session}", full, "a0123456789abcdef0123456789abcdef"},
	} {
		tmpl, err := parseTemplate(c.text)
		if err != nil {
			t.Errorf("%q: %v", c.text, err)
		} else if got := tmpl.expand(c.fields); got != c.want {
			t.Errorf("%q: %q, want %q", c.text, got, c.want)
		}
	}
	for _, text := range []string{"{", "}", "[", "]", "{town}", "{country", "[[a]]", "[a", "a]", "{coun[try}", "[{country]"} {
		if _, err := parseTemplate(text); err == nil {
			t.Errorf("%q is taken", text)
		}
	}
}

func FuzzTemplate(f *testing.F) {
	f.Add("cust-x[-country-{country}][-city-{city}]-session-{session}", "DE", "")
	f.Add("[a{country}", "", "x")
	f.Fuzz(func(t *testing.T, text, country, city string) {
		tmpl, err := parseTemplate(text)
		if err != nil {
			return
		}
		got := tmpl.expand(fields{country: country, city: city})
		if country == "" && city == "" && len(got) > len(text) {
			t.Fatalf("%q became %q of nothing", text, got)
		}
		if clean := country + city; !strings.ContainsAny(clean, "[]{}") && strings.ContainsAny(got, "[]{}") {
			t.Fatalf("%q: %q has marks left", text, got)
		}
		if !tmpl.has("country") && !tmpl.has("city") && got != tmpl.expand(fields{}) {
			t.Fatalf("%q has no fields and changes: %q", text, got)
		}
	})
}
