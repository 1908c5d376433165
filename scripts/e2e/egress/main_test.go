// Package egress tries a session's way out with what customers use: real
// clients in real machines, real proxies as upstreams, sites and proxies on
// computers of their own (network namespaces), and proxyds that die.
package egress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
)

// providers are the platform's: loopback addresses are the operator's choice.
var providers struct {
	residential *upstream
	file        string // that names them to proxyd
}

// trusted certifies HTTPS proxies: the operator says so.
var trusted = testenv.NewAuthority()

// stack is shared by all tests: two proxyds, so that one can die, and two
// hosts, so that a session can move. Datacenter proxies have no provider.
var stack *testenv.Stack

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "berth-egress")
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(dir)
	providers.residential = startUpstream(mustListen("127.0.0.1:0"))
	defer providers.residential.stop()
	providers.file = filepath.Join(dir, "providers.json")
	ca := filepath.Join(dir, "ca.pem")
	if err := errors.Join(os.WriteFile(providers.file, providersFile(), 0o600), os.WriteFile(ca, trusted.PEM(), 0o600)); err != nil {
		panic(err)
	}
	stack = testenv.New(testenv.Options{Hosts: 2, Proxyds: 2, Pool: "browser=0,shell=1,both=1", Proxyd: []string{"--providers", providers.file, "--upstream-ca", ca, "--drain", "20s"}})
	return stack.Main(m)
}

func providersFile() []byte {
	b, _ := json.Marshal(map[string]any{"providers": []any{map[string]any{ // texts
		"name": "homes", "types": []string{"residential"}, "server": "http://" + providers.residential.addr,
		"username": "cust[-country-{country}][-session-{session}]", "password": "pw", "lowercase": true,
		"restricted": []any{map[string]any{"status": 403, "header": "X-Error", "contains": "not served"}},
	}}})
	return b
}

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// list is a JSON array.
type list = []any

// setProxy changes a session's proxy.
func setProxy(c *testenv.Client, id string, proxy any) (s api.Session) {
	c.Want(http.StatusOK, http.MethodPatch, "/v1/sessions/"+id, testenv.Fields{"proxy": proxy}, &s)
	return s
}

// goTo opens an address in the session's first page and gives its text.
func goTo(t *testing.T, s api.Session, url string) string {
	t.Helper()
	ctx := within(t, time.Minute)
	cdp, p := testenv.FirstPage(t, *s.ConnectUrl)
	defer cdp.Close()
	if err := p.Goto(ctx, url); err != nil {
		t.Fatalf("Chrome: %s: %v", url, err)
	}
	var text string
	if err := p.Evaluate(ctx, "document.body.innerText", &text); err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(text)
}

// fetch gives what curl in a session's default shell prints of an address.
func fetch(c *testenv.Client, id, url string) string {
	return c.Output(id, fmt.Sprintf("curl -sSk --max-time 60 %q", url))
}
