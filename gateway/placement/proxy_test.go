package placement

import (
	"testing"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/session"
)

// A setting comes whole out of the log, its sealed password with it, and the
// clear one never goes in.
func TestProxySettingInTheLog(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	to := &egress.Setting{List: true, Rules: []egress.Rule{
		{Type: egress.None, IP: egress.Sticky, DomainPattern: `<\.x$`},
		{Type: egress.Custom, IP: egress.Rotating, Scope: egress.ScopeAll, Server: "http://a:1", Username: "u", Sealed: []byte{1, 2}, Password: "hunter2"}}}
	s := l.must(l.do(patchSession, patchSessionData{"a", session.Patch{Proxy: &session.ProxyPatch{To: to}}})).Session
	if s.Proxy == nil || len(s.Proxy.Rules) != 2 || string(s.Proxy.Rules[1].Sealed) != "\x01\x02" || s.Proxy.Rules[1].Password != "" ||
		string(s.Proxy.Shown()) != string(to.Shown()) || s.SettingsVersion != 1 {
		t.Errorf("set: %+v", s)
	}
	if s = l.must(l.do(patchSession, patchSessionData{"a", session.Patch{}})).Session; s.Proxy == nil {
		t.Error("a patch without a proxy removed it")
	}
	if s = l.must(l.do(patchSession, patchSessionData{"a", session.Patch{Proxy: &session.ProxyPatch{}}})).Session; s.Proxy != nil {
		t.Errorf("removed: %+v", s)
	}
}

func TestRotateProxy(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	if err := l.do(rotateProxy, rotateProxyData{"a"}).Err(); !apierr.Is(err, apierr.InvalidRequest) {
		t.Errorf("without a proxy: %v", err)
	}
	set := &egress.Setting{Rules: []egress.Rule{{Type: egress.Residential, IP: egress.Sticky}}}
	l.must(l.do(patchSession, patchSessionData{"a", session.Patch{Proxy: &session.ProxyPatch{To: set}}}))
	cmd := l.command(rotateProxy, rotateProxyData{"a"})
	for range 2 { // a retry of the same command turns once
		if s := l.must(l.run(cmd)).Session; s.ProxyTurn != 1 || s.SettingsVersion != 2 {
			t.Errorf("turn %d of version %d", s.ProxyTurn, s.SettingsVersion)
		}
	}
	if s := l.must(l.do(rotateProxy, rotateProxyData{"a"})).Session; s.ProxyTurn != 2 {
		t.Errorf("turn %d", s.ProxyTurn)
	}
	l.must(l.do(endSession, endSessionData{ID: "a", At: l.now, Reason: session.Released}))
	if err := l.do(rotateProxy, rotateProxyData{"a"}).Err(); !apierr.Is(err, apierr.SessionNotRunning) {
		t.Errorf("of an ended session: %v", err)
	}
	if err := l.do(rotateProxy, rotateProxyData{"never"}).Err(); !apierr.Is(err, apierr.NotFound) {
		t.Errorf("of none: %v", err)
	}
}
