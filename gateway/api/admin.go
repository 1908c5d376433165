package api

import (
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"regexp"
	"time"

	"github.com/fasthttp/router"
	"github.com/valyala/fasthttp"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
)

// Admin is what the operator's command asks for, over a socket that only the
// gateway's own user can open. It is not in openapi.yaml: no customer sees it.
type Admin interface {
	// CreateKey makes an API key, and its project when that is new; an empty
	// plan keeps the project's. The plaintext is given once.
	CreateKey(ctx context.Context, project, plan string) (plaintext, id string, err error)
	ListKeys(ctx context.Context) ([]AdminKey, error)
	// RevokeKey makes a key fail for good; not_found for an unknown id.
	RevokeKey(ctx context.Context, id string) error
	Hosts(ctx context.Context) ([]placement.Host, error)
	// Usage reports on a project, or on all of them when it is empty; not_found
	// for an unknown one.
	Usage(ctx context.Context, project string, w accounts.Window) ([]AdminUsage, error)
	Plans(ctx context.Context) ([]AdminPlan, error)
}

// AdminUsage is what a project used.
type AdminUsage struct {
	ProjectID string `json:"projectId"`
	Plan      string `json:"plan"`
	accounts.Usage
}

// AdminPlan is a plan and how many projects have it.
type AdminPlan struct {
	placement.Plan
	Projects int `json:"projects"`
}

// AdminKey is an API key without its secret.
type AdminKey struct {
	ID        string     `json:"id"`
	ProjectID string     `json:"projectId"`
	Plan      string     `json:"plan"`
	CreatedAt time.Time  `json:"createdAt"`
	RevokedAt *time.Time `json:"revokedAt"` // null while it is good
}

// adminHost is a host as the command shows it.
type adminHost struct {
	Name   string         `json:"name"`
	Region string         `json:"region"`
	Driver string         `json:"driver"`
	Free   int            `json:"free"`
	Warm   map[string]int `json:"warm"` // by kind
}

const maxAdminBytes = 64 << 10

var projectName = regexp.MustCompile(`^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$`)

// ServeAdmin answers on a listener of mode 0600 until Shutdown:
//
//	POST   /admin/keys {project, plan?} → {key, id, projectId}
//	GET    /admin/keys                  → {data: [AdminKey]}
//	DELETE /admin/keys/{id}             → 204
//	GET    /admin/hosts                 → {data: [{name, region, driver, free, warm}]}
//	GET    /admin/usage?project&from&to → {data: [AdminUsage]}, of all projects without project
//	GET    /admin/plans                 → {data: [AdminPlan]}
func (s *Server) ServeAdmin(ln net.Listener) error { return s.admin.Serve(ln) }

func (s *Server) newAdmin() *fasthttp.Server {
	r := router.New()
	r.NotFound, r.MethodNotAllowed = s.notFound, s.methodNotAllowed
	r.RedirectTrailingSlash, r.RedirectFixedPath, r.HandleOPTIONS = false, false, false
	r.POST("/admin/keys", s.adminCall((*call).adminCreateKey))
	r.GET("/admin/keys", s.adminCall((*call).adminListKeys))
	r.DELETE("/admin/keys/{id}", s.adminCall((*call).adminRevokeKey))
	r.GET("/admin/hosts", s.adminCall((*call).adminHosts))
	r.GET("/admin/usage", s.adminCall((*call).adminUsage))
	r.GET("/admin/plans", s.adminCall((*call).adminPlans))
	return &fasthttp.Server{Handler: r.Handler, ErrorHandler: s.malformed, Logger: quiet{s.cfg.Log}, ReadTimeout: headerTime,
		IdleTimeout: idleTime, MaxRequestBodySize: maxAdminBytes, NoDefaultServerHeader: true, NoDefaultContentType: true, CloseOnShutdown: true}
}

func (s *Server) adminCall(h handler) fasthttp.RequestHandler {
	return func(rc *fasthttp.RequestCtx) {
		c := s.newCall(rc, nil)
		c.body = nil // this server reads bodies itself
		if err := c.run(route{handler: h}); err != nil {
			c.fail(err)
		}
		c.finish()
	}
}

func (c *call) adminCreateKey() error {
	var in struct{ Project, Plan string }
	d := json.NewDecoder(bytes.NewReader(c.rc.PostBody()))
	d.DisallowUnknownFields()
	if err := d.Decode(&in); err != nil {
		return apierr.Wrap(err, apierr.InvalidRequest, "body: must be {project, plan}")
	}
	if !projectName.MatchString(in.Project) {
		return apierr.New(apierr.InvalidRequest, "project: must be 1 to 64 letters, digits, '.', '_' or '-'")
	}
	key, id, err := c.srv.cfg.Admin.CreateKey(c.ctx, in.Project, in.Plan)
	if err != nil {
		return err
	}
	c.srv.cfg.Log.Info("API key created", "key", id, "project", in.Project)
	return c.json(http.StatusCreated, map[string]string{"key": key, "id": id, "projectId": in.Project})
}

func (c *call) adminListKeys() error {
	keys, err := c.srv.cfg.Admin.ListKeys(c.ctx)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, map[string]any{"data": append([]AdminKey{}, keys...)})
}

func (c *call) adminRevokeKey() error {
	if err := c.srv.cfg.Admin.RevokeKey(c.ctx, c.sessionID()); err != nil {
		return err
	}
	c.srv.cfg.Log.Info("API key revoked", "key", c.sessionID())
	c.rc.SetStatusCode(http.StatusNoContent)
	return nil
}

func (c *call) adminHosts() error {
	hosts, err := c.srv.cfg.Admin.Hosts(c.ctx)
	if err != nil {
		return err
	}
	out := make([]adminHost, len(hosts))
	for i, h := range hosts {
		out[i] = adminHost{Name: h.Name, Region: h.Region, Driver: h.Driver, Free: h.Free, Warm: map[string]int{}}
		for kind, n := range h.Warm {
			out[i].Warm[string(kind)] = n
		}
	}
	return c.json(http.StatusOK, map[string]any{"data": out})
}
