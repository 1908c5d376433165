package reply

import (
	"errors"
	"fmt"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
)

func TestError(t *testing.T) {
	r := httptest.NewRequest("GET", "/x", nil)
	for _, c := range []struct {
		err    error
		status int
		body   string
		retry  string
	}{
		{apierr.New(apierr.NotFound, "path: nothing here"), 404, `{"error":{"code":"not_found","message":"path: nothing here"}}`, ""},
		{fmt.Errorf("op: %w", apierr.New(apierr.InvalidRequest, "x: bad")), 400, `"code":"invalid_request"`, ""},
		{errors.New("secret"), 500, `"code":"internal"`, ""},
		{apierr.New(apierr.NoCapacity, "full").After(1500 * time.Millisecond), 503, `"code":"no_capacity"`, "2"},
	} {
		w := httptest.NewRecorder()
		w.Header().Set("Content-Length", "99")
		Error(w, r, c.err)
		if w.Code != c.status || !strings.Contains(w.Body.String(), c.body) || w.Header().Get("Retry-After") != c.retry ||
			w.Header().Get("Content-Type") != "application/json" || w.Header().Get("Content-Length") != "" {
			t.Errorf("%v: %d %s %v", c.err, w.Code, w.Body, w.Header())
		}
		if strings.Contains(w.Body.String(), "secret") {
			t.Errorf("the cause was sent: %s", w.Body)
		}
	}
}

func TestMethod(t *testing.T) {
	w := httptest.NewRecorder()
	if Method(w, httptest.NewRequest("PUT", "/", nil), "GET", "POST") || w.Code != 405 || w.Header().Get("Allow") != "GET, POST" {
		t.Errorf("%d %v", w.Code, w.Header())
	}
	w = httptest.NewRecorder()
	if !Method(w, httptest.NewRequest("POST", "/", nil), "GET", "POST") || w.Body.Len() > 0 {
		t.Errorf("an allowed method was answered: %d", w.Code)
	}
}

type body struct {
	A string         `json:"a"`
	N *int64         `json:"n"`
	B bool           `json:"b"`
	M map[string]int `json:"m"`
}

func TestDecode(t *testing.T) {
	for text, message := range map[string]string{
		``:                 "",
		`{}`:               "",
		`{"a":"x","n":5} `: "",
		`{"a":1}`:          "a: must be a string, not number",
		`{"n":"x"}`:        "n: must be a whole number, not string",
		`{"b":1}`:          "b: must be true or false, not number",
		`{"m":{"k":"v"}}`:  "m: must be a whole number, not string",
		`{"m":[]}`:         "m: must be an object, not array",
		`{"x":1}`:          "x: unknown field",
		`{"a\"b":1}`:       `a\"b: unknown field`,
		`[]`:               "body: must be an object, not array",
		`{"a":"x"} {}`:     "body: must be one JSON object",
		`{"a":`:            "body: must be a JSON object",
		`{"a":"` + strings.Repeat("x", MaxBody) + `"}`: "body: must be at most",
	} {
		var b body
		err := Decode(httptest.NewRecorder(), httptest.NewRequest("POST", "/", strings.NewReader(text)), &b)
		if (err == nil) != (message == "") || err != nil && !strings.HasPrefix(apierr.From(err).Message, message) {
			t.Errorf("%.40s: %v, want %q", text, err, message)
		}
	}
}

func FuzzDecode(f *testing.F) {
	f.Add(`{"a":"x"}`)
	f.Fuzz(func(t *testing.T, text string) {
		var b body
		err := Decode(httptest.NewRecorder(), httptest.NewRequest("POST", "/", strings.NewReader(text)), &b)
		if err != nil && !apierr.Is(err, apierr.InvalidRequest) {
			t.Fatalf("%q: %v is no 400", text, err)
		}
	})
}
