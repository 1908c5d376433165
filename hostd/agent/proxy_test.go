package main

import (
	"bytes"
	"net/http"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/session"
)

// proxied says what a new command of a shell knows of the proxy.
func (r *rig) proxied(shell string) bool {
	r.t.Helper()
	switch got := r.run(shell, `echo "$HTTP_PROXY $all_proxy"`); got {
	case "http://169.254.77.1:78 http://169.254.77.1:78\n":
		return true
	case " \n":
	default:
		r.t.Errorf("shell %q sees %q", shell, got)
	}
	return false
}

func (r *rig) tellProxy(version uint64, shell bool) {
	r.t.Helper()
	r.do(r.control, http.MethodPost, agentlink.ControlProxy, agentlink.Proxy{Shell: shell, Version: version}, 204)
}

func TestProxyOrders(t *testing.T) {
	r := start(t, session.Shell)
	r.do(r.control, http.MethodPost, agentlink.ControlProxy, agentlink.Proxy{Shell: true}, 400) // no session yet
	r.session(agentlink.Start{Kind: session.Shell, Proxy: agentlink.Proxy{Shell: true, Version: 3}, Setup: []string{`echo "$http_proxy" >seen`}})
	if got := r.run("default", "cat seen"); got != "http://169.254.77.1:78\n" {
		t.Errorf("setup saw %q", got)
	}
	r.do(r.control, http.MethodGet, agentlink.ControlProxy, nil, 405)
	for i, step := range []struct {
		version     uint64
		shell, want bool
	}{
		{3, true, true}, {4, false, false}, {4, false, false},
		{3, true, false}, // late
		{0, true, false}, {6, true, true}, {5, false, true},
	} {
		r.tellProxy(step.version, step.shell)
		for _, shell := range []string{"default", "other"} {
			if got := r.proxied(shell); got != step.want {
				t.Errorf("step %d: shell %q is told %v", i, shell, got)
			}
		}
	}
}

// An order at the thaw is obeyed before anything goes on, here and on the
// machine that a session's portable state goes to.
func TestProxyAtTheThaw(t *testing.T) {
	a := start(t, session.Shell)
	a.session(agentlink.Start{Kind: session.Shell, Proxy: agentlink.Proxy{Shell: true, Version: 1}})
	a.run("default", "export OWN=1; export all_proxy=http://169.254.77.1:78")
	thaw := func(r *rig, version uint64, shell bool) {
		r.do(r.control, http.MethodPost, agentlink.ControlThaw, agentlink.Thaw{Now: time.Now(), Entropy: make([]byte, 64),
			Proxy: &agentlink.Proxy{Shell: shell, Version: version}}, 204)
	}
	a.do(a.control, http.MethodPost, agentlink.ControlFreeze, agentlink.Freeze{}, 204)
	thaw(a, 2, false)
	if a.proxied("default") {
		t.Error("after a thaw that says no it is told")
	}
	a.tellProxy(3, true)
	if !a.proxied("default") {
		t.Error("it is not told")
	}
	a.do(a.control, http.MethodPost, agentlink.ControlFreeze, agentlink.Freeze{Portable: true}, 204)
	stream := a.export()
	for version, shell := range map[uint64]bool{3: true, 4: false} {
		b := start(t, session.Shell)
		b.session(agentlink.Start{Kind: session.Shell, Held: true, Proxy: agentlink.Proxy{Shell: true, Version: 3}})
		if code, text := b.load(bytes.NewReader(stream)); code != 204 {
			t.Fatalf("import: %d %s", code, text)
		}
		thaw(b, version, shell)
		for _, name := range []string{"default", "new"} {
			if got := b.proxied(name); got != shell {
				t.Errorf("version %d, shell %q: told %v", version, name, got)
			}
		}
		if got := b.run("default", "echo $OWN"); got != "1\n" {
			t.Errorf("the shell lost its own variable: %q", got)
		}
	}
}

// A machine without a shell takes the orders and has nobody to tell.
func TestProxyOrderWithoutShell(t *testing.T) {
	m := newMachine(session.Browser, nil)
	defer m.end()
	m.setProxy(agentlink.Proxy{Shell: true, Version: 1})
	if m.proxied != 1 {
		t.Errorf("version %d", m.proxied)
	}
}
