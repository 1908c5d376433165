package main

import (
	"fmt"
	"net/url"
	"os"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/session"
)

// config is what the gateway can be told, by flags or environment.
type config struct {
	daemon.LogConfig
	Name              string        `help:"This gateway's name in the cluster; the first start's stays. Default: the computer's host name." env:"BERTH_GATEWAY_NAME" placeholder:"NAME"`
	Region            string        `help:"Region this gateway belongs to." default:"local" env:"BERTH_REGION" placeholder:"NAME"`
	Home              string        `help:"Folder for the record and the admin socket." default:"/var/lib/berth/gateway" env:"BERTH_GATEWAY_HOME" placeholder:"DIR"`
	Listen            string        `help:"Address of the API, loopback only." default:"127.0.0.1:8080" env:"BERTH_LISTEN" placeholder:"ADDR"`
	PublicURL         string        `help:"Base URL under which clients reach the API; signed URLs are made from it. Default: http:// and the address of --listen." env:"BERTH_PUBLIC_URL" placeholder:"URL"`
	RaftAddr          string        `help:"Address for Raft, loopback only." default:"127.0.0.1:7101" env:"BERTH_RAFT_ADDR" placeholder:"ADDR"`
	GossipAddr        string        `help:"Address for gossip, loopback only." default:"127.0.0.1:7102" env:"BERTH_GATEWAY_GOSSIP_ADDR" placeholder:"ADDR"`
	Join              []string      `help:"Gossip addresses of other members, if any." env:"BERTH_JOIN" placeholder:"ADDR"`
	ClusterSecret     string        `help:"File with the cluster's secret; made when missing." default:"/var/lib/berth/cluster.secret" env:"BERTH_CLUSTER_SECRET" placeholder:"FILE"`
	Sizes             session.Sizes `help:"Machines by kind, vCPUs times GiB of memory: what billing counts. Give hostd the same." default:"browser=1x2,shell=1x1,both=1x3" env:"BERTH_SIZES" placeholder:"KIND=CxG,..."`
	Tariff            string        `help:"JSON file with plans and prices; what it leaves out stays as shipped." env:"BERTH_TARIFF" placeholder:"FILE"`
	CreateDeadline    time.Duration `help:"A create that has no machine by then fails with 503." default:"30s" env:"BERTH_CREATE_DEADLINE"`
	HostLostAfter     time.Duration `help:"The running sessions of a host that is silent for longer are given up." default:"2m" env:"BERTH_HOST_LOST_AFTER"`
	PausedLostAfter   time.Duration `help:"The paused sessions of a host that is silent for longer, and whose snapshots are not in the blob store, are given up; until then they wait for the host to come back." default:"24h" env:"BERTH_PAUSED_LOST_AFTER"`
	OperationDeadline time.Duration `help:"A pause, resume or move that is not done by then is undone; the session stands still for no longer." default:"2m" env:"BERTH_OPERATION_DEADLINE"`
	PauseDurable      bool          `help:"A pause answers only when its snapshot is in the blob store, so that no loss of a host can end a paused session." env:"BERTH_PAUSE_DURABLE"`
	StopAfter         time.Duration `help:"When asked to stop, requests under way get this long." default:"10s" env:"BERTH_STOP_AFTER"`
}

// complete fills in and checks what flags alone cannot.
func (c *config) complete() error {
	if c.Name == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("--name: %w", err)
		}
		c.Name = name + "-gateway"
	}
	if c.PublicURL == "" {
		c.PublicURL = "http://" + c.Listen
	}
	c.PublicURL = strings.TrimSuffix(c.PublicURL, "/")
	u, err := url.Parse(c.PublicURL)
	if err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https" || u.RawQuery != "" || u.Fragment != "" {
		return fmt.Errorf("--public-url: %q is not like https://berth.example.com", c.PublicURL)
	}
	return nil
}
