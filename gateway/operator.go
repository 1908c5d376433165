package main

import (
	"context"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/api"
	"github.com/berth-dev/berth/shared/apierr"
)

// operator answers at the admin socket; keys and hosts are the directory's.
type operator struct{ directory }

// Usage reports on a project, or on all of them.
func (o operator) Usage(ctx context.Context, project string, w accounts.Window) ([]api.AdminUsage, error) {
	view := o.fresh(ctx)
	var all []api.AdminUsage
	for p := range view.Projects() {
		if project == "" || p.ID == project {
			all = append(all, api.AdminUsage{ProjectID: p.ID, Plan: p.Plan, Usage: accounts.Report(view, p.ID, w, time.Now(), o.rates)})
		}
	}
	if project != "" && len(all) == 0 {
		return nil, apierr.New(apierr.NotFound, "there is no project %q", project)
	}
	return all, nil
}

// Plans lists the plans with how many projects have them.
func (o operator) Plans(context.Context) ([]api.AdminPlan, error) {
	view := o.record.View()
	has := map[string]int{}
	for p := range view.Projects() {
		has[p.Plan]++
	}
	var all []api.AdminPlan
	for _, p := range view.Plans() {
		all = append(all, api.AdminPlan{Plan: p, Projects: has[p.Name]})
	}
	return all, nil
}

var _ api.Admin = operator{}
