// Command gateway is Berth's public endpoint.
//
//	clients ──▶ api ──▶ sessions ──▶ placement (the record, Raft)
//	             │         └───────▶ hosts ──host link──▶ hostd
//	             │                   proxies ──ledger──▶ proxyd
//	             └─ relay ──session link, through hostd──▶ agent
//	berth ──admin socket──▶ api ──▶ placement
package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/api"
	"github.com/berth-dev/berth/gateway/hosts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/gateway/proxies"
	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/trust"
)

func main() {
	var c config
	daemon.Parse(&c, "gateway", "Serves Berth's API and holds the record of its sessions.")
	daemon.Main("gateway", c.run)
}

// gateway is what runs in the daemon, in order of starting.
type gateway struct {
	cfg     config
	log     *slog.Logger
	tariff  accounts.Tariff
	secret  *trust.Secret
	record  *placement.Record
	members *gossip.Pool
	hosts   *hosts.Hosts
	proxies *proxies.Proxies
	use     *sessions.Service
	api     *api.Server
}

func (c config) run(ctx context.Context) (err error) {
	log := c.Logger("gateway")
	if err := c.complete(); err != nil {
		return err
	}
	for flag, addr := range map[string]string{"--listen": c.Listen, "--raft-addr": c.RaftAddr, "--gossip-addr": c.GossipAddr} {
		if err := trust.LoopbackOnly(flag, addr); err != nil {
			return err
		}
	}
	g := &gateway{cfg: c, log: log}
	defer func() { err = errors.Join(err, g.close()) }()
	ln, err := net.Listen("tcp", c.Listen)
	if err != nil {
		return err
	}
	defer ln.Close()
	if err := g.open(ctx); err != nil {
		return err
	}
	return g.serve(ctx, ln)
}

func (g *gateway) open(ctx context.Context) (err error) {
	c := g.cfg
	if g.tariff, err = accounts.LoadTariff(c.Tariff); err != nil {
		return fmt.Errorf("--tariff: %w", err)
	}
	if g.secret, err = trust.LoadOrCreate(c.ClusterSecret); err != nil {
		return err
	}
	if g.record, err = placement.Open(placement.Config{Name: c.Name, Home: c.Home, Addr: c.RaftAddr, Log: g.log}); err != nil {
		return err
	}
	g.members, err = gossip.Join(gossip.Config{Name: c.Name, Bind: c.GossipAddr, Join: c.Join, Key: g.secret.Key("gossip"), Log: g.log,
		Meta: gossip.Meta{Role: gossip.Gateway, Region: c.Region, Addr: c.Listen}})
	if err != nil {
		return err
	}
	g.hosts = hosts.New(g.members, g.secret, places{g.record})
	g.proxies = proxies.New(g.members, g.secret, g.record, g.log)
	rates := accounts.Rates{Sizes: c.Sizes, Prices: g.tariff.Prices}
	g.use = sessions.New(sessions.Config{PublicURL: c.PublicURL, Rates: rates, Proxyds: g.proxies,
		CreateDeadline: c.CreateDeadline, HostLostAfter: c.HostLostAfter, PausedLostAfter: c.PausedLostAfter,
		Name: c.Name, OperationDeadline: c.OperationDeadline, PauseDurable: c.PauseDurable, Secret: g.secret}, g.record, g.hosts, g.log)
	who := directory{record: g.record, hosts: g.hosts, proxies: g.proxies, rates: rates, log: g.log}
	g.api, err = api.New(api.Config{Service: g.use, Accounts: who, Admin: operator{who}, Ready: g.ready, Log: g.log})
	return err
}

// ready says what is missing before the API can do its work.
func (g *gateway) ready() error {
	switch {
	case !g.record.Leader():
		return errors.New("the record has no leader yet")
	case len(g.hosts.List()) == 0:
		return errors.New("no host has joined yet")
	case !g.proxies.Reachable(g.cfg.Region):
		return errors.New("no proxyd of the region answers yet")
	}
	return nil
}

func (g *gateway) serve(ctx context.Context, ln net.Listener) error {
	local, err := adminSocket(filepath.Join(g.cfg.Home, "admin.sock"))
	if err != nil {
		return err
	}
	defer local.Close()
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return g.api.Serve(ln) })
	group.Go(func() error { return g.api.ServeAdmin(local) })
	group.Go(func() error { return g.use.Run(ctx) })
	group.Go(func() error { return g.keepPlans(ctx) })
	group.Go(func() error { return g.proxies.Run(ctx) })
	group.Go(func() error {
		<-ctx.Done()
		stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), g.cfg.StopAfter)
		defer cancel()
		return errors.Join(context.Cause(ctx), g.api.Shutdown(stop))
	})
	g.log.Info("gateway is up", "listen", g.cfg.Listen, "public", g.cfg.PublicURL, "region", g.cfg.Region)
	return group.Wait()
}

// keepPlans brings the configured plans into the record whenever this gateway
// leads it.
func (g *gateway) keepPlans(ctx context.Context) error {
	for {
		if err := g.record.WaitLeader(ctx); err != nil {
			return err
		}
		changed := g.record.LeaderChanged()
		if err := g.record.SetPlans(ctx, g.tariff.Plans); err != nil {
			g.log.Warn("the plans are not in the record yet", "error", err)
			select {
			case <-ctx.Done():
			case <-time.After(time.Second):
			}
			continue
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		}
	}
}

// adminSocket listens where only this computer's root, or the gateway's own
// user, can connect.
func adminSocket(path string) (net.Listener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) { // an earlier gateway's: the API's port is ours
		return nil, err
	}
	ln, err := net.Listen("unix", path)
	if err != nil {
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	if err := os.Chmod(path, 0o600); err != nil {
		ln.Close()
		return nil, fmt.Errorf("admin socket: %w", err)
	}
	return ln, nil
}

// close gives back, in reverse, what open acquired.
func (g *gateway) close() error {
	var errs []error
	if g.hosts != nil {
		g.hosts.Close()
	}
	if g.members != nil {
		errs = append(errs, g.members.Leave(time.Second))
	}
	if g.record != nil {
		errs = append(errs, g.record.Close())
	}
	return errors.Join(errs...)
}
