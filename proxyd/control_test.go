package main

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

func keep(t *testing.T, m *meter.Meter) *meter.Ledger {
	t.Helper()
	l, err := meter.Keep(m, filepath.Join(t.TempDir(), "ledger.db"), slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// desk is a control address, and a client of it.
func desk(t *testing.T) (counts *meter.Meter, c *proxylink.Client, over context.CancelFunc) {
	secret, counts := trust.New(), meter.New(5)
	served, over := context.WithCancel(context.Background())
	srv := httptest.NewServer((&controlAPI{ctx: served, served: served, secret: secret, counts: counts, ledger: keep(t, counts)}).mux())
	t.Cleanup(srv.Close)
	t.Cleanup(over)
	c = proxylink.NewClient(strings.TrimPrefix(srv.URL, "http://"), secret)
	t.Cleanup(c.Close)
	return counts, c, over
}

func TestLedgerOverTheWire(t *testing.T) {
	counts, c, _ := desk(t)
	conn, err := counts.Open("s", "p")
	if err != nil {
		t.Fatal(err)
	}
	flow := conn.Via(egress.Residential)
	flow.Up(3)
	flow.Down(4)
	conn.Via(egress.None).Down(1000)
	l, err := c.Ledger(t.Context())
	if err != nil || len(l.Rows) != 1 || l.Rows[0].Up != 3 || l.Rows[0].Down != 4 || l.Rows[0].ProjectID != "p" || l.Rows[0].Type != egress.Residential {
		t.Fatalf("%+v %v", l, err)
	}
	if err := c.Acknowledge(t.Context(), l); err != nil {
		t.Fatal(err)
	}
	if l, err := c.Ledger(t.Context()); err != nil || len(l.Rows) != 0 {
		t.Errorf("after the acknowledgement: %+v %v", l, err)
	}
	flow.Up(1)
	if l, err := c.Ledger(t.Context()); err != nil || len(l.Rows) != 1 || l.Rows[0].Up != 4 {
		t.Errorf("after another byte: %+v %v", l, err)
	}
}

func TestLedgerIsForDaemonsOnly(t *testing.T) {
	counts := meter.New(1)
	srv := httptest.NewServer((&controlAPI{ctx: t.Context(), served: t.Context(), secret: trust.New(), counts: counts, ledger: keep(t, counts)}).mux())
	defer srv.Close()
	foreign := proxylink.NewClient(strings.TrimPrefix(srv.URL, "http://"), trust.New())
	defer foreign.Close()
	for name, err := range map[string]error{
		"acks":   foreign.Acknowledge(t.Context(), proxylink.Ledger{}),
		"stream": foreign.FollowLedger(t.Context(), func(proxylink.Ledger) error { return nil }),
	} {
		if !apierr.Is(err, apierr.Unauthorized) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := foreign.Ledger(t.Context()); !apierr.Is(err, apierr.Unauthorized) {
		t.Error(err)
	}
}

// The stream begins with everything, goes on with what changed, and says the
// last bytes before it ends.
func TestLedgerStream(t *testing.T) {
	counts, c, over := desk(t)
	conn, err := counts.Open("s", "p")
	if err != nil {
		t.Fatal(err)
	}
	flow := conn.Via(egress.Custom)
	flow.Up(1)
	lines := make(chan proxylink.Ledger)
	ended := make(chan error, 1)
	go func() {
		ended <- c.FollowLedger(context.Background(), func(l proxylink.Ledger) error { lines <- l; return nil })
	}()
	next := func() proxylink.Ledger {
		select {
		case l := <-lines:
			return l
		case <-time.After(20 * time.Second):
			t.Fatal("the stream is silent")
			panic("")
		}
	}
	if l := next(); len(l.Rows) != 1 || l.Rows[0].Up != 1 {
		t.Fatalf("first: %+v", l)
	}
	if l := next(); len(l.Rows) != 0 {
		t.Fatalf("nothing changed: %+v", l)
	}
	flow.Up(1)
	for l := next(); len(l.Rows) == 0; l = next() {
	}
	flow.Up(1)
	over()
	last := int64(0)
	for more := true; more; {
		select {
		case l := <-lines:
			for _, r := range l.Rows {
				last = r.Up
			}
		case err := <-ended:
			if err == nil || errors.Is(err, context.Canceled) {
				t.Error("an ended stream ended well")
			}
			more = false
		}
	}
	if last != 3 {
		t.Errorf("the last word was %d bytes", last)
	}
}

// A daemon that stops keeps the rows that no gateway acknowledged, and its
// next run tells them.
func TestRunKeepsItsLedger(t *testing.T) {
	home := t.TempDir()
	m := meter.New(1)
	l, err := meter.Keep(m, filepath.Join(home, "ledger.db"), slog.New(slog.NewTextHandler(io.Discard, nil)))
	if err != nil {
		t.Fatal(err)
	}
	conn, _ := m.Open("s", "p")
	conn.Via(egress.Residential).Up(5)
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	secretFile := filepath.Join(home, "secret")
	secret, err := trust.LoadOrCreate(secretFile)
	if err != nil {
		t.Fatal(err)
	}
	cfg := config{Home: home, Name: "p", Region: "local", Listen: free(t), Control: free(t), GossipAddr: "127.0.0.1:0", ClusterSecret: secretFile, Drain: time.Second}
	cfg.LogLevel = "error"
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- run(ctx, cfg) }()
	c := proxylink.NewClient(cfg.Control, secret)
	defer c.Close()
	until(t, func() bool {
		l, err := c.Ledger(ctx)
		return err == nil && len(l.Rows) == 1 && l.Rows[0].Up == 5
	})
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
