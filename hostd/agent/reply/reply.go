// Package reply is how the agent's handlers read JSON bodies and write answers:
// the public API's shapes and its error envelope, which the gateway passes on
// untouched.
package reply

import (
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"slices"
	"strconv"
	"strings"

	"github.com/berth-dev/berth/shared/apierr"
)

// MaxBody bounds a JSON body in bytes: a command of 1 MiB, each byte of it
// escaped, and an environment beside it.
const MaxBody = 8 << 20

// JSON writes v with the status. Failures to write are the client's leaving.
func JSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	e := json.NewEncoder(w)
	e.SetEscapeHTML(false)
	_ = e.Encode(v)
}

// Error writes err as the envelope with the status of its code. What is our
// own fault is logged with its cause.
func Error(w http.ResponseWriter, r *http.Request, err error) {
	e := apierr.From(err)
	if e.Code == apierr.Internal {
		slog.ErrorContext(r.Context(), "request failed", "method", r.Method, "path", r.URL.Path, "err", err)
	}
	if e.RetryAfter > 0 {
		w.Header().Set("Retry-After", strconv.Itoa(int(e.RetryAfter.Seconds()+0.999)))
	}
	for _, h := range []string{"Content-Length", "Last-Modified", "Content-Range", "Accept-Ranges"} {
		w.Header().Del(h) // of the answer that did not come to be
	}
	JSON(w, e.Status(), e)
}

// Method says whether the request's method is one of allowed; when not it has
// answered 405.
func Method(w http.ResponseWriter, r *http.Request, allowed ...string) bool {
	if slices.Contains(allowed, r.Method) {
		return true
	}
	list := strings.Join(allowed, ", ")
	w.Header().Set("Allow", list)
	Error(w, r, apierr.New(apierr.MethodNotAllowed, "method: must be %s here", list))
	return false
}

// Decode reads the request's JSON object into dst, a pointer to a struct. An
// empty body leaves dst as it is. Errors are 400 naming the field: unknown
// fields, wrong types, anything after the object; 413 beyond MaxBody.
func Decode(w http.ResponseWriter, r *http.Request, dst any) error {
	d := json.NewDecoder(http.MaxBytesReader(w, r.Body, MaxBody))
	d.DisallowUnknownFields()
	err := d.Decode(dst)
	if err == io.EOF {
		return nil
	}
	if err == nil {
		if _, err = d.Token(); err == io.EOF {
			return nil
		}
		return apierr.New(apierr.InvalidRequest, "body: must be one JSON object with nothing after it")
	}
	return decodeError(err)
}

func decodeError(err error) error {
	var tooBig *http.MaxBytesError
	if errors.As(err, &tooBig) {
		return apierr.New(apierr.TooLarge, "body: must be at most %d bytes", MaxBody)
	}
	var wrong *json.UnmarshalTypeError
	if errors.As(err, &wrong) {
		field := wrong.Field
		if field == "" {
			field = "body"
		}
		return apierr.New(apierr.InvalidRequest, "%s: must be %s, not %s", field, phrase(wrong.Type.Kind().String()), wrong.Value)
	}
	// encoding/json has no type for this error, only its text.
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		return apierr.New(apierr.InvalidRequest, "%s: unknown field", strings.Trim(name, `"`))
	}
	return apierr.Wrap(err, apierr.InvalidRequest, "body: must be a JSON object")
}

// phrase names a Go kind as an API user would.
func phrase(kind string) string {
	switch {
	case kind == "string":
		return "a string"
	case kind == "bool":
		return "true or false"
	case strings.HasPrefix(kind, "int"):
		return "a whole number"
	case kind == "map" || kind == "struct" || kind == "ptr":
		return "an object"
	}
	return "of another type"
}
