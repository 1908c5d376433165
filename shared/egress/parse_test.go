package egress

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/apierr"
)

func parsed(t *testing.T, text string) *Setting {
	t.Helper()
	s, err := ParseSetting(json.RawMessage(text), Sticky)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return s
}

func TestParseSettingShown(t *testing.T) {
	for text, want := range map[string]string{
		"":                       `null`,
		" null ":                 `null`,
		"true":                   `{"type":"residential","country":"US","ip":"sticky","scope":"browser"}`,
		`{"type":"residential"}`: `{"type":"residential","ip":"sticky","scope":"browser"}`,
		`{"type":"datacenter","country":"de","ip":"rotating","scope":"all"}`:                                                     `{"type":"datacenter","country":"DE","ip":"rotating","scope":"all"}`,
		`{"type":"residential","country":"us","city":"New York"}`:                                                                `{"type":"residential","country":"US","city":"new_york","ip":"sticky","scope":"browser"}`,
		`{"type":"residential","state":"New York"}`:                                                                              `{"type":"residential","country":"US","state":"us_new_york","ip":"sticky","scope":"browser"}`,
		`{"type":"residential","state":"US_new_york","city":"St. John's"}`:                                                       `{"type":"residential","country":"US","state":"us_new_york","city":"st_johns","ip":"sticky","scope":"browser"}`,
		`{"type":"residential","country":"Us","state":"Puerto  Rico"}`:                                                           `{"type":"residential","country":"US","state":"us_puerto_rico","ip":"sticky","scope":"browser"}`,
		`{"type":"residential","state":"U.S. Virgin Islands"}`:                                                                   `{"type":"residential","country":"US","state":"us_virgin_islands","ip":"sticky","scope":"browser"}`,
		`{"type":"residential","country":"US","city":"Winston-Salem"}`:                                                           `{"type":"residential","country":"US","city":"winston_salem","ip":"sticky","scope":"browser"}`,
		`{"type":"custom","server":"HTTPS://Proxy.Example.:8443/","username":"u","password":"hunter2"}`:                          `{"type":"custom","ip":"sticky","scope":"browser","server":"https://proxy.example:8443","username":"u"}`,
		`{"type":"custom","server":"http://[2606:4700:0::1111]:80"}`:                                                             `{"type":"custom","ip":"sticky","scope":"browser","server":"http://[2606:4700::1111]:80"}`,
		`{"type":"custom","server":"http://10.1.2.3:3128","password":"p"}`:                                                       `{"type":"custom","ip":"sticky","scope":"browser","server":"http://10.1.2.3:3128"}`,
		`{"type":"datacenter","domainPattern":"<a>|b&"}`:                                                                         `{"type":"datacenter","ip":"sticky","scope":"browser","domainPattern":"<a>|b&"}`,
		`[{"type":"none","domainPattern":"^a\\.b$"},{"type":"residential","ip":"rotating"},{"type":"datacenter","scope":"all"}]`: `[{"type":"none","ip":"sticky","domainPattern":"^a\\.b$"},{"type":"residential","ip":"rotating"},{"type":"datacenter","ip":"sticky","scope":"all"}]`,
	} {
		if got := string(parsed(t, text).Shown()); got != want {
			t.Errorf("%s is shown as\n%s, want\n%s", text, got, want)
		}
	}
}

func TestParseSettingKeepsThePassword(t *testing.T) {
	s := parsed(t, `{"type":"custom","server":"http://a:1","username":"u","password":"p\u00e4ss:w@rd"}`)
	if s.List || s.Rules[0].Password != "päss:w@rd" {
		t.Errorf("%+v", s)
	}
}

// However a setting is printed, no password gets into logs.
func TestPasswordsAreNotPrinted(t *testing.T) {
	s := parsed(t, `{"type":"custom","server":"http://a:1","username":"u","password":"hunter2"}`)
	s.Rules[0].Sealed = []byte("hunter2")
	b, err := json.Marshal(struct{ S *Setting }{s.Bare()})
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{fmt.Sprint(s), fmt.Sprintf("%v %+v", *s, *s), fmt.Sprintf("%+v", struct{ S Setting }{*s}), string(s.Shown()), string(b)} {
		if strings.Contains(text, "hunter2") || strings.Contains(text, "aHVudGVyMg") || !strings.Contains(text, "http://a:1") {
			t.Errorf("printed as %s", text)
		}
	}
	if s.Rules[0].Password != "hunter2" || (*Setting)(nil).Bare() != nil {
		t.Error("the setting itself was changed")
	}
}

