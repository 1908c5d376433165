package placement

import "time"

// Project is a customer: what limits, usage and lists belong to.
type Project struct {
	ID   string `json:"id"`
	Name string `json:"name"`
	Plan string `json:"plan"` // name of a Plan
}

// Key is an API key as the record keeps it; the secret is nowhere.
type Key struct {
	ID        string    `json:"id"`
	Hash      string    `json:"hash"` // token.APIKey.Hash
	ProjectID string    `json:"projectId"`
	CreatedAt time.Time `json:"createdAt"`
	RevokedAt time.Time `json:"revokedAt"` // zero while it is good
}

// Plan holds the limits of the projects that have it.
type Plan struct {
	Name               string   `json:"name"`
	ConcurrentSessions int      `json:"concurrentSessions"`
	MaxTimeoutSeconds  int      `json:"maxTimeoutSeconds"`
	ProxyGBPerMonth    *float64 `json:"proxyGbPerMonth"` // null: no cap
}

// rows of the record that only this package sees

// head is the one row that every command rewrites.
type head struct {
	Index      uint64 `json:"index"` // of the last command applied
	Clock      int64  `json:"clock"` // highest command time seen, Unix milliseconds: ages are counted by it
	Remembered int    `json:"remembered"`
	SigningKey []byte `json:"signingKey,omitempty"`
}

// idemKey remembers which session a create with an idempotency key made.
type idemKey struct {
	ProjectID string `json:"projectId"`
	Key       string `json:"key"`
	SessionID string `json:"sessionId"`
	At        int64  `json:"at"` // Unix milliseconds
}

// answer is the remembered result of a command.
type answer struct {
	ID     string `json:"id"`
	Index  uint64 `json:"index"` // of the command in the log
	At     int64  `json:"at"`    // Unix milliseconds
	Result Result `json:"result"`
}
