package placement

import (
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

func (c *change) putKey(d putKeyData) (Result, error) {
	project, err := c.project(d.Project)
	if err != nil {
		return Result{}, err
	}
	if d.Key.ID == "" || d.Key.Hash == "" || d.Key.ProjectID != project.ID {
		return Result{}, apierr.New(apierr.Internal, "a key needs id, hash and project")
	}
	known := first[Key](c.txn, tabKeys, byHash, []byte(d.Key.Hash))
	if known != nil && known.ProjectID != project.ID {
		return Result{}, apierr.New(apierr.InvalidRequest, "this key belongs to the project %s", known.ProjectID)
	}
	if known == nil && first[Key](c.txn, tabKeys, byID, []byte(d.Key.ID)) != nil {
		return Result{}, apierr.New(apierr.InvalidRequest, "id: there is another key %s", d.Key.ID)
	}
	c.put(tabProjects, project)
	if known != nil {
		return Result{Key: known, Already: true}, nil
	}
	c.put(tabKeys, &d.Key)
	return Result{Key: &d.Key}, nil
}

// project is the one that want names, new or with what want gives changed.
func (c *change) project(want Project) (*Project, error) {
	if want.ID == "" || len(want.ID) > 100 || strings.ContainsFunc(want.ID, func(r rune) bool { return r <= ' ' || r == 0x7f }) {
		return nil, apierr.New(apierr.InvalidRequest, "project: %q is no project id: want 1 to 100 characters without spaces", want.ID)
	}
	p := want
	if known := first[Project](c.txn, tabProjects, byID, []byte(want.ID)); known != nil {
		p = *known
		if want.Name != "" {
			p.Name = want.Name
		}
		if want.Plan != "" {
			p.Plan = want.Plan
		}
	}
	if p.Name == "" {
		p.Name = p.ID
	}
	if first[Plan](c.txn, tabPlans, byID, []byte(p.Plan)) == nil {
		return nil, apierr.New(apierr.InvalidRequest, "plan: there is no plan %q: choose one of %s", p.Plan, c.planNames())
	}
	return &p, nil
}

func (c *change) planNames() string {
	var names []string
	for p := range rows[*Plan](&View{txn: c.txn}, tabPlans, byID, nil) {
		names = append(names, p.Name)
	}
	return strings.Join(names, ", ")
}

func (c *change) revokeKey(d revokeKeyData) (Result, error) {
	known := first[Key](c.txn, tabKeys, byID, []byte(d.ID))
	if known == nil {
		return Result{}, apierr.New(apierr.NotFound, "there is no key %q", d.ID)
	}
	if !known.RevokedAt.IsZero() {
		return Result{Key: known, Already: true}, nil
	}
	k := *known
	k.RevokedAt = time.UnixMilli(c.cmd.At).UTC()
	c.put(tabKeys, &k)
	return Result{Key: &k}, nil
}

func (c *change) setPlans(d setPlansData) (Result, error) {
	bad := slices.IndexFunc(d.Plans, func(p Plan) bool {
		return p.Name == "" || p.ConcurrentSessions < 0 || p.MaxTimeoutSeconds < session.MinTimeout
	})
	if bad >= 0 {
		return Result{}, apierr.New(apierr.InvalidRequest, "plans: %q needs a name, concurrentSessions of at least 0 and maxTimeoutSeconds of at least %d",
			d.Plans[bad].Name, session.MinTimeout)
	}
	for _, p := range d.Plans {
		c.put(tabPlans, &p)
	}
	return Result{}, nil
}
