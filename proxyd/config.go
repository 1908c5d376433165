package main

import (
	"crypto/x509"
	"fmt"
	"os"
	"time"

	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/trust"
)

// config is what proxyd takes from the command line and the environment.
type config struct {
	daemon.LogConfig
	Home          string        `help:"Folder for this proxyd's ledger of proxy data; keep it from start to start, and give no two proxyds the same." default:"/var/lib/berth/proxyd" env:"BERTH_PROXYD_HOME" placeholder:"DIR"`
	Name          string        `help:"This proxyd's name in the cluster. Default: the computer's host name with -proxyd." env:"BERTH_PROXYD_NAME" placeholder:"NAME"`
	Region        string        `help:"Region this proxyd belongs to." default:"local" env:"BERTH_REGION" placeholder:"NAME"`
	Listen        string        `help:"Address for hostd's connections, loopback only." default:"127.0.0.1:7301" env:"BERTH_PROXYD_LISTEN" placeholder:"ADDR"`
	GossipAddr    string        `help:"Address for gossip, loopback only." default:"127.0.0.1:7302" env:"BERTH_PROXYD_GOSSIP_ADDR" placeholder:"ADDR"`
	Control       string        `help:"Address for health, metrics and the ledger, loopback only." default:"127.0.0.1:7303" env:"BERTH_PROXYD_CONTROL" placeholder:"ADDR"`
	Join          []string      `help:"Gossip addresses of members to find the cluster by." default:"127.0.0.1:7102" env:"BERTH_JOIN" placeholder:"ADDR"`
	ClusterSecret string        `help:"File with the cluster's secret; made when missing." default:"/var/lib/berth/cluster.secret" env:"BERTH_CLUSTER_SECRET" placeholder:"FILE"`
	EgressAllow   string        `help:"Networks that sessions may reach although they are not public, with commas: 10.1.0.0/16,192.0.2.7/32." env:"BERTH_EGRESS_ALLOW" placeholder:"CIDR,..."`
	Providers     string        `help:"File with the providers of residential and datacenter proxies, JSON (proxyd/DESIGN.md). Without one those types are refused." env:"BERTH_PROVIDERS" placeholder:"FILE"`
	UpstreamCA    string        `help:"File with certificates (PEM) of authorities that HTTPS proxies may be certified by, beside the computer's own." env:"BERTH_UPSTREAM_CA" placeholder:"FILE"`
	Drain         time.Duration `help:"How long open connections may go on after a signal to stop." default:"10s" env:"BERTH_PROXYD_DRAIN"`

	policy    egress.Policy
	providers []upstream.ProviderConfig
	roots     *x509.CertPool // nil: the computer's
}

// complete checks what the tags cannot and fills in what depends on the computer.
func (c *config) complete() error {
	for _, a := range []struct{ flag, addr string }{{"--listen", c.Listen}, {"--gossip-addr", c.GossipAddr}, {"--control", c.Control}} {
		if err := trust.LoopbackOnly(a.flag, a.addr); err != nil {
			return err
		}
	}
	allow, err := egress.ParseAllow(c.EgressAllow)
	if err != nil {
		return fmt.Errorf("--egress-allow: %w", err)
	}
	c.policy.Allow = allow
	if c.Providers != "" {
		if c.providers, err = upstream.LoadProviders(c.Providers); err != nil {
			return fmt.Errorf("--providers: %w", err)
		}
	}
	if c.UpstreamCA != "" {
		if c.roots, err = roots(c.UpstreamCA); err != nil {
			return fmt.Errorf("--upstream-ca: %w", err)
		}
	}
	if c.Name == "" {
		host, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("--name: %w", err)
		}
		c.Name = host + "-proxyd" // hostd on the same computer has the bare name
	}
	return nil
}

// roots are the computer's authorities with those of a file.
func roots(path string) (*x509.CertPool, error) {
	pool, err := x509.SystemCertPool()
	if err != nil {
		return nil, err
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if !pool.AppendCertsFromPEM(b) {
		return nil, fmt.Errorf("%s: no certificate in it", path)
	}
	return pool, nil
}
