package main

import (
	"context"
	"log/slog"
	"strings"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/api"
	"github.com/berth-dev/berth/gateway/hosts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/gateway/proxies"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/token"
)

// directory answers who calls, and what the operator asks at the admin socket.
type directory struct {
	record  *placement.Record
	hosts   *hosts.Hosts
	proxies *proxies.Proxies
	rates   accounts.Rates
	log     *slog.Logger
}

// places is the record as streams to agents follow sessions in it.
type places struct{ *placement.Record }

// WatchSession finds a session as this gateway knows it now.
func (p places) WatchSession(id string) (session.Session, bool, <-chan struct{}) {
	return p.View().WatchSession(id)
}

// Authenticate gives the caller of an API key.
func (d directory) Authenticate(ctx context.Context, key string) (accounts.Caller, error) {
	return accounts.Authenticate(ctx, d.record, key)
}

// Me describes the caller's project.
func (d directory) Me(_ context.Context, c accounts.Caller) (accounts.Me, error) {
	return accounts.Describe(d.record.View(), c, time.Now()), nil
}

// CreateKey makes an API key of a project, and the project when it is new. The
// plaintext is shown once and stored nowhere.
func (d directory) CreateKey(ctx context.Context, project, plan string) (plaintext, id string, err error) {
	for _, known := range d.record.View().Plans() {
		if strings.EqualFold(plan, known.Name) { // people type "scale"
			plan = known.Name
		}
	}
	secret := token.NewAPIKey()
	key, err := d.record.PutKey(ctx, placement.Project{ID: project, Name: project, Plan: plan}, placement.Key{Hash: secret.Hash()})
	if err != nil {
		return "", "", err
	}
	return secret.Plaintext(d.record.View().Index()), key.ID, nil
}

// RevokeKey makes a key fail for good.
func (d directory) RevokeKey(ctx context.Context, id string) error {
	_, err := d.record.RevokeKey(ctx, id)
	return err
}

// ListKeys lists all keys.
func (d directory) ListKeys(context.Context) ([]api.AdminKey, error) {
	view := d.record.View()
	out := []api.AdminKey{}
	for _, k := range view.Keys("") {
		project, _ := view.Project(k.ProjectID)
		listed := api.AdminKey{ID: k.ID, ProjectID: k.ProjectID, Plan: project.Plan, CreatedAt: k.CreatedAt}
		if !k.RevokedAt.IsZero() {
			listed.RevokedAt = &k.RevokedAt
		}
		out = append(out, listed)
	}
	return out, nil
}

// Hosts lists the living hosts.
func (d directory) Hosts(context.Context) ([]placement.Host, error) { return d.hosts.List(), nil }

// refreshWithin is how long a report waits for proxyds. What they carried and
// could not tell by then, the next report has.
const refreshWithin = 5 * time.Second

// fresh is the record with all that proxyds had counted.
func (d directory) fresh(ctx context.Context) *placement.View {
	ctx, cancel := context.WithTimeout(ctx, refreshWithin)
	defer cancel()
	if err := d.proxies.Refresh(ctx); err != nil {
		d.log.Warn("a report of use may lack the last seconds of proxy data", "error", err)
	}
	return d.record.View()
}

// Usage reports what the caller's project used.
func (d directory) Usage(ctx context.Context, c accounts.Caller, w accounts.Window) (accounts.Usage, error) {
	return accounts.Report(d.fresh(ctx), c.ProjectID, w, time.Now(), d.rates), nil
}

// Pricing is the public price table.
func (d directory) Pricing() accounts.Prices { return d.rates.Prices }
