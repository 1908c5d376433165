package main

import (
	"context"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/trust"
)

func TestMain(m *testing.M) {
	if os.Getenv(runsProxyd) != "" {
		main()
		return
	}
	goleak.VerifyTestMain(m)
}

func TestConfigIsChecked(t *testing.T) {
	good := config{Listen: "127.0.0.1:1", GossipAddr: "127.0.0.1:2", Control: "[::1]:3", EgressAllow: "10.0.0.0/8"}
	for want, change := range map[string]func(*config){
		"--listen":       func(c *config) { c.Listen = "0.0.0.0:7301" },
		"--gossip-addr":  func(c *config) { c.GossipAddr = "192.0.2.1:1" },
		"--control":      func(c *config) { c.Control = "nowhere" },
		"--egress-allow": func(c *config) { c.EgressAllow = "web" },
	} {
		c := good
		change(&c)
		if err := c.complete(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v", want, err)
		}
	}
	if err := good.complete(); err != nil || !strings.HasSuffix(good.Name, "-proxyd") || len(good.policy.Allow) != 1 {
		t.Errorf("%v %+v", err, good)
	}
}

func TestControl(t *testing.T) {
	secret, counts := trust.New(), meter.New(5)
	c, _ := counts.Open("s", "p")
	c.Via(egress.None).Up(3)
	c.Via(egress.None).Down(4)
	ctx, stop := context.WithCancel(context.Background())
	mux := (&controlAPI{ctx: ctx, served: ctx, secret: secret, counts: counts, ledger: keep(t, counts)}).mux()
	get := func(path, proof string) *httptest.ResponseRecorder {
		req := httptest.NewRequest("GET", path, nil)
		req.Header.Set(trust.Header, proof)
		w := httptest.NewRecorder()
		mux.ServeHTTP(w, req)
		return w
	}
	if w := get("/v1/counters?sessionId=s", "guess"); w.Code != 401 || !strings.Contains(w.Body.String(), `"unauthorized"`) {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	if w := get("/v1/counters", secret.Proof()); w.Code != 400 || !strings.Contains(w.Body.String(), "sessionId") {
		t.Errorf("%d %s", w.Code, w.Body)
	}
	var got meter.Counts
	w := get("/v1/counters?sessionId=s", secret.Proof())
	if err := json.Unmarshal(w.Body.Bytes(), &got); err != nil || got != (meter.Counts{Up: 3, Down: 4, Connections: 1, Open: 1}) {
		t.Errorf("%s %v", w.Body, err)
	}
	if w := get("/readyz", ""); w.Code != 200 {
		t.Errorf("readyz %d", w.Code)
	}
	stop()
	if w := get("/readyz", ""); w.Code != 503 {
		t.Errorf("readyz while stopping: %d", w.Code)
	}
}

// The whole daemon: it joins the pool with its address and leaves it again.
func TestRunJoinsAndLeaves(t *testing.T) {
	dir := t.TempDir()
	secretFile := filepath.Join(dir, "secret")
	secret, err := trust.LoadOrCreate(secretFile)
	if err != nil {
		t.Fatal(err)
	}
	seed, err := gossip.Join(gossip.Config{Name: "seed", Bind: "127.0.0.1:0", Key: secret.Key("gossip"), Meta: gossip.Meta{Role: gossip.Gateway, Region: "local", Addr: "127.0.0.1:1"}})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = seed.Leave(time.Second) }()
	cfg := config{Home: dir, Name: "p", Region: "local", Listen: free(t), Control: free(t), GossipAddr: "127.0.0.1:0", Join: []string{seed.Addr()},
		ClusterSecret: secretFile, Drain: time.Second}
	cfg.LogLevel = "error"
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, cfg) }()
	until(t, func() bool {
		m := seed.Members(gossip.Proxyd)
		return len(m) == 1 && m[0].Name == "p" && m[0].Addr == cfg.Listen && m[0].Control == cfg.Control
	})
	tr := &http.Transport{}
	defer tr.CloseIdleConnections()
	resp, err := (&http.Client{Transport: tr}).Get("http://" + cfg.Control + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	b, _ := io.ReadAll(resp.Body)
	resp.Body.Close()
	if !strings.Contains(string(b), "berth_proxyd_connections_open 0") {
		t.Error("no connections gauge in /metrics")
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	until(t, func() bool { return len(seed.Members(gossip.Proxyd)) == 0 })
}

func until(t *testing.T, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it does not come about")
		}
	}
}

// free is an address that nobody has, nor takes: no other program listens on
// this one of the loopback's.
func free(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.71.3.6:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}
