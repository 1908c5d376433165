// Package network makes slots: the places in the network that machines run in.
//
// A slot is a named network namespace with an address of its own, nftables
// rules that no process inside can change, and two listeners that hostd holds
// inside it: the egress listener, whose connections are tunnelled to proxyd,
// and a DNS forwarder. DESIGN.md has the picture and the reasons.
package network

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"

	"github.com/berth-dev/berth/hostd/machine"
)

// Defaults of Config.
const (
	DefaultName    = "berth"
	DefaultSubnet  = "10.123.0.0/16"
	DefaultUIDBase = 1 << 20
)

// uidRange is how many user ids a machine has.
const uidRange = 1 << 16

// netnsDir is where named namespaces live (ip-netns(8)).
const netnsDir = "/run/netns"

// Config says how a host's slots look. Two hostds on one machine need
// different Name, Subnet and UIDBase.
type Config struct {
	// Name begins every name this package makes: namespaces and host links are
	// "<Name>-<index>", the host's nftables table is "<Name>". At most nine
	// lower-case letters and digits, a letter first. Empty: DefaultName.
	Name string
	// Subnet gives every slot one address. Invalid: DefaultSubnet.
	Subnet netip.Prefix
	// UIDBase is the host user id of slot 0's root. 0: DefaultUIDBase.
	UIDBase uint32
	// Allow opens networks that egress.NonPublic closes.
	Allow []netip.Prefix
	// Resolvers answer the slots' DNS queries. Empty: those of /etc/resolv.conf,
	// read again when the file changes.
	Resolvers []netip.AddrPort
	// Tap gives every slot a tap device for a machine with a kernel of its own.
	Tap bool
	Log *slog.Logger // nil: slog.Default()
}

// Network makes and keeps the slots of one hostd. Safe for concurrent use.
type Network struct {
	cfg       Config
	log       *slog.Logger
	host      *os.File // the namespace hostd runs in
	resolvers *resolvers

	mu     sync.Mutex
	closed bool
	slots  map[int]*Slot // open here; nil while one is being made or removed
}

var validName = regexp.MustCompile(`^[a-z][a-z0-9]{0,8}$`)

// Open prepares the host: forwarding on, the host's rules in place. Slots of
// an earlier hostd stay as they are until Adopt or Sweep.
func Open(ctx context.Context, cfg Config) (*Network, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("open network: %w", err)
	}
	host, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open network: %w", err)
	}
	n := &Network{cfg: cfg, log: cfg.Log, host: host, slots: map[int]*Slot{}, resolvers: newResolvers(cfg.Resolvers)}
	if err := n.prepareHost(ctx); err != nil {
		host.Close()
		return nil, fmt.Errorf("open network: %w", err)
	}
	return n, nil
}

