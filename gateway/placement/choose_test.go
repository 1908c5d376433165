package placement

import (
	"strings"
	"testing"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

func TestChoose(t *testing.T) {
	warm := func(browser, both int) map[session.Kind]int {
		return map[session.Kind]int{session.Browser: browser, session.Both: both}
	}
	hosts := []Host{
		{Name: "eu-cold", Region: "eu", Free: 9},
		{Name: "eu-warm", Region: "eu", Free: 2, Warm: warm(3, 0)},
		{Name: "eu-full", Region: "eu", Free: 0, Warm: warm(5, 5)},
		{Name: "us-warm", Region: "us", Free: 4, Warm: warm(9, 1)},
		{Name: "us-warm2", Region: "us", Free: 5, Warm: warm(0, 1)},
		{Name: "ap-full", Region: "ap", Free: 0},
	}
	for _, c := range []struct {
		name   string
		hosts  []Host
		kind   session.Kind
		region string
		strict bool
		want   string
		code   apierr.Code
	}{
		{"region first, then warm, then free", hosts, session.Browser, "eu", false, "eu-warm eu-cold us-warm us-warm2", ""},
		{"warm of the kind asked for", hosts, session.Both, "us", false, "us-warm2 us-warm eu-cold eu-warm", ""},
		{"no kind warm: free decides", hosts, session.Shell, "eu", true, "eu-cold eu-warm", ""},
		{"any region", hosts, session.Browser, "", false, "us-warm eu-warm eu-cold us-warm2", ""},
		{"full region, others may", hosts, session.Browser, "ap", false, "us-warm eu-warm eu-cold us-warm2", ""},
		{"full region, strict", hosts, session.Browser, "ap", true, "", apierr.NoCapacity},
		{"unknown region", hosts, session.Browser, "mars", false, "", apierr.InvalidRequest},
		{"no hosts at all", nil, session.Browser, "eu", false, "", apierr.NoCapacity},
		{"equals by name", []Host{{Name: "b", Free: 1}, {Name: "a", Free: 1}}, session.Shell, "", false, "a b", ""},
	} {
		got, err := Choose(c.hosts, c.kind, c.region, c.strict)
		var names []string
		for _, h := range got {
			names = append(names, h.Name)
		}
		if strings.Join(names, " ") != c.want || (err != nil) != (c.code != "") || err != nil && !apierr.Is(err, c.code) {
			t.Errorf("%s: %v, %v; want %q %s", c.name, names, err, c.want, c.code)
		}
		if c.code == apierr.NoCapacity && apierr.From(err).RetryAfter <= 0 {
			t.Errorf("%s: no retry-after", c.name)
		}
		if c.code == apierr.InvalidRequest && !strings.Contains(err.Error(), "ap, eu, us") {
			t.Errorf("%s: %v names no region that would be right", c.name, err)
		}
	}
}
