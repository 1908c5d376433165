package upstream

import (
	"fmt"
	"strings"
)

// fields are what a connection fills into a provider's user name and password.
type fields struct {
	country, state, city string // of the rule; empty: anywhere
	session              string // names the address to leave from
}

func (f fields) get(name string) (string, bool) {
	switch name {
	case "country":
		return f.country, true
	case "state":
		return f.state, true
	case "city":
		return f.city, true
	case "session":
		return f.session, true
	}
	return "", false
}

// template is a text with fields in braces, as providers want it in user names:
//
//	cust-x[-country-{country}][-city-{city}]-session-{session}
//
// A part in brackets is left out when a field in it is empty.
type template []part

// part is a run of pieces that stand or go together.
type part struct {
	optional bool
	pieces   []piece
}

// piece is a literal text, or a field where field is set.
type piece struct{ literal, field string }

// parseTemplate reads a template. Brackets do not nest, and there is no way to
// write a bracket or brace itself: no known provider has them in user names.
func parseTemplate(text string) (template, error) {
	var t template
	now := part{}
	end := func() {
		if len(now.pieces) > 0 {
			t = append(t, now)
		}
		now = part{}
	}
	for text != "" {
		at := strings.IndexAny(text, "[]{}")
		if at < 0 {
			at = len(text)
		}
		if at > 0 {
			now.pieces = append(now.pieces, piece{literal: text[:at]})
			text = text[at:]
			continue
		}
		c := text[0]
		text = text[1:]
		switch {
		case c == '[' && !now.optional:
			end()
			now.optional = true
		case c == ']' && now.optional:
			end()
		case c == '{':
			name, rest, closed := strings.Cut(text, "}")
			if _, known := (fields{}).get(name); !closed || !known {
				return nil, fmt.Errorf("{%.20s: want {country}, {state}, {city} or {session}", name)
			}
			now.pieces = append(now.pieces, piece{field: name})
			text = rest
		default:
			return nil, fmt.Errorf("%q where none can be: brackets come in pairs and do not nest", c)
		}
	}
	if now.optional {
		return nil, fmt.Errorf("a bracket is not closed")
	}
	end()
	return t, nil
}

// expand fills fields in.
func (t template) expand(f fields) string {
	var b strings.Builder
	for _, p := range t {
		if !p.optional || p.filled(f) {
			for _, x := range p.pieces {
				v, _ := f.get(x.field)
				b.WriteString(x.literal + v)
			}
		}
	}
	return b.String()
}

// filled says whether no field of p is empty.
func (p part) filled(f fields) bool {
	for _, x := range p.pieces {
		if v, isField := f.get(x.field); isField && v == "" {
			return false
		}
	}
	return true
}

// has says whether a field stands in t.
func (t template) has(name string) bool {
	for _, p := range t {
		for _, x := range p.pieces {
			if x.field == name {
				return true
			}
		}
	}
	return false
}
