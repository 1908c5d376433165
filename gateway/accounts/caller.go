package accounts

import (
	"context"
	"fmt"
	"time"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/token"
)

// Caller is who presented a good API key.
type Caller struct {
	ProjectID string
	KeyID     string
	Plan      placement.Plan
}

// Authenticate finds out who presents an API key; anything else than a good
// key is unauthorized. A key this gateway has not heard of is looked up again
// after Fresh, so a new key never fails on a gateway that lags.
func Authenticate(ctx context.Context, r *placement.Record, presented string) (Caller, error) {
	if presented == "" {
		return Caller{}, apierr.New(apierr.Unauthorized, "an API key is required: send it as x-api-key or Authorization: Bearer")
	}
	hash, minIndex, err := token.HashAPIKey(presented)
	if err != nil {
		return Caller{}, unauthorized()
	}
	view := r.View()
	key, ok := view.KeyByHash(hash)
	if !ok {
		if err := r.Fresh(ctx, minIndex); err != nil {
			return Caller{}, fmt.Errorf("authenticate: %w", err)
		}
		view = r.View()
		key, ok = view.KeyByHash(hash)
	}
	if !ok || !key.RevokedAt.IsZero() { // revoked is for good: no later record says otherwise
		return Caller{}, unauthorized()
	}
	return callerOf(view, key)
}

func callerOf(view *placement.View, key placement.Key) (Caller, error) {
	project, ok := view.Project(key.ProjectID)
	plan, known := view.Plan(project.Plan)
	if !ok || !known {
		return Caller{}, fmt.Errorf("accounts: key %s: project %q or its plan %q is not in the record", key.ID, key.ProjectID, project.Plan)
	}
	return Caller{ProjectID: project.ID, KeyID: key.ID, Plan: plan}, nil
}

func unauthorized() error {
	return apierr.New(apierr.Unauthorized, "this API key is not valid: check that it is whole and not revoked")
}

// Me is the answer of GET /v1/auth/me.
type Me struct {
	Project MeProject `json:"project"`
	Usage   MeUsage   `json:"usage"`
}

// MeProject is the caller's project.
type MeProject struct {
	ID     string   `json:"id"`
	Name   string   `json:"name"`
	Plan   string   `json:"plan"`
	Limits MeLimits `json:"limits"`
}

// MeLimits are the plan's limits; ProxyGBPerMonth null means no cap.
type MeLimits struct {
	ConcurrentSessions int      `json:"concurrentSessions"`
	MaxTimeoutSeconds  int      `json:"maxTimeoutSeconds"`
	ProxyGBPerMonth    *float64 `json:"proxyGbPerMonth"`
}

// MeUsage is what the project uses now.
type MeUsage struct {
	RunningSessions int       `json:"runningSessions"`
	ProxyGB         Gigabytes `json:"proxyGb"` // this calendar month (UTC), of what the allowance counts
}

// Describe answers GET /v1/auth/me for a caller, as of now.
func Describe(view *placement.View, c Caller, now time.Time) Me {
	project, _ := view.Project(c.ProjectID)
	return Me{
		Project: MeProject{
			ID: c.ProjectID, Name: project.Name, Plan: c.Plan.Name,
			Limits: MeLimits{c.Plan.ConcurrentSessions, c.Plan.MaxTimeoutSeconds, c.Plan.ProxyGBPerMonth},
		},
		Usage: MeUsage{view.Running(c.ProjectID), Gigabytes(view.PlatformBytes(c.ProjectID, now))},
	}
}
