package api

import (
	"net/url"
	"strings"
	"testing"
	"time"
)

func TestUsage(t *testing.T) {
	r := newRig(t)
	tomorrow := url.QueryEscape(time.Now().Add(24 * time.Hour).Format(time.RFC3339))
	month := time.Now().UTC().Format("2006-01") + "-01"
	for _, tt := range []struct {
		query  string
		status int
		want   string
	}{
		{"", 200, `"costUsd":0.000000002,"byDay":[{"date":"` + month + `","seconds":0.001,"costUsd":0.000000001},{"date":"9999-12-31"`},
		{"?from=2026-01-02T00:00:00Z&to=2026-02-03T01:00:00%2B02:00", 200, `"byDay":[{"date":"2026-01-02","seconds":0.001,"costUsd":0.000000001},{"date":"2026-02-02"`},
		{"?from=2026-01-02T00:00:00.123Z", 200, `"residentialGb":0.000000001`},
		{"?to=" + tomorrow, 200, `[{"date":"` + month},
		{"?from=2026-01-02T00:00:00Z&to=2026-01-02T00:00:00Z", 400, "from: "},
		{"?from=2026-01-02T00:00:00Z&to=2026-01-01T00:00:00Z", 400, "from: "},
		{"?from=" + tomorrow, 400, "from: "},
		{"?to=2020-01-01T00:00:00Z", 400, "from: "},
		{"?from=yesterday", 400, "from: "},
		{"?to=1767312000", 400, "to: "},
		{"?to=2026-01-02T00:00:00Z&to=2026-01-03T00:00:00Z", 400, "to: "},
	} {
		if a := r.do("GET", "/v1/usage"+tt.query, nil); a.status != tt.status || !strings.Contains(string(a.body), tt.want) {
			t.Errorf("%s: %d %s", tt.query, a.status, a.body)
		}
	}
	if a := r.do("GET", "/v1/usage", nil, "X-Api-Key", "guess"); a.status != 401 {
		t.Errorf("without a key: %d", a.status)
	}
}

func TestPricingIsPublic(t *testing.T) {
	r := newRig(t)
	a := r.do("GET", "/v1/pricing", nil, "X-Api-Key", "")
	if want := `{"currency":"USD","browserHour":0.045,"vcpuHour":0.045,"gibHour":0.013,"residentialPerGb":null,"datacenterPerGb":null,"customPerGb":0}`; a.status != 200 || strings.TrimSpace(string(a.body)) != want {
		t.Errorf("%d %s", a.status, a.body)
	}
}