func (c *Config) complete() error {
	if c.Name == "" {
		c.Name = DefaultName
	}
	if !validName.MatchString(c.Name) {
		return fmt.Errorf("name %q: want a letter and up to eight lower-case letters or digits", c.Name)
	}
	if !c.Subnet.IsValid() {
		c.Subnet = netip.MustParsePrefix(DefaultSubnet)
	}
	if !c.Subnet.Addr().Is4() || c.Subnet.Bits() > 30 || c.Subnet != c.Subnet.Masked() {
		return fmt.Errorf("subnet %s: want an IPv4 network of /30 or larger", c.Subnet)
	}
	if c.UIDBase == 0 {
		c.UIDBase = DefaultUIDBase
	}
	if c.UIDBase%uidRange != 0 {
		return fmt.Errorf("uid base %d: want a multiple of %d", c.UIDBase, uidRange)
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	return nil
}

func (n *Network) prepareHost(ctx context.Context) error {
	if err := os.MkdirAll(netnsDir, 0o755); err != nil {
		return err
	}
	const forward = "net/ipv4/ip_forward"
	if was, err := readSysctl(forward); err != nil {
		return err
	} else if was == "0" {
		if err := writeSysctl(forward, "1"); err != nil {
			return err
		}
		n.log.Info("turned net.ipv4.ip_forward on: slots reach the internet through this host")
	}
	return loadRules(ctx, hostRules, n.ruleData(nil))
}

// Slots is how many slots the configuration has room for.
func (n *Network) Slots() int {
	return min(1<<(32-n.cfg.Subnet.Bits())-2, int((1<<32-uint64(n.cfg.UIDBase))/uidRange))
}

// info derives everything of a slot from its index.
func (n *Network) info(index int) machine.Slot {
	name := n.cfg.Name + "-" + strconv.Itoa(index)
	return machine.Slot{
		Index:   index,
		Name:    name,
		NetNS:   filepath.Join(netnsDir, name),
		UIDBase: n.cfg.UIDBase + uint32(index)*uidRange,
	}
}

// addr is the slot's own address on eth0.
func (n *Network) addr(index int) netip.Addr {
	b := n.cfg.Subnet.Addr().As4()
	v := uint32(b[0])<<24 | uint32(b[1])<<16 | uint32(b[2])<<8 | uint32(b[3])
	v += uint32(index) + 1
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)})
}

// existing lists the indexes of the slots that are on the host.
func (n *Network) existing() ([]int, error) {
	entries, err := os.ReadDir(netnsDir)
	if err != nil {
		return nil, err
	}
	var out []int
	for _, e := range entries {
		digits, ours := strings.CutPrefix(e.Name(), n.cfg.Name+"-")
		index, err := strconv.Atoi(digits)
		if ours && err == nil && strconv.Itoa(index) == digits && index >= 0 {
			out = append(out, index)
		}
	}
	return out, nil
}

// Sweep removes every slot on the host that keep refuses and that is not open
// here: what a crash left.
func (n *Network) Sweep(ctx context.Context, keep func(index int) bool) error {
	indexes, err := n.existing()
	if err != nil {
		return fmt.Errorf("sweep slots: %w", err)
	}
	var errs []error
	for _, index := range indexes {
		if keep(index) || !n.claim(index) {
			continue
		}
		if err := n.remove(ctx, index); err != nil {
			errs = append(errs, fmt.Errorf("sweep slot %d: %w", index, err))
		} else {
			n.log.Info("removed a slot that nothing uses", "slot", index)
		}
		n.release(index)
	}
	return errors.Join(errs...)
}

// Close gives up the listeners of all open slots and leaves the slots for the
// next hostd to adopt.
func (n *Network) Close() error {
	n.mu.Lock()
	n.closed = true
	open := n.open()
	n.mu.Unlock()
	for _, s := range open {
		s.detach()
	}
	return n.host.Close()
}

// Destroy removes all slots, open here or not, and the host's rules.
func (n *Network) Destroy(ctx context.Context) error {
	n.mu.Lock()
	open := n.open()
	n.mu.Unlock()
	var errs []error
	for _, s := range open {
		errs = append(errs, s.Close(ctx))
	}
	errs = append(errs, n.Sweep(ctx, func(int) bool { return false }))
	errs = append(errs, nft(ctx, fmt.Sprintf("table inet %[1]s\ndelete table inet %[1]s\n", n.cfg.Name)))
	return errors.Join(append(errs, n.Close())...)
}

// open lists the slots open here; n.mu is held.
func (n *Network) open() []*Slot {
	var out []*Slot
	for _, s := range n.slots {
		if s != nil {
			out = append(out, s)
		}
	}
	return out
}

// claim reserves an index for the caller; release gives it back.
func (n *Network) claim(index int) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	if _, taken := n.slots[index]; taken || n.closed {
		return false
	}
	n.slots[index] = nil
	return true
}

func (n *Network) release(index int) {
	n.mu.Lock()
	defer n.mu.Unlock()
	delete(n.slots, index)
}
