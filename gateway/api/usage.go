package api

import (
	"net/http"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
)

func (c *call) usage() error {
	var params api.UsageParams
	if err := c.params(&params); err != nil {
		return err
	}
	w, err := window(params.From, params.To, time.Now())
	if err != nil {
		return err
	}
	u, err := c.srv.cfg.Accounts.Usage(c.ctx, c.caller, w)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, u)
}

// window is the one that a client asks for: this month to date where it leaves
// its edges out.
func window(from, to *time.Time, now time.Time) (accounts.Window, error) {
	w, end := accounts.MonthToDate(now), now
	if from != nil {
		w.From = *from
	}
	if to != nil {
		w.To, end = *to, *to
	}
	if !w.From.Before(end) {
		return w, apierr.New(apierr.InvalidRequest, "from: %s must be before the window's end, which is %s",
			w.From.UTC().Format(time.RFC3339), end.UTC().Format(time.RFC3339))
	}
	return w, nil
}

func (c *call) pricing() error {
	return c.json(http.StatusOK, c.srv.cfg.Accounts.Pricing())
}

// adminUsage answers for one project, or for all.
func (c *call) adminUsage() error {
	args := c.rc.QueryArgs()
	from, err := moment("from", string(args.Peek("from")))
	if err != nil {
		return err
	}
	to, err := moment("to", string(args.Peek("to")))
	if err != nil {
		return err
	}
	w, err := window(from, to, time.Now())
	if err != nil {
		return err
	}
	all, err := c.srv.cfg.Admin.Usage(c.ctx, string(args.Peek("project")), w)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, map[string]any{"data": append([]AdminUsage{}, all...)})
}

func moment(name, text string) (*time.Time, error) {
	if text == "" {
		return nil, nil
	}
	for _, layout := range []string{time.RFC3339, time.DateOnly} {
		if t, err := time.Parse(layout, text); err == nil {
			return &t, nil
		}
	}
	return nil, apierr.New(apierr.InvalidRequest, "%s: %q must be a day like 2026-11-01 or a moment like 2026-11-01T12:00:00Z", name, text)
}

func (c *call) adminPlans() error {
	plans, err := c.srv.cfg.Admin.Plans(c.ctx)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, map[string]any{"data": append([]AdminPlan{}, plans...)})
}
