package api

import (
	"bytes"
	"encoding/json"
	"fmt"
	"mime"
	"slices"
	"strconv"

	"github.com/getkin/kin-openapi/openapi3"
)

// CheckResponse holds an answer against the operation's declared responses;
// tests call it on every response they see. A stream is checked line by line.
func (op *Operation) CheckResponse(status int, contentType string, body []byte) error {
	if err := op.checkResponse(status, contentType, body); err != nil {
		return fmt.Errorf("%s answered %d %q: %w", op.ID, status, contentType, err)
	}
	return nil
}

func (op *Operation) checkResponse(status int, contentType string, body []byte) error {
	ref := op.responses.Value(strconv.Itoa(status))
	if ref == nil {
		if ref = op.responses.Default(); ref == nil || status < 400 {
			return fmt.Errorf("status is not declared")
		}
	}
	if len(ref.Value.Content) == 0 {
		if len(body) > 0 {
			return fmt.Errorf("a body of %d bytes where none is declared", len(body))
		}
		return nil
	}
	media, _, err := mime.ParseMediaType(contentType)
	if err != nil {
		return fmt.Errorf("content-type: %w", err)
	}
	declared := ref.Value.Content[media]
	if declared == nil {
		return fmt.Errorf("content-type is not declared")
	}
	if err := checkMedia(declared.Schema.Value, media, body); err != nil {
		return err
	}
	return checkCode(ref.Value, body)
}

func checkMedia(s *openapi3.Schema, media string, body []byte) error {
	switch media {
	case "application/json":
		return checkJSON(s, body)
	case "application/x-ndjson":
		for line := range bytes.Lines(body) {
			if err := checkJSON(s, line); err != nil {
				return err
			}
		}
	case "text/event-stream":
		for line := range bytes.Lines(body) {
			if data, ok := bytes.CutPrefix(line, []byte("data: ")); ok {
				if err := checkJSON(s, data); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func checkJSON(s *openapi3.Schema, body []byte) error {
	v, err := parseJSON(body)
	if err != nil {
		return err
	}
	return s.VisitJSON(v, openapi3.VisitAsResponse(), openapi3.EnableFormatValidation())
}

// checkCode holds an error's code against the codes that its status declares.
func checkCode(r *openapi3.Response, body []byte) error {
	codes, ok := r.Extensions["x-codes"].([]any)
	if !ok {
		return nil
	}
	var e Error
	if err := json.Unmarshal(body, &e); err != nil {
		return err
	}
	if !slices.Contains(codes, any(string(e.Error.Code))) {
		return fmt.Errorf("code %q, declared are %v", e.Error.Code, codes)
	}
	return nil
}
