package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

func TestFailureKeepsWhatWentWrong(t *testing.T) {
	signalled, cancel := context.WithCancelCause(context.Background())
	cancel(ErrSignal)
	broken := errors.New("a file did not close")
	for _, c := range []struct {
		name string
		ctx  context.Context
		err  error
		want bool // an error is left
	}{
		{"nothing", signalled, nil, false},
		{"the signal", signalled, ErrSignal, false},
		{"what it cancelled", signalled, fmt.Errorf("serve: %w", context.Canceled), false},
		{"both", signalled, errors.Join(ErrSignal, context.Canceled), false},
		{"and a broken file", signalled, errors.Join(ErrSignal, errors.Join(broken, context.Canceled)), true},
		{"cancelled without a signal", context.Background(), context.Canceled, true},
	} {
		got := failure(c.ctx, c.err)
		if (got != nil) != c.want || errors.Is(c.err, broken) && (!errors.Is(got, broken) || errors.Is(got, ErrSignal)) {
			t.Errorf("%s: %v", c.name, got)
		}
	}
}

func TestHealth(t *testing.T) {
	missing := errors.New("no leader yet")
	mux := http.NewServeMux()
	Health(mux, func() error { return missing })
	counter := Counter(`berth_test_total{kind="x"}`)
	counter.Inc()
	get := func(path string) (int, string) {
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, httptest.NewRequest(http.MethodGet, path, nil))
		b, _ := io.ReadAll(w.Body)
		return w.Code, string(b)
	}
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "no leader yet") {
		t.Errorf("readyz: %d %s", code, body)
	}
	if code, _ := get("/healthz"); code != http.StatusOK {
		t.Errorf("healthz: %d", code)
	}
	missing = nil
	if code, _ := get("/readyz"); code != http.StatusOK {
		t.Errorf("readyz: %d", code)
	}
	if code, body := get("/metrics"); code != http.StatusOK || !strings.Contains(body, fmt.Sprintf("berth_test_total{kind=\"x\"} %d\n", counter.Get())) || counter.Get() == 0 {
		t.Errorf("metrics: %d %.200s", code, body)
	}
}
