package api

import (
	"encoding/json"
	"net/url"
	"strconv"
	"strings"
	"unicode/utf8"

	"github.com/getkin/kin-openapi/openapi3"

	"github.com/berth-dev/berth/shared/apierr"
)

// DecodeParams checks the operation's query and header parameters and fills v,
// a pointer to the generated Params type, defaults included. Unknown query
// parameters are ignored; a known one given twice is refused. header gives a
// header's value or "". v may be nil to check only.
func (op *Operation) DecodeParams(query url.Values, header func(name string) string, v any) error {
	values := make(map[string]any, len(op.params))
	for i := range op.params {
		value, err := op.params[i].read(query, header)
		if err != nil {
			return err
		}
		if value != nil {
			values[op.params[i].name] = value
		}
	}
	if v == nil || len(values) == 0 {
		return nil
	}
	b, err := json.Marshal(values)
	if err != nil {
		return err
	}
	return fill(b, v)
}

// read gives the parameter's checked value, its default, or nil.
func (p *param) read(query url.Values, header func(string) string) (any, error) {
	if p.schema.Type.Is(openapi3.TypeObject) {
		return p.readObject(query)
	}
	text, given, err := p.text(query, header)
	if err != nil {
		return nil, err
	}
	if !given {
		if p.required {
			return nil, apierr.New(apierr.InvalidRequest, "%s: is required", p.name)
		}
		return p.schema.Default, nil
	}
	if !utf8.ValidString(text) {
		return nil, apierr.New(apierr.InvalidRequest, "%s: must be UTF-8", p.name)
	}
	value := convert(p.schema, text)
	if err := check(p.schema, value, p.name); err != nil {
		return nil, err
	}
	return value, nil
}

func (p *param) text(query url.Values, header func(string) string) (text string, given bool, err error) {
	if p.in == openapi3.ParameterInHeader {
		text = header(p.name)
		return text, text != "", nil
	}
	all := query[p.name]
	if len(all) > 1 {
		return "", false, apierr.New(apierr.InvalidRequest, "%s: must be given once", p.name)
	}
	if len(all) == 0 || (all[0] == "" && !p.required) {
		return "", false, nil
	}
	return all[0], true, nil
}

// readObject gathers name[key]=value (style deepObject). The bare name is
// refused: a filter that is ignored shows too much.
func (p *param) readObject(query url.Values) (any, error) {
	if query.Has(p.name) {
		return nil, apierr.New(apierr.InvalidRequest, "%s: must be given as %s[key]=value", p.name, p.name)
	}
	obj := make(map[string]any)
	for name, all := range query {
		key, ok := strings.CutPrefix(name, p.name+"[")
		if !ok || !strings.HasSuffix(key, "]") {
			continue
		}
		if len(all) > 1 {
			return nil, apierr.New(apierr.InvalidRequest, "%s: must be given once", join("", name))
		}
		if !utf8.ValidString(name) || !utf8.ValidString(all[0]) {
			return nil, apierr.New(apierr.InvalidRequest, "%s: must be UTF-8", p.name)
		}
		obj[strings.TrimSuffix(key, "]")] = all[0]
	}
	if len(obj) == 0 {
		return nil, nil
	}
	return obj, check(p.schema, obj, p.name)
}

// convert reads text as the schema's type; text that is no such thing stays a
// string, which the check then refuses with the right sentence.
func convert(s *openapi3.Schema, text string) any {
	switch {
	case s.Type.Is(openapi3.TypeInteger), s.Type.Is(openapi3.TypeNumber):
		if n, err := strconv.ParseInt(text, 10, 64); err == nil {
			return json.Number(strconv.FormatInt(n, 10))
		}
	case s.Type.Is(openapi3.TypeBoolean):
		switch text {
		case "1", "true":
			return true
		case "0", "false":
			return false
		}
	case s.Type.Is(openapi3.TypeArray):
		list := []any{}
		for item := range strings.SplitSeq(text, ",") {
			list = append(list, item)
		}
		return list
	}
	return text
}
