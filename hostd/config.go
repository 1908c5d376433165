package main

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/daemon"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/session"
)

// commandLine is what hostd understands.
type commandLine struct {
	Serve   serveCmd   `cmd:"" default:"withargs" help:"Run the daemon (the default)."`
	Cleanup cleanupCmd `cmd:"" help:"End every machine of this host and remove what they left: processes, mounts, namespaces, addresses. hostd must not be running."`
}

// hostConfig is what both commands need to know of the host.
type hostConfig struct {
	daemon.LogConfig
	Home          string       `help:"Folder for this host's state." default:"/var/lib/berth/hostd" env:"BERTH_HOSTD_HOME" placeholder:"DIR"`
	Driver        string       `help:"What runs machines: microvm (QEMU, hardware between machines), oci (runc, containers that share the kernel), or auto: microvm where it works, else oci." enum:"auto,oci,microvm" default:"auto" env:"BERTH_DRIVER" placeholder:"NAME"`
	Accel         string       `help:"What runs the instructions of microVMs: kvm, tcg (emulation, for tests: many times slower), or auto: kvm, never tcg." enum:"auto,kvm,tcg" default:"auto" env:"BERTH_ACCEL" placeholder:"NAME"`
	VMFiles       string       `name:"vm-files" help:"Folder with kernel, initrd and disk of microVMs, made by 'make image'." env:"BERTH_VM_FILES" placeholder:"DIR"`
	TemplateCache string       `help:"Folder, this hostd's alone, for the templates that microVMs start from; those of no more use are removed at the start. Default: templates below --home." env:"BERTH_TEMPLATE_CACHE" placeholder:"DIR"`
	ImageBase     string       `help:"Folder with the guest image's root file system, made by 'make image'." env:"BERTH_IMAGE_BASE" placeholder:"DIR"`
	AgentLayer    string       `help:"Folder laid over the guest image that holds usr/lib/berth/agent." env:"BERTH_AGENT_LAYER" placeholder:"DIR"`
	Subnet        netip.Prefix `help:"Private network from which slots get their addresses, one each; no other hostd on this computer may have the same." default:"10.123.0.0/16" env:"BERTH_SLOT_SUBNET" placeholder:"CIDR"`
	SlotPrefix    string       `help:"First part of the names of network namespaces and links; no other hostd on this computer may have the same." default:"berth" env:"BERTH_SLOT_PREFIX" placeholder:"NAME"`
	UIDBase       uint32       `help:"First user id of the ranges that machines get, 65536 each." default:"1048576" env:"BERTH_UID_BASE" placeholder:"ID"`
	EgressAllow   string       `help:"Networks that sessions may reach although they are not public, with commas: 10.1.0.0/16,192.0.2.7/32." env:"BERTH_EGRESS_ALLOW" placeholder:"CIDR,..."`
	Resolvers     []string     `help:"Name servers that answer machines (host:port). Default: those of /etc/resolv.conf." env:"BERTH_RESOLVERS" placeholder:"ADDR"`
}

type cleanupCmd struct{ hostConfig }

type serveCmd struct {
	hostConfig
	Name          string        `help:"This host's name in the cluster. Default: the computer's host name." env:"BERTH_HOST_NAME" placeholder:"NAME"`
	Region        string        `help:"Region this host belongs to." default:"local" env:"BERTH_REGION" placeholder:"NAME"`
	Listen        string        `help:"Address for gateways, loopback only." default:"127.0.0.1:7201" env:"BERTH_HOSTD_LISTEN" placeholder:"ADDR"`
	GossipAddr    string        `help:"Address for gossip, loopback only." default:"127.0.0.1:7202" env:"BERTH_HOSTD_GOSSIP_ADDR" placeholder:"ADDR"`
	Join          []string      `help:"Gossip addresses of members to find the cluster by." default:"127.0.0.1:7102" env:"BERTH_JOIN" placeholder:"ADDR"`
	Snapshots     string        `help:"Folder for captures of sessions. Default: snapshots below --home." env:"BERTH_SNAPSHOTS" placeholder:"DIR"`
	BlobURL       string        `name:"blob-url" help:"Blob store that paused sessions are brought to, so that they outlive this host: an absolute folder or s3://BUCKET?region=R; the same for all hosts. Default: none." env:"BERTH_BLOB_URL" placeholder:"URL"`
	ClusterSecret string        `help:"File with the cluster's secret; made when missing." default:"/var/lib/berth/cluster.secret" env:"BERTH_CLUSTER_SECRET" placeholder:"FILE"`
	Sizes         session.Sizes `help:"Machines by kind, vCPUs times GiB of memory: what their limits are. Give the gateway the same." default:"browser=1x2,shell=1x1,both=1x3" env:"BERTH_SIZES" placeholder:"KIND=CxG,..."`
	Pool          string        `help:"Machines of each kind kept ready." default:"browser=4,shell=2,both=2" env:"BERTH_POOL" placeholder:"KIND=N,..."`
	PoolMin       string        `help:"Below so many ready machines of a kind the refill does not wait for its pace." default:"browser=1,shell=1,both=1" env:"BERTH_POOL_MIN" placeholder:"KIND=N,..."`
	PoolParallel  int           `help:"Machines the pool boots at once; 0: half the processors." default:"0" env:"BERTH_POOL_PARALLEL" placeholder:"N"`
	PoolPace      time.Duration `help:"Least time between two boots of the refill, which leaves the processors to sessions." default:"250ms" env:"BERTH_POOL_PACE"`
	PoolCalm      time.Duration `help:"The refill waits until no machine was taken for so long, at most four times that: first pages go before it." default:"250ms" env:"BERTH_POOL_CALM"`
	PoolMaxAge    time.Duration `help:"A machine that waited longer is replaced." default:"6h" env:"BERTH_POOL_MAX_AGE"`
	MaxMachines   int           `help:"Machines this host runs at most, waiting ones included; 0: what the memory holds." default:"0" env:"BERTH_MAX_MACHINES" placeholder:"N"`
	DiskGiB       int64         `name:"disk-gib" help:"What one machine may write, GiB." default:"10" env:"BERTH_DISK_GIB" placeholder:"N"`
	Pids          int           `help:"Processes and threads one machine may have." default:"4096" env:"BERTH_PIDS" placeholder:"N"`
	BootDeadline  time.Duration `help:"A machine that is not ready by then is given up." default:"60s" env:"BERTH_BOOT_DEADLINE"`
}

