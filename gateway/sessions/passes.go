package sessions

import (
	"fmt"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/session"
)

// settings is what the host of a session in an epoch has to know of it, with a
// fresh pass: also a session without a proxy has one, which lets it straight out.
func (s *Service) settings(found session.Session, epoch uint64) (hostlink.Settings, error) {
	set := hostlink.Settings{Version: found.SettingsVersion, KeepAlive: found.KeepAlive, ExpiresAt: found.ExpiresAt,
		PassEpoch: epoch, PassExpires: time.Now().UTC().Add(proxylink.PassLife), ProxyTurn: found.ProxyTurn,
		ShellProxy: found.Kind.HasShell() && found.Proxy.Scope() == egress.ScopeAll}
	if found.Proxy != nil {
		set.Proxy = found.Proxy.Shown()
	}
	routes, err := s.routes(found)
	if err == nil {
		set.Pass, err = proxylink.SealPass(s.cfg.Secret, proxylink.Pass{SessionID: found.ID, ProjectID: found.ProjectID,
			Epoch: epoch, Version: found.SettingsVersion, Expires: set.PassExpires, Routes: routes})
	}
	if err != nil {
		return set, fmt.Errorf("pass of session %s: %w", found.ID, err)
	}
	return set, nil
}

// routes are the session's rules with all that it takes to follow them. Only
// here, on the way into a pass, is a password in the clear.
func (s *Service) routes(found session.Session) ([]proxylink.Route, error) {
	if found.Proxy == nil {
		return nil, nil
	}
	seed := found.ProxySeed
	if len(seed) == 0 { // of a session older than proxies: its id is its own at least
		seed = []byte(found.ID)
	}
	routes := make([]proxylink.Route, len(found.Proxy.Rules))
	for i, r := range found.Proxy.Bare().Rules {
		routes[i] = proxylink.Route{Rule: r, StickyID: egress.StickyID(seed, found.ProxyTurn, found.Proxy.Rules, i)}
		if sealed := found.Proxy.Rules[i].Sealed; len(sealed) > 0 {
			password, err := proxylink.OpenPassword(s.cfg.Secret, found.ID, sealed)
			if err != nil {
				return nil, err
			}
			routes[i].Password = password
		}
	}
	return routes, nil
}

// sealed is a setting as the record keeps it: passwords readable by gateways
// and proxyds alone.
func (s *Service) sealed(sessionID string, set *egress.Setting) (*egress.Setting, error) {
	kept := set.Bare()
	if kept == nil {
		return nil, nil
	}
	for i, r := range set.Rules {
		if r.Password == "" {
			continue
		}
		var err error
		if kept.Rules[i].Sealed, err = proxylink.SealPassword(s.cfg.Secret, sessionID, r.Password); err != nil {
			return nil, err
		}
	}
	return kept, nil
}

// passDue says whether a pass has to be renewed: it has lived half its life.
func passDue(expires, now time.Time) bool { return expires.Sub(now) < proxylink.PassLife/2 }

// mayProxy holds a proxy setting against plan and allowance (402).
func (s *Service) mayProxy(project string, plan placement.Plan, set *egress.Setting) error {
	if !set.Platform() {
		return nil
	}
	return accounts.CheckProxy(plan, s.record.View().PlatformBytes(project, time.Now()), set)
}

// mayProxyAgain holds a paused session's setting against them as they are now.
func (s *Service) mayProxyAgain(found session.Session) error {
	if !found.Proxy.Platform() {
		return nil
	}
	view := s.record.View()
	project, _ := view.Project(found.ProjectID)
	plan, ok := view.Plan(project.Plan)
	if !ok {
		return apierr.New(apierr.Internal, "project %s has the plan %q, which is not there", found.ProjectID, project.Plan)
	}
	return s.mayProxy(found.ProjectID, plan, found.Proxy)
}