func TestParseSettingDefaultRotation(t *testing.T) {
	s, err := ParseSetting(json.RawMessage(`[{"type":"residential"},{"type":"datacenter","ip":"sticky"}]`), Rotating)
	if err != nil || s.Rules[0].IP != Rotating || s.Rules[1].IP != Sticky || !s.List {
		t.Errorf("%+v, %v", s, err)
	}
	if s, err = ParseSetting(json.RawMessage("true"), Rotating); err != nil || s.Rules[0].IP != Rotating {
		t.Errorf("true: %+v, %v", s, err)
	}
}

func TestParseSettingRefused(t *testing.T) {
	long := strings.Repeat("a", 257)
	for _, c := range []struct{ text, want string }{
		{`false`, "proxy: must be true, an object or a list of up to 10 rules"},
		{`"true"`, "proxy: must be true, an object"},
		{`1`, "proxy: must be true, an object"},
		{`{`, "proxy: must be one JSON value"},
		{`true true`, "proxy: must be one JSON value"},
		{"\"\xff\"", "proxy: must be one JSON value"},
		{`[]`, "proxy: must hold at least one rule"},
		{`[` + strings.Repeat(`{"type":"residential"},`, 10) + `{"type":"none"}]`, "proxy: must hold at most 10 rules"},
		{`[true]`, "proxy[0]: must be an object"},
		{`[null]`, "proxy[0]: must be an object"},
		{`[[{"type":"residential"}]]`, "proxy[0]: must be an object"},
		{`{}`, "proxy.type: is required"},
		{`[{"type":"residential"},{"country":"US"}]`, "proxy[1].type: is required"},
		{`{"type":"none"}`, "proxy.type: must be residential, datacenter or custom: none stands in lists only"},
		{`{"type":"Residential"}`, "proxy.type: must be residential, datacenter or custom"},
		{`{"type":true}`, "proxy.type: must be a string"},
		{`{"type":null}`, "proxy.type: must be a string"},
		{`{"Type":"residential"}`, "proxy.Type: unknown field; use type, country, state"},
		{`{"type":"residential","sealed":"eA=="}`, "proxy.sealed: unknown field"},
		{`{"type":"residential","type":"datacenter"}`, "proxy.type: must be given once"},
		{`{"type":"residential","\u0074ype":"datacenter"}`, "proxy.type: must be given once"},
		{`[{"type":"residential"},{"type":"residential","` + long + `":1}]`, "proxy[1]." + strings.Repeat("a", 64) + "…: unknown field"},
		{`{"type":"residential","city":"berlin"}`, "proxy.city: needs a country"},
		{`{"type":"residential","country":"DE","state":"us_ohio"}`, "proxy.state: must go with country US"},
		{`{"type":"residential","state":"de_bavaria"}`, "proxy.state: must be us_ and the name of a US state"},
		{`{"type":"residential","state":"us_"}`, "proxy.state: must be us_"},
		{`{"type":"residential","state":"NY"}`, "proxy.state: must be us_"},
		{`{"type":"residential","country":"UK"}`, "proxy.country: must be a country's code of two letters (ISO 3166-1), such as US, GB or DE"},
		{`{"type":"residential","country":"XX"}`, "proxy.country: must be"},
		{`{"type":"residential","country":"USA"}`, "proxy.country: must be"},
		{`{"type":"residential","country":""}`, "proxy.country: must not be empty; leave it out"},
		{`{"type":"residential","country":["US"]}`, "proxy.country: must be a string"},
		{`{"type":"residential","country":"BR","city":"São Paulo"}`, "proxy.city: must be a city's name"},
		{`{"type":"residential","country":"US","city":" - "}`, "proxy.city: must be a city's name"},
		{`{"type":"residential","country":"US","city":"a;b"}`, "proxy.city: must be a city's name"},
		{`{"type":"residential","country":"US","city":"` + long[:65] + `"}`, "proxy.city: must be a city's name of up to 64"},
		{`{"type":"residential","country":"US","city":"a\nb"}`, "proxy.city: must not have control characters"},
		{`{"type":"datacenter","country":"US","city":"boston"}`, "proxy.city: is not for datacenter proxies"},
		{`{"type":"datacenter","state":"us_ohio"}`, "proxy.state: is not for datacenter proxies"},
		{`{"type":"custom","server":"http://a:1","country":"US"}`, "proxy.country: is not for custom proxies"},
		{`{"type":"custom","server":"http://a:1","state":"us_ohio"}`, "proxy.state: is not for custom proxies"},
		{`{"type":"custom","server":"http://a:1","city":"boston"}`, "proxy.city: is not for custom proxies"},
		{`[{"type":"none","country":"US"}]`, "proxy[0].country: is not for type none"},
		{`[{"type":"none","server":"http://a:1"}]`, "proxy[0].server: is for custom proxies only"},
		{`{"type":"residential","username":"u"}`, "proxy.username: is for custom proxies only"},
		{`{"type":"datacenter","password":"hunter2"}`, "proxy.password: is for custom proxies only"},
		{`{"type":"residential","ip":"static"}`, "proxy.ip: must be sticky or rotating"},
		{`{"type":"residential","scope":"shell"}`, "proxy.scope: must be browser or all"},
		{`[{"type":"residential","scope":"all"},{"type":"none"},{"type":"custom","server":"http://a:1","scope":"browser"}]`, "proxy[2].scope: must be all as in the rules before it"},
		{`{"type":"custom"}`, "proxy.server: is required for a custom proxy"},
		{`{"type":"custom","username":"` + long + `","server":"http://a:1"}`, "proxy.username: must be at most 256 characters long"},
		{`{"type":"custom","username":"a:b","server":"http://a:1"}`, "proxy.username: must not have a colon"},
		{`{"type":"custom","password":"` + long + `","server":"http://a:1"}`, "proxy.password: must be at most 256 characters long"},
		{`{"type":"custom","password":"hunter2\r\nX: y","server":"http://a:1"}`, "proxy.password: must not have control characters"},
		{`{"type":"custom","password":12345678,"server":"http://a:1"}`, "proxy.password: must be a string"},
		{`{"type":"residential","domainPattern":"a("}`, "proxy.domainPattern: must be a regular expression (RE2): missing closing )"},
		{`{"type":"residential","domainPattern":"a)(b"}`, "proxy.domainPattern: must be a regular expression (RE2): unexpected )"},
		{`{"type":"residential","domainPattern":"(?=a)b"}`, "proxy.domainPattern: must be a regular expression (RE2): invalid or unsupported Perl syntax"},
		{`[{"type":"residential"},{"type":"none","domainPattern":"*"}]`, "proxy[1].domainPattern: must be a regular expression (RE2): missing argument"},
		{`{"type":"residential","domainPattern":"` + long + `"}`, "proxy.domainPattern: must be at most 256 characters long"},
		{`{"type":"residential","domainPattern":"(.{1,900}){1,9}"}`, "proxy.domainPattern: must be a regular expression (RE2): "},
		{`{"type":"residential","domainPattern":"` + strings.Repeat(`\\pL{999}`, 28) + `"}`, "proxy.domainPattern: must be a regular expression (RE2): its counted repeats make it too large"},
	} {
		_, err := ParseSetting(json.RawMessage(c.text), Sticky)
		var e *apierr.Error
		if !errors.As(err, &e) || e.Code != apierr.InvalidRequest || !strings.HasPrefix(e.Message, c.want) {
			t.Errorf("%.200s: %v, want %q", c.text, err, c.want)
			continue
		}
		if strings.Contains(err.Error(), "hunter2") || strings.Contains(err.Error(), "12345678") || len(e.Message) > 400 {
			t.Errorf("%.200s: the message repeats too much: %s", c.text, err)
		}
	}
}

