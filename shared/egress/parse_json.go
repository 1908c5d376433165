package egress

import (
	"bytes"
	"encoding/json"
	"unicode/utf8"
)

// wellFormed refuses text that two readers could take for two things.
func wellFormed(raw json.RawMessage) error {
	if !utf8.Valid(raw) || !json.Valid(raw) {
		return bad(field, "must be one JSON value in UTF-8")
	}
	return nil
}

// member is one name of a JSON object with its value.
type member struct {
	name  string
	value json.RawMessage
}

// members reads a valid JSON object's members in their order. A name that comes
// twice is refused: encoding/json would take the last, others the first (RFC
// 8259 section 4).
func members(at string, raw json.RawMessage) ([]member, error) {
	d := json.NewDecoder(bytes.NewReader(raw))
	if open, err := d.Token(); err != nil || open != json.Delim('{') {
		return nil, bad(at, "must be an object")
	}
	var all []member
	seen := map[string]bool{}
	for d.More() {
		var m member
		token, err := d.Token()
		name, ok := token.(string)
		if err == nil && ok {
			m.name = name
			err = d.Decode(&m.value)
		}
		if err != nil || !ok {
			return nil, bad(at, "must be an object")
		}
		if seen[m.name] {
			return nil, bad(at+"."+short(m.name), "must be given once")
		}
		seen[m.name] = true
		all = append(all, m)
	}
	return all, nil
}

// short cuts a foreign name, so that messages stay short whatever came.
func short(name string) string {
	const most = 64
	if len(name) <= most {
		return name
	}
	cut := most
	for !utf8.RuneStart(name[cut]) {
		cut--
	}
	return name[:cut] + "…"
}
