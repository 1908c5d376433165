package api

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/getkin/kin-openapi/openapi3"
)

// sentence says of a failed check which field it is about and what would be
// right: "viewport.width: must be at least 200". It never repeats the value.
func sentence(e *openapi3.SchemaError, path string) string {
	at := path
	for _, key := range e.JSONPointer() {
		if _, err := strconv.Atoi(key); err == nil {
			at += "[" + key + "]"
		} else {
			at = join(at, key)
		}
	}
	switch e.SchemaField {
	case "properties":
		return unknownField(e, at)
	case "required":
		return at + ": is required"
	}
	return orBody(at) + ": must " + phrase(e.Schema, e.SchemaField)
}

func unknownField(e *openapi3.SchemaError, at string) string {
	obj, _ := e.Value.(map[string]any)
	known := make(map[string]any, len(e.Schema.Properties))
	for name, p := range e.Schema.Properties {
		if p.Value.Extensions["x-not-yet"] != true {
			known[name] = nil
		}
	}
	for _, name := range sortedKeys(obj) {
		if e.Schema.Properties[name] == nil {
			return fmt.Sprintf("%s: unknown field; use %s", join(at, name), orList(sortedKeys(known)))
		}
	}
	return orBody(at) + ": has an unknown field"
}

// phrase completes "must ..." for one keyword of a schema.
func phrase(s *openapi3.Schema, keyword string) string {
	if own, ok := s.Extensions["x-expect"].(string); ok {
		return own
	}
	switch keyword {
	case "minimum":
		return "be at least " + number(*s.Min)
	case "maximum":
		return "be at most " + number(*s.Max)
	case "minLength":
		if s.MinLength == 1 {
			return "not be empty"
		}
		return fmt.Sprintf("be at least %d characters long", s.MinLength)
	case "maxLength":
		return fmt.Sprintf("be at most %d characters long", *s.MaxLength)
	case "maxItems":
		return fmt.Sprintf("hold at most %d", *s.MaxItems)
	case "maxProperties":
		return fmt.Sprintf("hold at most %d", *s.MaxProps)
	case "enum":
		names := make([]string, len(s.Enum))
		for i, v := range s.Enum {
			names[i] = fmt.Sprint(v)
		}
		return "be " + orList(names)
	case "pattern":
		return "match " + s.Pattern
	}
	if s.Type != nil && len(*s.Type) > 0 {
		return "be " + typePhrase((*s.Type)[0])
	}
	return "be valid"
}

func typePhrase(t string) string {
	switch t {
	case openapi3.TypeInteger:
		return "a whole number"
	case openapi3.TypeNumber:
		return "a number"
	case openapi3.TypeBoolean:
		return "true or false"
	case openapi3.TypeArray:
		return "a list"
	case openapi3.TypeObject:
		return "an object"
	}
	return "a string"
}

func number(f float64) string { return strconv.FormatFloat(f, 'f', -1, 64) }

func orList(names []string) string {
	if len(names) < 2 {
		return strings.Join(names, "")
	}
	return strings.Join(names[:len(names)-1], ", ") + " or " + names[len(names)-1]
}