func TestParseServer(t *testing.T) {
	for _, server := range []string{"proxy.example", "proxy.example:8080", "socks5://proxy.example:1080", "http://", "http:///", "ftp://a:1", "http:a:1",
		"http://proxy.example", "http://proxy.example:", "http://[2606:4700::1]", "https://1.2.3.4/", "http://proxy.example:0", "http://proxy.example:65536",
		"http://proxy.example:080", "http://proxy.example:http", "http://u:hunter2@proxy.example:80", "http://@a:1", "http://a:1/hunter2", "http://a:1?q", "http://a:1#f",
		"http://a:1//", `http://a:1\`, "http://a b:1", "http://a,b:1", "http://2130706433:80", "http://0x7f.1:80", "http://127.1:80", "http://[fe80::1%25eth0]:80",
		"http://::1:80", "http://münchen.de:80", "http://" + strings.Repeat("a.", 130) + "com:80", "http://proxy.example:25", "https://proxy.example:2525", " http://a:1"} {
		b, _ := json.Marshal(map[string]string{"type": "custom", "server": server})
		_, err := ParseSetting(b, Sticky)
		if !apierr.Is(err, apierr.InvalidRequest) || !strings.Contains(err.Error(), "proxy.server: must ") || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("server %q: %v", server, err)
		}
	}
	_, err := ParseSetting(json.RawMessage(`{"type":"custom","server":"http://proxy.example"}`), Sticky)
	if err == nil || !strings.Contains(err.Error(), "the port is required") {
		t.Errorf("without a port: %v", err)
	}
}

func TestPlacesAreWhole(t *testing.T) {
	if len(countries) != 249 || len(states) != 50+1+5 {
		t.Errorf("%d countries and %d states", len(countries), len(states))
	}
	for code := range countries {
		if len(code) != 2 || code != strings.ToUpper(code) {
			t.Errorf("country %q", code)
		}
	}
	for name := range states {
		if got, ok := place(name); !ok || got != name {
			t.Errorf("state %q is normalised to %q", name, got)
		}
	}
}

// anyRule draws what a client may well send.
func anyRule(t *rapid.T, single bool) map[string]string {
	types := []string{"residential", "datacenter", "custom", "none"}
	if single {
		types = types[:3]
	}
	r := map[string]string{"type": rapid.SampledFrom(types).Draw(t, "type")}
	maybe := func(name string, g *rapid.Generator[string]) {
		if rapid.Bool().Draw(t, "with "+name) {
			r[name] = g.Draw(t, name)
		}
	}
	country := rapid.SampledFrom([]string{"us", "DE", "gB", "jp"})
	switch r["type"] {
	case "residential":
		maybe("country", country)
		if r["country"] == "" || r["country"] == "us" {
			maybe("state", rapid.SampledFrom([]string{"us_ohio", "New Mexico", "guam", "West-Virginia"}))
		}
		if r["country"] != "" || r["state"] != "" {
			maybe("city", rapid.StringMatching(`[A-Za-z][A-Za-z0-9 _.'-]{0,40}`))
		}
	case "datacenter":
		maybe("country", country)
	case "custom":
		r["server"] = rapid.StringMatching(`https?://[a-zA-Z][a-zA-Z0-9-]{0,20}(\.[a-z]{2,5})?\.?:(80|3128|65535)/?`).Draw(t, "server")
		maybe("username", rapid.StringMatching(`[^:\pC\x00-\x1f]{1,40}`))
		maybe("password", rapid.StringMatching(`[^\pC]{1,40}`))
	}
	maybe("ip", rapid.SampledFrom([]string{"sticky", "rotating"}))
	maybe("domainPattern", rapid.SampledFrom([]string{`.`, `(^|\.)example\.com$`, `<&>\d+`, "é", `a|b`}))
	return r
}

