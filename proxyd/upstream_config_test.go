package main

import (
	"context"
	"encoding/pem"
	"errors"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/refusals"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

func TestProvidersAndAuthoritiesAreRead(t *testing.T) {
	dir := t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	srv := httptest.NewTLSServer(nil)
	defer srv.Close()
	base := config{Listen: "127.0.0.1:1", GossipAddr: "127.0.0.1:2", Control: "127.0.0.1:3"}
	good := base
	good.Providers = file("good", `{"providers":[{"name":"a","types":["residential"],"server":"http://p.test:1"}]}`)
	good.UpstreamCA = file("ca", string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw})))
	if err := good.complete(); err != nil || len(good.providers) != 1 || good.roots == nil {
		t.Fatalf("%v %+v", err, good.providers)
	}
	for want, change := range map[string]func(*config){
		"--providers: open":            func(c *config) { c.Providers = filepath.Join(dir, "none") },
		"--providers: " + dir + "/bad": func(c *config) { c.Providers = file("bad", `{"providers":[{"name":"a"}]}`) },
		"--upstream-ca: open":          func(c *config) { c.UpstreamCA = filepath.Join(dir, "none") },
		"no certificate in it":         func(c *config) { c.UpstreamCA = file("empty", "hello") },
	} {
		c := base
		change(&c)
		if err := c.complete(); err == nil || !strings.Contains(strings.Replace(err.Error(), "stat ", "open ", 1), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
}

// Members of the cluster hear of refusals, until proxyd has served its last connection.
func TestRefusalsAreServed(t *testing.T) {
	secret, counts, feed := trust.New(), meter.New(5), refusals.New()
	served, over := context.WithCancel(context.Background())
	defer over()
	srv := httptest.NewServer((&controlAPI{ctx: served, served: served, secret: secret, counts: counts, ledger: keep(t, counts), feed: feed}).mux())
	defer srv.Close()
	stranger := proxylink.NewClient(srv.Listener.Addr().String(), trust.New())
	defer stranger.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := stranger.FollowRefusals(ctx, "h", nil); err == nil || !strings.Contains(err.Error(), "proof") {
		t.Errorf("a stranger: %v", err)
	}
	member := proxylink.NewClient(srv.Listener.Addr().String(), secret)
	defer member.Close()
	if err := member.FollowRefusals(ctx, "", nil); err == nil || !strings.Contains(err.Error(), "host") {
		t.Errorf("no host: %v", err)
	}
	feed.Put("h", proxylink.Refused{SessionID: "s", Reason: egress.BadTarget})
	var got []proxylink.Refused
	err := member.FollowRefusals(ctx, "h", func(r proxylink.Refused) error {
		if got = append(got, r); len(got) == 1 {
			feed.Put("h", proxylink.Refused{SessionID: "last"})
			over()
		}
		return nil
	})
	if err == nil || errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the stream ended with %v", err)
	}
	if len(got) != 2 || got[0].Reason != egress.BadTarget || got[1].SessionID != "last" {
		t.Errorf("%+v", got)
	}
}