// allow parses the extra networks.
func (c hostConfig) allow() ([]netip.Prefix, error) {
	p, err := egress.ParseAllow(c.EgressAllow)
	if err != nil {
		return nil, fmt.Errorf("--egress-allow: %w", err)
	}
	return p, nil
}

// complete fills in what depends on the computer.
func (c *serveCmd) complete() error {
	if c.Name == "" {
		name, err := os.Hostname()
		if err != nil {
			return fmt.Errorf("--name: %w", err)
		}
		c.Name = name
	}
	if c.PoolParallel == 0 {
		c.PoolParallel = max(1, runtime.NumCPU()/2)
	}
	if c.MaxMachines == 0 {
		n, err := machinesFor("/proc/meminfo")
		if err != nil {
			return fmt.Errorf("--max-machines: %w", err)
		}
		c.MaxMachines = n
	}
	abs, err := filepath.Abs(c.Home)
	if err != nil {
		return fmt.Errorf("--home: %w", err)
	}
	c.Home = abs
	if c.Snapshots == "" {
		c.Snapshots = filepath.Join(c.Home, "snapshots")
	}
	return c.check()
}

// check refuses numbers with which no machine would ever start.
func (c *serveCmd) check() error {
	for _, n := range []struct {
		flag       string
		got, least int64
	}{
		{"--pool-parallel", int64(c.PoolParallel), 1}, {"--max-machines", int64(c.MaxMachines), 1},
		{"--disk-gib", c.DiskGiB, 1}, {"--pids", int64(c.Pids), 64},
	} {
		if n.got < n.least {
			return fmt.Errorf("%s: %d: want at least %d", n.flag, n.got, n.least)
		}
	}
	if c.BootDeadline < time.Second {
		return fmt.Errorf("--boot-deadline: %s: want at least 1s", c.BootDeadline)
	}
	if c.PoolPace < 0 || c.PoolCalm < 0 || c.PoolMaxAge < 0 {
		return fmt.Errorf("--pool-pace, --pool-calm and --pool-max-age: want no negative time")
	}
	return nil
}

// idleMachine is what a waiting browser machine takes: two thirds of what one
// measured, since the pages of the image are shared.
const idleMachine = 160 << 20

// machinesFor says how many idle machines the memory of this computer holds.
func machinesFor(meminfo string) (int, error) {
	total, err := memory(meminfo, "MemTotal")
	return int(max(4, total/idleMachine)), err
}

// roomFor refuses a session that comes with its memory from elsewhere where not
// even half of what its kind may use is free: few use all they may.
func roomFor(meminfo string, size session.Size) error {
	free, err := memory(meminfo, "MemAvailable")
	if err != nil {
		return err
	}
	if need := int64(size.GiB) << 30 / 2; free < need {
		return apierr.New(apierr.NoCapacity, "the host has %d MiB of memory free; a session of this kind needs %d", free>>20, need>>20).After(10 * time.Second)
	}
	return nil
}

// memory reads a line of /proc/meminfo, in bytes.
func memory(meminfo, name string) (int64, error) {
	b, err := os.ReadFile(meminfo)
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(b)) {
		if rest, ok := strings.CutPrefix(line, name+":"); ok {
			kib, err := strconv.ParseInt(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 10, 64)
			if err != nil {
				return 0, fmt.Errorf("%s: %w", meminfo, err)
			}
			return kib << 10, nil
		}
	}
	return 0, fmt.Errorf("no %s in %s", name, meminfo)
}

// parsePool reads "browser=4,shell=2".
func parsePool(flag, text string) (map[session.Kind]int, error) {
	target := map[session.Kind]int{}
	for item := range strings.SplitSeq(text, ",") {
		if strings.TrimSpace(item) == "" {
			continue
		}
		name, number, _ := strings.Cut(strings.TrimSpace(item), "=")
		n, err := strconv.Atoi(number)
		kind := session.Kind(name)
		if err != nil || n < 0 || kind != session.Browser && kind != session.Shell && kind != session.Both {
			return nil, fmt.Errorf("%s: %q: want KIND=N with KIND one of browser, shell, both", flag, item)
		}
		target[kind] = n
	}
	return target, nil
}
