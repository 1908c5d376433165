package accounts

import (
	"time"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/session"
)

// Prices is the public price table, GET /v1/pricing. A price that is still "to
// be announced" is null, and counts as nothing.
type Prices struct {
	Currency string `json:"currency"`
	session.Prices
	ResidentialPerGB *session.Nanos `json:"residentialPerGb"` // 1 GB is 1,000,000,000 bytes
	DatacenterPerGB  *session.Nanos `json:"datacenterPerGb"`
	CustomPerGB      *session.Nanos `json:"customPerGb"`
}

// DefaultPrices are the spec's: a custom proxy has no data charge, the other
// two are not announced.
func DefaultPrices() Prices {
	free := session.Nanos(0)
	return Prices{Currency: "USD", Prices: session.DefaultPrices, CustomPerGB: &free}
}

// perGB is the price of a type's data.
func (p Prices) perGB(t egress.Type) session.Nanos {
	price := p.CustomPerGB
	switch t {
	case egress.Residential:
		price = p.ResidentialPerGB
	case egress.Datacenter:
		price = p.DatacenterPerGB
	}
	if price == nil {
		return 0
	}
	return *price
}

// Rates are what makes an amount of money of an amount of use.
type Rates struct {
	Sizes  session.Sizes
	Prices Prices
}

// running is the price of a session's running time.
func (r Rates) running(k session.Kind, used time.Duration) session.Nanos {
	return session.Cost(k, used, r.Sizes, r.Prices.Prices)
}

// Session is what a session has cost until now: its running time, and its proxy
// data by type. Every report is made of differences of this very sum.
func (r Rates) Session(view *placement.View, s session.Session, now time.Time) session.Nanos {
	cost := r.running(s.Kind, session.Usage(s, now))
	carried := map[egress.Type]int64{}
	for row := range view.UsageRows(s.ID) {
		carried[row.Type] += row.Up + row.Down
	}
	for t, n := range carried {
		cost += session.DataCost(n, r.Prices.perGB(t))
	}
	return cost
}
