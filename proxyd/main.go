// Command proxyd is Berth's egress tier: every connection that a session's
// browser opens comes here through its host, is decided on, made and counted.
//
//	hostd's egress listeners ──proxy link──▶ front ─▶ guard ─▶ internet
//	                                           └─▶ meter ─▶ ledger (bbolt)
//	                                                 └─▶ control (/v1/ledger) ─▶ gateway's record
//	gossip: tells hosts of the region where the proxy link listens, gateways where the control address is
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/berth-dev/berth/proxyd/front"
	"github.com/berth-dev/berth/proxyd/guard"
	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/refusals"
	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink/loop"
	"github.com/berth-dev/berth/shared/trust"
)

func main() {
	var cfg config
	daemon.Parse(&cfg, "proxyd", "Berth's egress tier: decides on, makes and counts the connections of sessions.")
	if os.Getenv("GOGC") == "" {
		// The heap is small and connections are many: collecting less often saves a
		// tenth of the CPU for some tens of MiB.
		debug.SetGCPercent(400)
	}
	// Loops hold processors of Go's even where they wait for the kernel's: goroutines
	// keep theirs.
	runtime.GOMAXPROCS(runtime.GOMAXPROCS(0) + loop.Threads())
	daemon.Main("proxyd", func(ctx context.Context) error { return run(ctx, cfg) })
}

// run serves until ctx ends, then leaves the pool, drains and returns.
func run(ctx context.Context, cfg config) (err error) {
	if err := cfg.complete(); err != nil {
		return err
	}
	log := cfg.Logger("proxyd")
	secret, err := trust.LoadOrCreate(cfg.ClusterSecret)
	if err != nil {
		return fmt.Errorf("cluster secret: %w", err)
	}
	out := guard.New(cfg.policy, nil)
	upstreams, err := upstream.New(upstream.Config{Dialer: out, Providers: cfg.providers, Roots: cfg.roots})
	if err != nil {
		return fmt.Errorf("--providers: %w", err)
	}
	link, err := front.Listen(ctx, cfg.Listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	defer link.Close()
	control, err := net.Listen("tcp", cfg.Control)
	if err != nil {
		return fmt.Errorf("--control: %w", err)
	}
	defer control.Close()
	counts, feed := meter.New(egress.MaxConnections), refusals.New()
	ledger, err := meter.Keep(counts, filepath.Join(cfg.Home, "ledger.db"), log)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ledger.Close()) }()
	pool, err := gossip.Join(gossip.Config{Name: cfg.Name, Bind: cfg.GossipAddr, Join: cfg.Join, Key: secret.Key("gossip"), Log: log,
		Meta: gossip.Meta{Role: gossip.Proxyd, Region: cfg.Region, Addr: link.Addr().String(), Control: control.Addr().String()}})
	if err != nil {
		return fmt.Errorf("gossip: %w", err)
	}

	daemon.Gauge("berth_proxyd_connections_open", func() float64 { return float64(counts.OpenConnections()) })
	served, over := context.WithCancel(context.WithoutCancel(ctx))
	defer over()
	web := &http.Server{Handler: (&controlAPI{ctx: ctx, served: served, secret: secret, counts: counts, ledger: ledger, feed: feed}).mux(), ReadHeaderTimeout: 10 * time.Second}
	var wg sync.WaitGroup
	wg.Go(func() { _ = web.Serve(control) })
	wg.Go(func() { ledger.Run(served) })
	wg.Go(func() { // at the signal already: hosts look elsewhere while open connections finish
		select {
		case <-ctx.Done():
		case <-served.Done():
		}
		if err := pool.Leave(time.Second); err != nil {
			log.Warn("leave gossip", "error", err)
		}
	})
	log.Info("proxyd ready", "listen", link.Addr().String(), "control", control.Addr().String(), "gossip", pool.Addr(), "allow", fmt.Sprint(cfg.policy.Allow), "providers", len(cfg.providers))

	err = front.New(front.Config{Secret: secret, Guard: out, Upstreams: upstreams, Meter: counts, Feed: feed, Drain: cfg.Drain, Log: log}).Serve(ctx, link)
	over()
	closeWeb(web)
	wg.Wait()
	log.Info("proxyd stopped", slog.Any("error", err))
	return err
}

// farewell is how long streams have to say their last.
const farewell = 2 * time.Second

func closeWeb(web *http.Server) {
	ctx, cancel := context.WithTimeout(context.Background(), farewell)
	defer cancel()
	if web.Shutdown(ctx) != nil {
		_ = web.Close()
	}
}
