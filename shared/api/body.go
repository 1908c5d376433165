package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"slices"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
)

// DecodeBody checks a JSON body against the operation's schema and fills v, a
// pointer to the generated type, with the defaults and then the body. It returns
// the body with its integers in digits alone (1e2 becomes 100), for who reads it
// next. The error is an apierr invalid_request whose message names the field and
// says what would be right.
func (op *Operation) DecodeBody(b []byte, v any) ([]byte, error) {
	if op.body == nil {
		return nil, apierr.New(apierr.Internal, "operation %s takes no JSON body", op.ID)
	}
	if err := json.Unmarshal(op.defaults, v); err != nil {
		return nil, err
	}
	if len(bytes.TrimSpace(b)) == 0 {
		if op.bodyRequired {
			return nil, apierr.New(apierr.InvalidRequest, "body: must be a JSON object, but is empty")
		}
		return b, nil
	}
	parsed, err := parseJSON(b)
	if err != nil {
		return nil, err
	}
	if err := notYet(op.body, parsed); err != nil {
		return nil, err
	}
	if err := ownChecks(op.body, parsed, b); err != nil {
		return nil, err
	}
	if err := check(op.body, parsed, ""); err != nil {
		return nil, err
	}
	if err := tooBig(op.body, b); err != nil {
		return nil, err
	}
	if b, err = plainIntegers(op.body, parsed, b); err != nil {
		return nil, apierr.Wrap(err, apierr.InvalidRequest, "body: is not valid")
	}
	return b, fill(b, v)
}

// check reports the first thing that is wrong with value, as a client may see it.
func check(s *openapi3.Schema, value any, path string) error {
	err := s.VisitJSON(value)
	if err == nil {
		return nil
	}
	var se *openapi3.SchemaError
	if !errors.As(err, &se) {
		return apierr.Wrap(err, apierr.InvalidRequest, "%s: is not valid", orBody(path))
	}
	return apierr.New(apierr.InvalidRequest, "%s", sentence(se, path))
}

// notYet refuses fields that a later version builds (x-not-yet).
func notYet(s *openapi3.Schema, value any) error {
	obj, _ := value.(map[string]any)
	for _, name := range sortedKeys(obj) {
		if p := s.Properties[name]; p != nil && p.Value.Extensions["x-not-yet"] == true {
			return apierr.New(apierr.InvalidRequest, "%s: not available yet; leave it out", name)
		}
	}
	return nil
}

// readers are what x-check names. They come before the schema, whose word on a
// choice of shapes is only that none fits.
var readers = map[any]func(json.RawMessage) error{
	"proxy": func(raw json.RawMessage) error {
		_, err := egress.ParseSetting(raw, egress.Sticky)
		return err
	},
}

// ownChecks lets the readers of an object's fields (x-check) see those that are
// given.
func ownChecks(s *openapi3.Schema, value any, b []byte) error {
	obj, _ := value.(map[string]any)
	for _, name := range sortedKeys(obj) {
		p := s.Properties[name]
		if p == nil || readers[p.Value.Extensions["x-check"]] == nil {
			continue
		}
		var raw map[string]json.RawMessage
		if err := json.Unmarshal(b, &raw); err != nil {
			return apierr.Wrap(err, apierr.InvalidRequest, "body: must be a JSON object")
		}
		if err := readers[p.Value.Extensions["x-check"]](raw[name]); err != nil {
			return err
		}
	}
	return nil
}

// tooBig holds x-maxBytes against the JSON text of an object's fields.
func tooBig(s *openapi3.Schema, b []byte) error {
	var raw map[string]json.RawMessage
	for name, p := range s.Properties {
		limit, ok := p.Value.Extensions["x-maxBytes"].(float64)
		if !ok || len(b) <= int(limit) {
			continue
		}
		if raw == nil {
			if err := json.Unmarshal(b, &raw); err != nil {
				return apierr.Wrap(err, apierr.InvalidRequest, "body: must be a JSON object")
			}
		}
		if len(raw[name]) > int(limit) {
			return apierr.New(apierr.InvalidRequest, "%s: must be at most %d bytes of JSON", name, int(limit))
		}
	}
	return nil
}

// fill decodes what the schema accepted. What still fails is a number whose
// fraction is too small for the check (60.00000000000000001).
func fill(b []byte, v any) error {
	err := json.Unmarshal(b, v)
	var te *json.UnmarshalTypeError
	if errors.As(err, &te) {
		return apierr.New(apierr.InvalidRequest, "%s: must be %s", orBody(te.Field), typePhrase("integer"))
	}
	if err != nil {
		return apierr.Wrap(err, apierr.InvalidRequest, "body: is not valid")
	}
	return nil
}

func sortedKeys(m map[string]any) []string {
	keys := make([]string, 0, len(m))
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}
