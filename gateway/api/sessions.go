package api

import (
	"context"
	"net/http"
	"strings"
	"time"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/session"
)

func (c *call) createSession() error {
	req, err := c.createRequest()
	if err != nil {
		return err
	}
	v, existing, err := c.srv.cfg.Service.Create(c.ctx, c.caller, req)
	if err != nil {
		return err
	}
	if existing {
		return c.json(http.StatusOK, sessionOf(v))
	}
	if req.IdempotencyKey == "" && (c.ctx.Err() != nil || leftNow(c.rc.Conn())) {
		// Nobody will read of this session. With a key the client may ask again.
		if _, err := c.srv.cfg.Service.Release(context.WithoutCancel(c.ctx), c.caller, v.Session.ID); err != nil {
			c.srv.cfg.Log.Warn("a session whose client had left runs on", "session", v.Session.ID, "error", err)
		}
		return errClientGone
	}
	c.srv.cfg.Log.Info("session created", "session", v.Session.ID, "project", v.Session.ProjectID, "kind", v.Session.Kind,
		"request", c.id, "took", time.Since(c.began))
	return c.json(http.StatusCreated, sessionOf(v))
}

func (c *call) createRequest() (req sessions.CreateRequest, err error) {
	var params api.CreateSessionParams
	if err := c.params(&params); err != nil {
		return req, err
	}
	var body api.CreateSession
	if _, err := c.decode(&body); err != nil {
		return req, err
	}
	kind, ok := session.KindOf(or(body.Browser), or(body.Shell))
	if !ok {
		return req, apierr.New(apierr.InvalidRequest, "browser, shell: at least one must be true")
	}
	setup := or(body.Setup)
	if len(setup) > 0 && !kind.HasShell() {
		return req, apierr.New(apierr.InvalidRequest, "setup: needs a shell: also send shell true")
	}
	proxy, err := egress.ParseSetting(body.Proxy, egress.Sticky)
	if err != nil {
		return req, err
	}
	view := or(body.Viewport)
	return sessions.CreateRequest{
		Kind: kind, Timeout: or(body.Timeout), KeepAlive: or(body.KeepAlive),
		Viewport:     session.Viewport{Width: view.Width, Height: view.Height},
		UserMetadata: or(body.UserMetadata), Captcha: string(or(body.Captcha)), Setup: setup,
		Region: or(body.Region), StrictRegion: or(body.StrictRegion), IdempotencyKey: or(params.IdempotencyKey), Proxy: proxy,
	}, nil
}

func (c *call) listSessions() error {
	var p api.ListSessionsParams
	if err := c.params(&p); err != nil {
		return err
	}
	page, next, err := c.srv.cfg.Service.List(c.ctx, c.caller, sessions.ListRequest{
		Status: session.Status(or(p.Status)), Region: or(p.Region), Metadata: or(p.Metadata), Cursor: or(p.Cursor), Limit: or(p.Limit)})
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, api.SessionList{Data: sessionsOf(page), NextCursor: optional(next)})
}

func (c *call) getSession() error {
	v, err := c.srv.cfg.Service.Get(c.ctx, c.caller, c.sessionID())
	return c.session(v, err)
}

func (c *call) patchSession() error {
	var body api.PatchSession
	if _, err := c.decode(&body); err != nil {
		return err
	}
	req := sessions.PatchRequest{
		KeepAlive: body.KeepAlive, UserMetadata: or(body.UserMetadata), Timeout: body.Timeout, Captcha: (*string)(body.Captcha)}
	if body.Proxy != nil { // null removes it, and is not nil
		to, err := egress.ParseSetting(body.Proxy, egress.Sticky)
		if err != nil {
			return err
		}
		req.Proxy = &session.ProxyPatch{To: to}
	}
	v, err := c.srv.cfg.Service.Patch(c.ctx, c.caller, c.sessionID(), req)
	return c.session(v, err)
}

func (c *call) rotateProxy() error {
	v, err := c.srv.cfg.Service.RotateProxy(c.ctx, c.caller, c.sessionID())
	return c.session(v, err)
}

func (c *call) releaseSession() error {
	v, err := c.srv.cfg.Service.Release(c.ctx, c.caller, c.sessionID())
	return c.session(v, err)
}

func (c *call) session(v sessions.View, err error) error {
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, sessionOf(v))
}

func (c *call) releaseAll() error {
	ended, err := c.srv.cfg.Service.ReleaseAll(c.ctx, c.caller)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, api.ReleasedList{Data: sessionsOf(ended)})
}

func (c *call) freshURLs() error {
	u, err := c.srv.cfg.Service.Live(c.ctx, c.caller, c.sessionID())
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, api.LiveUrls{LiveUrl: u.Live, TerminalUrl: optional(u.Terminal)})
}

func (c *call) rotateURLs() error {
	var body api.RotateUrls
	if _, err := c.decode(&body); err != nil {
		return err
	}
	u, err := c.srv.cfg.Service.RotateURLs(c.ctx, c.caller, c.sessionID(), or(body.Disconnect))
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, api.SessionUrls{ConnectUrl: optional(u.Connect), LiveUrl: u.Live, TerminalUrl: optional(u.Terminal)})
}

func (c *call) me() error {
	me, err := c.srv.cfg.Accounts.Me(c.ctx, c.caller)
	if err != nil {
		return err
	}
	return c.json(http.StatusOK, me)
}

func (c *call) healthz() error { return c.text("ok\n") }

func (c *call) readyz() error {
	if c.srv.cfg.Ready != nil {
		if err := c.srv.cfg.Ready(); err != nil {
			return apierr.Wrap(err, apierr.Unavailable, "not ready: %s", err)
		}
	}
	return c.text("ready\n")
}

func (c *call) text(s string) error {
	c.head(http.StatusOK, "text/plain; charset=utf-8")
	c.rc.SetBodyString(strings.Clone(s))
	return nil
}