// What is shown parses to the same again, but for the passwords.
func TestShownParsesAgainProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var given any
		if rapid.Bool().Draw(t, "list") {
			list := make([]map[string]string, rapid.IntRange(1, 10).Draw(t, "rules"))
			for i := range list {
				list[i] = anyRule(t, false)
				if rapid.Bool().Draw(t, "with scope") {
					list[i]["scope"] = "all"
				}
			}
			given = list
		} else {
			given = anyRule(t, true)
		}
		b, _ := json.Marshal(given)
		first, err := ParseSetting(b, Sticky)
		if err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		checkShown(t, first, b)
	})
}

type fataler interface{ Fatalf(string, ...any) }

func checkShown(t fataler, first *Setting, text []byte) {
	again, err := ParseSetting(first.Shown(), Rotating) // all is filled in: the default has no say
	if err != nil {
		t.Fatalf("%s is shown as %s: %v", text, first.Shown(), err)
	}
	bare := *first
	bare.Rules = append([]Rule(nil), first.Rules...)
	for i := range bare.Rules {
		bare.Rules[i].Password = ""
	}
	if !reflect.DeepEqual(*again, bare) {
		t.Fatalf("%s is shown as %s: %+v, want %+v", text, first.Shown(), *again, bare)
	}
	if first.Scope() != ScopeBrowser && first.Scope() != ScopeAll {
		t.Fatalf("%s: scope %q", text, first.Scope())
	}
}

