package api

import (
	"bytes"
	"encoding/json"
	"math"
	"math/big"
	"strconv"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
)

// An integer of JSON Schema is a number without a fraction, however it is
// written: 300.0 and 3e2 too (draft 2020-12, core 4.2.3). encoding/json and the
// agent read 300 only, so such numbers are written anew.

// plainIntegers is raw, which parses as value, with the integers among its
// fields in digits alone. The rest keeps its text.
func plainIntegers(s *openapi3.Schema, value any, raw []byte) ([]byte, error) {
	if !unplain(s, value) {
		return raw, nil
	}
	obj, nested := value.(map[string]any)
	if !nested {
		return digits(string(bytes.TrimSpace(raw))), nil
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil {
		return nil, err
	}
	for name, p := range s.Properties {
		if field, ok := obj[name]; ok {
			plain, err := plainIntegers(p.Value, field, fields[name])
			if err != nil {
				return nil, err
			}
			fields[name] = plain
		}
	}
	var w bytes.Buffer
	e := json.NewEncoder(&w)
	e.SetEscapeHTML(false) // would alter what is not ours
	err := e.Encode(fields)
	return w.Bytes(), err
}

// unplain says whether an integer in value is written in another way.
func unplain(s *openapi3.Schema, value any) bool {
	switch v := value.(type) {
	case json.Number:
		return s.Type.Is(openapi3.TypeInteger) && strings.ContainsAny(v.String(), ".eE")
	case map[string]any:
		for name, p := range s.Properties {
			if field, ok := v[name]; ok && unplain(p.Value, field) {
				return true
			}
		}
	}
	return false
}

// digits is text, a number, in digits alone. One with a fraction, or larger
// than JSON's readers agree on (2^53, RFC 8259 section 6), stays as it is.
func digits(text string) []byte {
	f, err := strconv.ParseFloat(text, 64)
	if err != nil || math.Abs(f) > 1<<53 || f == 0 && len(text) > 8 || len(text) > 64 { // the rest has a small exponent
		return []byte(text)
	}
	exact, ok := new(big.Rat).SetString(text)
	if !ok || !exact.IsInt() {
		return []byte(text)
	}
	return []byte(exact.Num().String())
}
