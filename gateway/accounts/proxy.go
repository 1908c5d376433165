package accounts

import (
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
)

// gigabyte is what proxy data is counted in (spec "Billing"), bytes.
const gigabyte = 1_000_000_000

// CheckProxy checks whether a project may use a proxy setting, at create, PATCH
// and resume: used is its residential and datacenter data of this UTC month, in
// bytes. plan_limit with 402: the plan has no proxies of the platform, which an
// allowance of 0 says; spend_limit (402): the allowance is used up. A setting
// that leads through none of the platform's proxies meets neither.
func CheckProxy(p placement.Plan, used int64, s *egress.Setting) error {
	if !s.Platform() || p.ProxyGBPerMonth == nil {
		return nil
	}
	gb := *p.ProxyGBPerMonth
	if gb <= 0 {
		return apierr.New(apierr.PlanLimit, "proxy: the plan %s does not include residential and datacenter proxies: use a custom one, or another plan", p.Name).PaymentRequired()
	}
	if float64(used) >= gb*gigabyte {
		return apierr.New(apierr.SpendLimit, "proxy: the %g GB of residential and datacenter data that the plan %s has a month are used up: "+
			"there is more from the 1st (UTC), and a custom proxy does not count", gb, p.Name)
	}
	return nil
}
