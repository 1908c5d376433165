package apierr

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"
)

func TestEveryCodeCrossesTheWire(t *testing.T) {
	for _, code := range Codes() {
		e := Wrap(io.EOF, code, "field: %d %%", 7)
		body, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		back := Parse(e.Status(), body)
		if back.Code != code || back.Message != "field: 7 %" || back.Status() != e.Status() || errors.Is(back, io.EOF) {
			t.Errorf("%s became %v", body, back)
		}
		if !errors.Is(fmt.Errorf("op: %w", e), io.EOF) || !Is(fmt.Errorf("op: %w", e), code) {
			t.Errorf("%s: the chain is broken", code)
		}
		if s := e.Status(); s < 400 || s > 599 {
			t.Errorf("%s has the status %d", code, s)
		}
	}
}

func TestWhatIsNoErrorOfOursGivesNothingAway(t *testing.T) {
	e := From(errors.New("password=hunter2"))
	body, _ := json.Marshal(e)
	if e.Code != Internal || e.Status() != http.StatusInternalServerError || string(body) == "" || json.Valid(body) != true {
		t.Errorf("%s", body)
	}
	if Parse(0, body).Message != e.Message || len(e.Message) == 0 || errors.Unwrap(e) == nil {
		t.Errorf("%+v", e)
	}
	for _, body := range []string{"", "x", "{}", `{"error":{"code":"made_up","message":"m"}}`, `{"error":5}`} {
		if got := Parse(418, []byte(body)); got.Code != Internal {
			t.Errorf("%q became %v", body, got)
		}
	}
}

func TestAfterLeavesTheOriginal(t *testing.T) {
	e := New(NoCapacity, "full")
	if later := e.After(time.Second); e.RetryAfter != 0 || later.RetryAfter != time.Second {
		t.Errorf("%v %v", e.RetryAfter, later.RetryAfter)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(404, []byte(`{"error":{"code":"not_found","message":"m"}}`))
	f.Fuzz(func(t *testing.T, status int, body []byte) {
		if e := Parse(status, body); statuses[e.Code] == 0 {
			t.Errorf("%q gave the code %q", body, e.Code)
		}
	})
}
