package api

import (
	"bytes"
	"encoding/json"
	"io"
	"unicode/utf8"

	"github.com/berth-dev/berth/shared/apierr"
)

// maxDepth bounds how deep a body may nest.
const maxDepth = 64

// parseJSON reads exactly one JSON value and refuses what encoding/json lets
// pass: duplicate keys (two readers could see two different requests, RFC 8259
// section 4), invalid UTF-8 and boundless nesting. Numbers stay json.Number.
func parseJSON(b []byte) (any, error) {
	if !utf8.Valid(b) {
		return nil, apierr.New(apierr.InvalidRequest, "body: must be UTF-8")
	}
	var whole json.RawMessage
	if err := json.Unmarshal(b, &whole); err != nil { // also refuses what follows the value
		return nil, apierr.New(apierr.InvalidRequest, "body: must be one JSON value: %s", err)
	}
	d := json.NewDecoder(bytes.NewReader(b))
	d.UseNumber()
	return readValue(d, "", 0)
}

func readValue(d *json.Decoder, path string, depth int) (any, error) {
	t, err := d.Token()
	if err != nil {
		return nil, apierr.New(apierr.InvalidRequest, "body: must be one JSON value: %s", err)
	}
	delim, nested := t.(json.Delim)
	if !nested {
		return t, nil
	}
	if depth == maxDepth {
		return nil, apierr.New(apierr.InvalidRequest, "%s: must nest at most %d deep", orBody(path), maxDepth)
	}
	if delim == '[' {
		return readArray(d, path, depth)
	}
	return readObject(d, path, depth)
}

func readArray(d *json.Decoder, path string, depth int) (any, error) {
	list := []any{}
	for d.More() {
		v, err := readValue(d, path, depth+1)
		if err != nil {
			return nil, err
		}
		list = append(list, v)
	}
	_, err := d.Token()
	return list, err
}

func readObject(d *json.Decoder, path string, depth int) (any, error) {
	obj := make(map[string]any)
	for d.More() {
		t, err := d.Token()
		if err != nil {
			return nil, err
		}
		key, ok := t.(string)
		if !ok {
			return nil, io.ErrUnexpectedEOF
		}
		at := join(path, key)
		if _, twice := obj[key]; twice {
			return nil, apierr.New(apierr.InvalidRequest, "%s: must be given once", at)
		}
		if obj[key], err = readValue(d, at, depth+1); err != nil {
			return nil, err
		}
	}
	_, err := d.Token()
	return obj, err
}

func join(path, key string) string {
	if len(key) > 64 {
		key = key[:64] // messages stay short whatever came
		for !utf8.ValidString(key) {
			key = key[:len(key)-1]
		}
	}
	if path == "" {
		return key
	}
	return path + "." + key
}

func orBody(path string) string {
	if path == "" {
		return "body"
	}
	return path
}
