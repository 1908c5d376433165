package main

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
)

const reported = `{"data":[{"projectId":"acme","plan":"Hobby","sessions":2,"browserSeconds":3600.001,"sandboxVcpuSeconds":10,"sandboxGibSeconds":30,
	"proxy":{"residentialGb":1.500000001,"datacenterGb":0,"customGb":0.25,"costUsd":6.750000005},"costUsd":9007199254740993.000000001,
	"byDay":[{"date":"2026-11-20","seconds":1,"costUsd":0.5},{"date":"2026-11-21","seconds":3609.001,"costUsd":6.3}]}]}`

func TestUsage(t *testing.T) {
	asked := ""
	flags := gateway(t, func(w http.ResponseWriter, r *http.Request) {
		asked = r.URL.Path + "?" + r.URL.RawQuery
		_, _ = w.Write([]byte(reported))
	})
	got, err := said(t, func() error { return usageCmd{adminFlags: flags}.Run(t.Context()) })
	lines := strings.Split(got, "\n")
	if err != nil || len(lines) != 3 || strings.Join(strings.Fields(lines[1]), " ") != "acme Hobby 2 3600.001 10 30 1.500000001 0 0.25 6.750000005 9007199254740993.000000001" || asked != "/admin/usage?" {
		t.Errorf("asked %s\n%s%v", asked, got, err)
	}
	got, err = said(t, func() error {
		return usageCmd{adminFlags: flags, Project: "acme", From: "2026-11-01", To: "2026-11-22T00:00:00+01:00", Days: true}.Run(t.Context())
	})
	if lines := strings.Split(got, "\n"); err != nil || len(lines) != 4 || strings.Join(strings.Fields(lines[2]), " ") != "acme 2026-11-21 3609.001 6.3" ||
		asked != "/admin/usage?from=2026-11-01&project=acme&to=2026-11-22T00%3A00%3A00%2B01%3A00" {
		t.Errorf("asked %s\n%s%v", asked, got, err)
	}
	flags.JSON = true
	got, err = said(t, func() error { return usageCmd{adminFlags: flags}.Run(t.Context()) })
	if err != nil || !json.Valid([]byte(got)) || !strings.Contains(got, "9007199254740993.000000001") || !strings.HasPrefix(got, "[") {
		t.Errorf("%s %v", got, err)
	}
}

func TestPlans(t *testing.T) {
	flags := gateway(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path != "/admin/plans" {
			t.Errorf("asked for %s", r.URL)
		}
		_, _ = w.Write([]byte(`{"data":[{"name":"Free","concurrentSessions":3,"maxTimeoutSeconds":900,"proxyGbPerMonth":0,"projects":4},
			{"name":"Scale","concurrentSessions":250,"maxTimeoutSeconds":86400,"proxyGbPerMonth":null,"projects":0}]}`))
	})
	got, err := said(t, func() error { return plansCmd{flags}.Run(t.Context()) })
	lines := strings.Split(got, "\n")
	if err != nil || len(lines) != 4 || strings.Join(strings.Fields(lines[1]), " ") != "Free 3 900 0 4" || strings.Join(strings.Fields(lines[2]), " ") != "Scale 250 86400 no cap 0" {
		t.Errorf("%s%v", got, err)
	}
	flags.JSON = true
	if got, err := said(t, func() error { return plansCmd{flags}.Run(t.Context()) }); err != nil || !json.Valid([]byte(got)) {
		t.Errorf("%s %v", got, err)
	}
}