// Whatever is accepted keeps every rule of the spec, is shown as it is, and can
// be matched; whatever is refused is refused as invalid_request with the field.
func FuzzParseSetting(f *testing.F) {
	for _, s := range []string{`true`, `null`, `{"type":"residential","state":"New York","city":"Albany"}`, `[{"type":"none","domainPattern":"a{1,3}"},{"type":"custom","server":"https://a.b:1","username":"u","password":"p"}]`,
		`{"type":"datacenter","country":"de","scope":"all"}`, `[{"type":"residential","ip":"rotating"}]`, `{"type":"custom","server":"http://[::1]:8080"}`, `{"type":"residential","domainPattern":"(a{10}){9}"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		s, err := ParseSetting(text, Sticky)
		if err != nil {
			var e *apierr.Error
			if !errors.As(err, &e) || e.Code != apierr.InvalidRequest || !strings.HasPrefix(e.Message, "proxy") || s != nil {
				t.Fatalf("%q: %v, %v", text, s, err)
			}
			return
		}
		if s == nil {
			return
		}
		if len(s.Rules) == 0 || len(s.Rules) > MaxRules || !s.List && len(s.Rules) != 1 {
			t.Fatalf("%q: %+v", text, s)
		}
		for i, r := range s.Rules {
			if msg := broken(r); msg != "" {
				t.Fatalf("%q: rule %d: %s: %+v", text, i, msg, r)
			}
		}
		checkShown(t, s, text)
		if _, err := NewMatcher(s.Rules); err != nil {
			t.Fatalf("%q: %v", text, err)
		}
	})
}

// broken says which rule of the spec r breaks, written apart from the parser.
func broken(r Rule) string {
	platform := r.Type == Residential || r.Type == Datacenter
	switch {
	case r.Country != "" && !platform, (r.State != "" || r.City != "") && r.Type != Residential:
		return "location"
	case r.State != "" && r.Country != "US", r.City != "" && r.Country == "":
		return "country"
	case (r.Server != "") != (r.Type == Custom), (r.Username != "" || r.Password != "") && r.Type != Custom:
		return "server and login"
	case r.IP != Sticky && r.IP != Rotating:
		return "ip"
	}
	for _, text := range []string{r.Country, r.State, r.City, r.Server, r.Username, r.Password, r.DomainPattern} {
		if strings.ContainsAny(text, "\r\n\x00\x7f") {
			return "control characters"
		}
	}
	if r.Server != "" {
		var host string
		if n, err := fmt.Sscanf(strings.Replace(r.Server, "://", " ", 1), "http %s", &host); n != 1 || err != nil {
			if n, err = fmt.Sscanf(strings.Replace(r.Server, "://", " ", 1), "https %s", &host); n != 1 || err != nil {
				return "server's scheme"
			}
		}
		if target, refusal := ParseTarget(host); refusal != nil || target.String() != host {
			return "server's host and port"
		}
	}
	return ""
}
