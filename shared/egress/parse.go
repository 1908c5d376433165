package egress

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/berth-dev/berth/shared/apierr"
)

// field is where a setting stands in requests: the beginning of every message.
const field = "proxy"

// ParseSetting reads a proxy setting as requests give it (spec "Proxy
// setting"): true, an object, or a list of up to MaxRules rules; null, or
// nothing, is nil. ip is what a rule without ip gets: Sticky for sessions and crawls,
// Rotating for one-shots. What comes out has its defaults filled in and its
// places normalised; parsing what Shown gives of it gives it again, but for the
// passwords, which are in the clear here.
//
// The error is an *apierr.Error, invalid_request, that names the field
// ("proxy[2].domainPattern: …") and says what would be right. It repeats no
// value, so that no password gets into logs.
func ParseSetting(raw json.RawMessage, ip Rotation) (*Setting, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if err := wellFormed(raw); err != nil {
		return nil, err
	}
	switch {
	case string(raw) == "true":
		return &Setting{Rules: []Rule{{Type: Residential, Country: "US", IP: ip, Scope: ScopeBrowser}}}, nil
	case raw[0] == '{':
		return parseSingle(raw, ip)
	case raw[0] == '[':
		return parseList(raw, ip)
	}
	return nil, bad(field, "must be true, an object or a list of up to %d rules", MaxRules)
}

// parseSingle reads one proxy. With a domainPattern it behaves as a list of one.
func parseSingle(raw json.RawMessage, ip Rotation) (*Setting, error) {
	r, err := parseRule(field, raw)
	if err != nil {
		return nil, err
	}
	if r.Type == None {
		return nil, bad(field+".type", "must be residential, datacenter or custom: none stands in lists only")
	}
	fillIP(&r, ip)
	if r.Scope == "" {
		r.Scope = ScopeBrowser
	}
	return &Setting{Rules: []Rule{r}}, nil
}

// parseList reads rules. Those without a scope have that of the others.
func parseList(raw json.RawMessage, ip Rotation) (*Setting, error) {
	var items []json.RawMessage
	if err := json.Unmarshal(raw, &items); err != nil {
		return nil, bad(field, "must be one JSON value")
	}
	switch {
	case len(items) == 0:
		return nil, bad(field, "must hold at least one rule; without a proxy leave it out")
	case len(items) > MaxRules:
		return nil, bad(field, "must hold at most %d rules", MaxRules)
	}
	s := &Setting{Rules: make([]Rule, len(items)), List: true}
	for i, item := range items {
		r, err := parseRule(fmt.Sprintf("%s[%d]", field, i), item)
		if err != nil {
			return nil, err
		}
		fillIP(&r, ip)
		s.Rules[i] = r
	}
	return s, oneScope(s.Rules)
}

func fillIP(r *Rule, ip Rotation) {
	if r.IP == "" {
		r.IP = ip
	}
}

// oneScope refuses rules whose scopes differ: a shell either uses the proxy or not.
func oneScope(rules []Rule) error {
	var scope Scope
	for i, r := range rules {
		switch {
		case r.Scope == "":
		case scope == "":
			scope = r.Scope
		case r.Scope != scope:
			return bad(fmt.Sprintf("%s[%d].scope", field, i), "must be %s as in the rules before it: all rules have one scope", scope)
		}
	}
	return nil
}

func bad(at, format string, args ...any) *apierr.Error {
	return apierr.New(apierr.InvalidRequest, "%s: %s", at, fmt.Sprintf(format, args...))
}

func orList(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}
