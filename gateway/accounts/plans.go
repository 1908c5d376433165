// Package accounts knows who calls and what they may do: API keys, plans,
// limits and prices. What is stored stands in the record (gateway/placement);
// here are the rules.
package accounts

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// DefaultPlan is the plan of a project made without one.
const DefaultPlan = "Free"

// DefaultPlans are the plans of the spec ("Plan limits") with the proxy
// allowances of decisions.md.
func DefaultPlans() []placement.Plan {
	gb := func(n float64) *float64 { return &n }
	return []placement.Plan{
		{Name: "Free", ConcurrentSessions: 3, MaxTimeoutSeconds: 900, ProxyGBPerMonth: gb(0)},
		{Name: "Hobby", ConcurrentSessions: 25, MaxTimeoutSeconds: 7_200, ProxyGBPerMonth: gb(5)},
		{Name: "Startup", ConcurrentSessions: 100, MaxTimeoutSeconds: 21_600, ProxyGBPerMonth: gb(50)},
		{Name: "Scale", ConcurrentSessions: 250, MaxTimeoutSeconds: 86_400},
	}
}

// CheckTimeout checks a session's timeout in seconds, given at create or by
// PATCH: invalid_request below the minimum, plan_limit (403) above the plan's
// maximum. Both messages name the bound.
func CheckTimeout(p placement.Plan, timeout int) error {
	if timeout < session.MinTimeout {
		return apierr.New(apierr.InvalidRequest, "timeout: %d is too short: give at least %d seconds", timeout, session.MinTimeout)
	}
	if timeout > p.MaxTimeoutSeconds {
		return apierr.New(apierr.PlanLimit, "timeout: %d is above the maximum of the plan %s: give at most %d seconds", timeout, p.Name, p.MaxTimeoutSeconds)
	}
	return nil
}

// Tariff is everything configurable about money and limits.
type Tariff struct {
	Plans  []placement.Plan `json:"plans"`
	Prices Prices           `json:"prices"`
}

// DefaultTariff is the spec's.
func DefaultTariff() Tariff { return Tariff{Plans: DefaultPlans(), Prices: DefaultPrices()} }

// LoadTariff reads a JSON file; what it leaves out stays at the default, what
// it misspells is an error. An empty path gives the default.
func LoadTariff(path string) (Tariff, error) {
	t := DefaultTariff()
	if path == "" {
		return t, nil
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return t, fmt.Errorf("accounts: tariff: %w", err)
	}
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	t.Plans = nil // decoding into the defaults would fill what a plan leaves out from the one in its place
	if err := dec.Decode(&t); err != nil {
		return t, fmt.Errorf("accounts: tariff %s: %w", path, err)
	}
	if t.Plans == nil {
		t.Plans = DefaultPlans()
	}
	return t, t.check()
}

func (t Tariff) check() error {
	if len(t.Plans) == 0 {
		return fmt.Errorf("accounts: tariff: plans: want at least one")
	}
	if t.Prices.Currency != "USD" {
		return fmt.Errorf("accounts: tariff: prices: currency: %q: want USD", t.Prices.Currency)
	}
	for _, n := range []*session.Nanos{&t.Prices.Browser, &t.Prices.VCPU, &t.Prices.GiB,
		t.Prices.ResidentialPerGB, t.Prices.DatacenterPerGB, t.Prices.CustomPerGB} {
		if n != nil && *n < 0 {
			return fmt.Errorf("accounts: tariff: prices: %s is below zero", *n)
		}
	}
	for _, p := range t.Plans {
		if gb := p.ProxyGBPerMonth; gb != nil && *gb < 0 {
			return fmt.Errorf("accounts: tariff: plan %s: proxyGbPerMonth: %v is below zero", p.Name, *gb)
		}
	}
	return nil
}
