package shell

import (
	"testing"

	"github.com/berth-dev/berth/shared/agentlink"
)

const proxyURL = "http://169.254.77.1:78"

// show prints what a program sees of the proxy, and $? of the command before.
const show = `s=$?; printf '%s|%s|%s %s\n' "$(printenv HTTP_PROXY)" "$(printenv https_proxy)" "$(printenv NO_PROXY)" $s; unset s`

// seen is what show prints with and without the proxy.
const (
	seen   = proxyURL + "|" + proxyURL + "|localhost,127.0.0.1,::1 0\n"
	unseen = "|| 0\n"
)

func TestProxyVarsAreWhatTheSpecSays(t *testing.T) {
	vars := agentlink.ProxyVars()
	for _, k := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"} {
		if vars[k] != proxyURL {
			t.Errorf("%s=%s", k, vars[k])
		}
	}
	for _, k := range []string{"NO_PROXY", "no_proxy"} {
		if vars[k] != "localhost,127.0.0.1,::1" {
			t.Errorf("%s=%s", k, vars[k])
		}
	}
	if len(vars) != 8 {
		t.Errorf("%d variables", len(vars))
	}
}

func TestShellsAreToldOfTheProxy(t *testing.T) {
	s := newShells(t)
	if err := s.Warm(t.Context()); err != nil {
		t.Fatal(err)
	}
	for i, on := range []bool{true, true, false, true, false, false} {
		s.SetProxy(on)
		want := unseen
		if on {
			want = seen
		}
		for _, shell := range []string{Default, "", "strict"} {
			text := show
			if shell == "strict" {
				text = "set -euo pipefail; " + `printf '%s|%s|%s 0\n' "${HTTP_PROXY-}" "${https_proxy-}" "${NO_PROXY-}"`
			}
			if got := run(t, s, Command{Text: text, Shell: shell}); got.out != want {
				t.Errorf("step %d, shell %q: %+v", i, shell, got)
			}
		}
	}
	s.SetProxy(true)
	if got := run(t, s, Command{Text: show, Env: map[string]string{"HTTP_PROXY": "mine"}}); got.out != "mine|"+proxyURL+"|localhost,127.0.0.1,::1 0\n" {
		t.Errorf("a command's own variable: %+v", got)
	}
}

// What the customer set is the customer's, whatever the order.
func TestTheCustomersOwnProxyStays(t *testing.T) {
	s := newShells(t)
	for i, step := range []struct {
		on   bool
		text string
		want string
	}{
		{false, "export HTTP_PROXY=mine; readonly ALL_PROXY=fixed", ""},
		{true, show, "mine|" + proxyURL + "|localhost,127.0.0.1,::1 0\n"},
		{true, "echo $ALL_PROXY; unset https_proxy; export NO_PROXY=", "fixed\n"},
		{true, show, "mine|| 0\n"},
		{false, show, "mine|| 0\n"},
		{false, "echo ${NO_PROXY+set} ${no_proxy-unset} $ALL_PROXY; set -e", "set unset fixed\n"},
		{true, "echo ${NO_PROXY+set} $https_proxy $ALL_PROXY", "set " + proxyURL + " fixed\n"},
		{true, "set +e; (exit 7)", ""},
		{false, "echo $? ${https_proxy-unset}", "7 unset\n"},
	} {
		s.SetProxy(step.on)
		if got := sh(t, s, step.text); got.out != step.want || got.err != "" {
			t.Errorf("step %d: %+v, want %q", i, got, step.want)
		}
	}
}

// The session's own variables go before, and a change of the proxy leaves what
// the customer made of them.
func TestProxyBesideTheSessionsVariables(t *testing.T) {
	s := newShells(t)
	s.SetEnv(map[string]string{"HTTP_PROXY": "given", "A": "1"})
	sh(t, s, "export A=2")
	s.SetProxy(true)
	for _, shell := range []string{Default, ""} {
		if got := run(t, s, Command{Text: "echo $HTTP_PROXY $http_proxy", Shell: shell}); got.out != "given "+proxyURL+"\n" {
			t.Errorf("shell %q: %+v", shell, got)
		}
	}
	s.SetProxy(false)
	if got := sh(t, s, "echo $HTTP_PROXY ${http_proxy-none} $A"); got.out != "given none 2\n" {
		t.Errorf("%+v", got)
	}
}

// A shell that goes to another machine takes a change there as it would have here.
func TestProxyOfSavedShells(t *testing.T) {
	for _, c := range []struct {
		was, now bool
		own      string // what the customer did
		want     string
	}{
		{true, true, ":", seen},
		{true, false, ":", unseen},
		{false, true, ":", seen},
		{false, false, ":", unseen},
		{true, true, "unset https_proxy", proxyURL + "||localhost,127.0.0.1,::1 0\n"},
		{true, false, "export HTTP_PROXY=mine", "mine|| 0\n"},
		{false, true, "export HTTP_PROXY=mine", "mine|" + proxyURL + "|localhost,127.0.0.1,::1 0\n"},
	} {
		a, b := newShells(t), newShells(t)
		a.SetProxy(c.was)
		sh(t, a, c.own)
		saved := a.Save(t.Context(), false)
		b.SetProxy(c.now)
		if err := b.Restore(saved); err != nil {
			t.Fatal(err)
		}
		if again := b.Save(t.Context(), false); len(again) != 1 || again[0].Proxied != c.was {
			t.Errorf("%+v: saved again: %+v", c, again)
		}
		if got := sh(t, b, show); got.out != c.want {
			t.Errorf("%+v: %+v", c, got)
		}
	}
}
