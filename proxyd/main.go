// Command proxyd is Berth's egress tier: every connection that a session's
// browser opens comes here through its host, is decided on, made and counted.
//
//	hostd's egress listeners ──proxy link──▶ front ─▶ guard ─▶ internet
//	                                           └─▶ meter ─▶ control (/v1/counters)
//	gossip: tells hosts of the region where the proxy link listens
package main

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/berth-dev/berth/proxyd/front"
	"github.com/berth-dev/berth/proxyd/guard"
	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/trust"
)

func main() {
	var cfg config
	daemon.Parse(&cfg, "proxyd", "Berth's egress tier: decides on, makes and counts the connections of sessions.")
	daemon.Main("proxyd", func(ctx context.Context) error { return run(ctx, cfg) })
}

// run serves until ctx ends, then leaves the pool, drains and returns.
func run(ctx context.Context, cfg config) error {
	if err := cfg.complete(); err != nil {
		return err
	}
	log := cfg.Logger("proxyd")
	secret, err := trust.LoadOrCreate(cfg.ClusterSecret)
	if err != nil {
		return fmt.Errorf("cluster secret: %w", err)
	}
	link, err := net.Listen("tcp", cfg.Listen)
	if err != nil {
		return fmt.Errorf("--listen: %w", err)
	}
	defer link.Close()
	control, err := net.Listen("tcp", cfg.Control)
	if err != nil {
		return fmt.Errorf("--control: %w", err)
	}
	defer control.Close()
	pool, err := gossip.Join(gossip.Config{Name: cfg.Name, Bind: cfg.GossipAddr, Join: cfg.Join, Key: secret.Key("gossip"), Log: log,
		Meta: gossip.Meta{Role: gossip.Proxyd, Region: cfg.Region, Addr: link.Addr().String()}})
	if err != nil {
		return fmt.Errorf("gossip: %w", err)
	}

	counts := meter.New(egress.MaxConnections)
	daemon.Gauge("berth_proxyd_connections_open", func() float64 { return float64(counts.OpenConnections()) })
	web := &http.Server{Handler: controlMux(ctx, secret, counts), ReadHeaderTimeout: 10 * time.Second}
	var wg sync.WaitGroup
	wg.Go(func() { _ = web.Serve(control) })
	serving, over := context.WithCancel(ctx)
	wg.Go(func() { // at the signal already: hosts look elsewhere while open connections finish
		<-serving.Done()
		if err := pool.Leave(time.Second); err != nil {
			log.Warn("leave gossip", "error", err)
		}
	})
	log.Info("proxyd ready", "listen", link.Addr().String(), "control", control.Addr().String(), "gossip", pool.Addr(), "allow", fmt.Sprint(cfg.policy.Allow))

	err = front.New(secret, guard.New(cfg.policy, nil), counts, cfg.Drain, log).Serve(ctx, link)
	over()
	_ = web.Close()
	wg.Wait()
	log.Info("proxyd stopped", slog.Any("error", err))
	return err
}
