package accounts

import "github.com/berth-dev/berth/shared/session"

// Prices is the public price table, GET /v1/pricing. A price that is still "to
// be announced" is null.
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
