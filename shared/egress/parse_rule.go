package egress

import (
	"encoding/json"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Bounds of texts in a rule, in characters. A pass with ten rules of the largest
// fits into what a proxy link carries.
const (
	maxCity  = 64
	maxLogin = 256 // user name and password each
)

// parsers read a rule's fields: v is the text given, which is never empty and
// has no control characters. What they return completes "must ...".
var parsers = map[string]func(r *Rule, v string) (must string){
	"type":          parseType,
	"country":       parseCountry,
	"state":         parseState,
	"city":          parseCity,
	"ip":            parseIP,
	"scope":         parseScope,
	"server":        parseServer,
	"username":      parseUsername,
	"password":      parsePassword,
	"domainPattern": parsePattern,
}

// fieldNames are the keys of parsers as the spec orders them.
var fieldNames = []string{"type", "country", "state", "city", "ip", "scope", "server", "username", "password", "domainPattern"}

// parseRule reads one rule; at is its place ("proxy", "proxy[2]").
func parseRule(at string, raw json.RawMessage) (Rule, error) {
	var r Rule
	fields, err := members(at, raw)
	if err != nil {
		return r, err
	}
	for _, m := range fields {
		if err := parseField(&r, at+"."+short(m.name), m); err != nil {
			return r, err
		}
	}
	if r.Type == "" {
		return r, bad(at+".type", "is required: residential, datacenter or custom")
	}
	return r, together(&r, at)
}

func parseField(r *Rule, at string, m member) error {
	parse := parsers[m.name]
	if parse == nil {
		return bad(at, "unknown field; use %s", orList(fieldNames))
	}
	var v string
	if m.value[0] != '"' || json.Unmarshal(m.value, &v) != nil {
		return bad(at, "must be a string")
	}
	if v == "" {
		return bad(at, "must not be empty; leave it out")
	}
	if strings.ContainsFunc(v, unicode.IsControl) {
		return bad(at, "must not have control characters")
	}
	if must := parse(r, v); must != "" {
		return bad(at, "must %s", must)
	}
	return nil
}

func parseType(r *Rule, v string) string {
	switch r.Type = Type(v); r.Type {
	case Residential, Datacenter, Custom, None:
		return ""
	}
	return "be residential, datacenter or custom, or in a list none"
}

func parseIP(r *Rule, v string) string {
	if r.IP = Rotation(v); r.IP != Sticky && r.IP != Rotating {
		return "be sticky or rotating"
	}
	return ""
}

func parseScope(r *Rule, v string) string {
	if r.Scope = Scope(v); r.Scope != ScopeBrowser && r.Scope != ScopeAll {
		return "be browser or all"
	}
	return ""
}

// parseUsername refuses the colon, which ends the name in a Basic login (RFC
// 7617 section 2).
func parseUsername(r *Rule, v string) string {
	if utf8.RuneCountInString(v) > maxLogin {
		return "be at most 256 characters long"
	}
	if strings.Contains(v, ":") {
		return "not have a colon: no proxy could tell it from the password"
	}
	r.Username = v
	return ""
}

func parsePassword(r *Rule, v string) string {
	if utf8.RuneCountInString(v) > maxLogin {
		return "be at most 256 characters long"
	}
	r.Password = v
	return ""
}

// parseServer normalises to scheme://host:port in lower case. Whether the host
// is public, its proxyd says at each dial: a name may change, and an operator
// may open networks (egress.allow) that only proxyd knows of.
func parseServer(r *Rule, v string) string {
	const form = "be http://host:port or https://host:port"
	scheme, rest, ok := strings.Cut(v, "://")
	scheme = strings.ToLower(scheme)
	if !ok || scheme != "http" && scheme != "https" {
		return form
	}
	if strings.Contains(rest, "@") {
		return form + " without a login: give it as username and password"
	}
	rest = strings.TrimSuffix(rest, "/") // as URL libraries write it
	if strings.ContainsAny(rest, "/?#\\") {
		return form + " without a path or query"
	}
	if !hasPort(rest) {
		return form + ": the port is required"
	}
	target, refusal := ParseTarget(rest)
	if refusal != nil {
		return form + " with a host name or an IP address, IPv6 in brackets, and a port from 1 to 65535"
	}
	if target.CheckPort() != nil {
		return "not use an outgoing mail port (25, 465, 587 or 2525)"
	}
	r.Server = scheme + "://" + target.String()
	return ""
}

// hasPort says whether something follows the host; an IPv6 address has colons
// of its own.
func hasPort(hostport string) bool {
	after := hostport[strings.LastIndexByte(hostport, ']')+1:]
	i := strings.LastIndexByte(after, ':')
	return i >= 0 && i+1 < len(after)
}

// together holds the fields of a rule against its type and one another (spec
// "Proxy setting", rules 1 and 2).
func together(r *Rule, at string) error {
	location := []struct{ name, value string }{{"country", r.Country}, {"state", r.State}, {"city", r.City}}
	for _, l := range location {
		switch {
		case l.value == "" || r.Type == Residential || r.Type == Datacenter && l.name == "country":
		case r.Type == Datacenter:
			return bad(at+"."+l.name, "is not for datacenter proxies: they take a country only")
		case r.Type == Custom:
			return bad(at+"."+l.name, "is not for custom proxies: where one stands is up to it")
		default:
			return bad(at+"."+l.name, "is not for type none, which uses no proxy")
		}
	}
	own := []struct{ name, value string }{{"server", r.Server}, {"username", r.Username}, {"password", r.Password}}
	for _, o := range own {
		if o.value != "" && r.Type != Custom {
			return bad(at+"."+o.name, "is for custom proxies only")
		}
	}
	if r.Type == Custom && r.Server == "" {
		return bad(at+".server", "is required for a custom proxy: http://host:port or https://host:port")
	}
	return placeTogether(r, at)
}

// placeTogether: a state implies the US, a city needs a country.
func placeTogether(r *Rule, at string) error {
	if r.State != "" {
		if r.Country != "" && r.Country != "US" {
			return bad(at+".state", "must go with country US: states are those of the US")
		}
		r.Country = "US"
	}
	if r.City != "" && r.Country == "" {
		return bad(at+".city", "needs a country: also give country")
	}
	return nil
}
