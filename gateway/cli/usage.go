package main

import (
	"context"
	"encoding/json"
	"net/http"
	"net/url"
	"strconv"
)

type usageCmd struct {
	adminFlags
	Project string `help:"One project. Default: all, a line each." placeholder:"NAME"`
	From    string `help:"Begin of the window, a day (2026-11-01, UTC) or a moment (2026-11-01T12:00:00Z). Default: the 1st of this month." placeholder:"TIME"`
	To      string `help:"End of the window, not part of it: 2026-12-01 is the whole of November. Default: now." placeholder:"TIME"`
	Days    bool   `help:"A line for each day (UTC) on which something was used, instead of the sums."`
}

// Help is what 'berth usage --help' says beside the flags.
func (usageCmd) Help() string {
	return `What projects used and what that costs, as their GET /v1/usage has it: running time to the
millisecond, proxy data to the byte, money to the billionth of a dollar. Windows that touch add up.

  berth usage                                       this month so far, all projects
  berth usage --project acme --days                 day by day
  berth usage --from 2026-10-01 --to 2026-11-01     the whole of October
  berth usage --json | jq '[.[].costUsd] | add'     for programs

Prices come from the tariff file of the gateway (--tariff); use is priced as they are now.`
}

// usageLine is the admin socket's report of a project; the numbers stay as they
// are written there.
type usageLine struct {
	ProjectID      string      `json:"projectId"`
	Plan           string      `json:"plan"`
	Sessions       int         `json:"sessions"`
	BrowserSeconds json.Number `json:"browserSeconds"`
	VCPUSeconds    json.Number `json:"sandboxVcpuSeconds"`
	GiBSeconds     json.Number `json:"sandboxGibSeconds"`
	Proxy          struct {
		Residential json.Number `json:"residentialGb"`
		Datacenter  json.Number `json:"datacenterGb"`
		Custom      json.Number `json:"customGb"`
		CostUSD     json.Number `json:"costUsd"`
	} `json:"proxy"`
	CostUSD json.Number `json:"costUsd"`
	ByDay   []struct {
		Date    string      `json:"date"`
		Seconds json.Number `json:"seconds"`
		CostUSD json.Number `json:"costUsd"`
	} `json:"byDay"`
}

func (c usageCmd) Run(ctx context.Context) error {
	query := url.Values{}
	for name, value := range map[string]string{"project": c.Project, "from": c.From, "to": c.To} {
		if value != "" {
			query.Set(name, value)
		}
	}
	var answer struct {
		Data []usageLine `json:"data"`
	}
	if err := c.ask(ctx, http.MethodGet, "/admin/usage?"+query.Encode(), nil, &answer); err != nil {
		return err
	}
	switch {
	case c.JSON:
		return printJSON(answer.Data)
	case c.Days:
		return table(out, "PROJECT\tDAY\tSECONDS\tUSD", usageDays(answer.Data))
	}
	return table(out, "PROJECT\tPLAN\tSESSIONS\tBROWSER S\tVCPU S\tGIB S\tRESIDENTIAL GB\tDATACENTER GB\tCUSTOM GB\tDATA USD\tALL USD", usageSums(answer.Data))
}

func usageSums(all []usageLine) (rows [][]string) {
	for _, u := range all {
		rows = append(rows, []string{u.ProjectID, u.Plan, strconv.Itoa(u.Sessions), string(u.BrowserSeconds), string(u.VCPUSeconds), string(u.GiBSeconds),
			string(u.Proxy.Residential), string(u.Proxy.Datacenter), string(u.Proxy.Custom), string(u.Proxy.CostUSD), string(u.CostUSD)})
	}
	return rows
}

func usageDays(all []usageLine) (rows [][]string) {
	for _, u := range all {
		for _, d := range u.ByDay {
			rows = append(rows, []string{u.ProjectID, d.Date, string(d.Seconds), string(d.CostUSD)})
		}
	}
	return rows
}

type plansCmd struct{ adminFlags }

// Help is what 'berth plans --help' says beside the flags.
func (plansCmd) Help() string {
	return `The plans in the record and how many projects have each. PROXY GB is what a plan's residential and
datacenter proxies may carry in a calendar month (UTC): 0 means none of them, "no cap" no end.

To change or add plans, put them into the gateway's tariff file and start the gateway again:

  {"plans": [{"name": "Hobby", "concurrentSessions": 25, "maxTimeoutSeconds": 7200, "proxyGbPerMonth": 5}]}
  gateway --tariff /etc/berth/tariff.json           or $BERTH_TARIFF

A plan of the file replaces the one of its name, for its projects at once; what a project has is set with
'berth keys create --project NAME --plan PLAN'. Plans of the record that the file does not name stay as they are; a new cluster has the file's alone.`
}

func (c plansCmd) Run(ctx context.Context) error {
	var answer struct {
		Data []struct {
			Name               string       `json:"name"`
			ConcurrentSessions int          `json:"concurrentSessions"`
			MaxTimeoutSeconds  int          `json:"maxTimeoutSeconds"`
			ProxyGBPerMonth    *json.Number `json:"proxyGbPerMonth"`
			Projects           int          `json:"projects"`
		} `json:"data"`
	}
	if err := c.ask(ctx, http.MethodGet, "/admin/plans", nil, &answer); err != nil {
		return err
	}
	if c.JSON {
		return printJSON(answer.Data)
	}
	var rows [][]string
	for _, p := range answer.Data {
		gb := "no cap"
		if p.ProxyGBPerMonth != nil {
			gb = string(*p.ProxyGBPerMonth)
		}
		rows = append(rows, []string{p.Name, strconv.Itoa(p.ConcurrentSessions), strconv.Itoa(p.MaxTimeoutSeconds), gb, strconv.Itoa(p.Projects)})
	}
	return table(out, "PLAN\tSESSIONS\tMAX TIMEOUT S\tPROXY GB\tPROJECTS", rows)
}
