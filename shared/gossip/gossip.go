// Package gossip finds the cluster's members: gateways, hosts and proxyds of a
// region tell each other where they are and how much is free there, over
// memberlist (SWIM). Only this package imports it.
//
// What a pool says is a hint: who owns a session stands in the record.
package gossip

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log"
	"log/slog"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/hashicorp/memberlist"

	"github.com/berth-dev/berth/shared/daemon"
)

// Config is what a member needs to join.
type Config struct {
	Name string       // unique in the cluster, kept across restarts
	Bind string       // host:port for gossip, UDP and TCP; port 0 takes a free one. Peers are told this address.
	Join []string     // host:port of any members; those not alive are tried again and again
	Key  []byte       // 32 bytes, AES-256; the same for all
	Meta Meta         // what to tell at first
	Log  *slog.Logger // nil: slog.Default
}

// Member is one living member.
type Member struct {
	Name   string
	Gossip string // its gossip address
	Meta
}

// Pool is this process's membership. All methods may be called at once.
type Pool struct {
	name    string
	join    []string
	list    *memberlist.Memberlist
	self    life
	stop    context.CancelFunc
	loops   sync.WaitGroup
	publish chan struct{} // room for one: an update waits to be told

	// mu is taken under memberlist's lock: who holds it must not call there.
	mu      sync.Mutex
	addr    string          // guarded by mu, set before Join returns
	meta    Meta            // guarded by mu
	wire    []byte          // meta encoded; guarded by mu
	peers   map[string]peer // living members by memberlist's name, this one too; guarded by mu
	changed chan struct{}   // closed and replaced at each change; guarded by mu
}

// peer is our copy of a memberlist node, which is not ours to read outside its
// callbacks. ok is false where name or meta are not a member's.
type peer struct {
	life
	addr string
	meta Meta
	ok   bool
}

// Join starts this member. It returns at once, alone or not: members named in
// Join that are away are found when they come.
func Join(c Config) (*Pool, error) {
	if len(c.Key) != 32 {
		return nil, fmt.Errorf("gossip: the key has %d bytes, not 32", len(c.Key))
	}
	self, err := newLife(c.Name, time.Now())
	if err != nil {
		return nil, err
	}
	wire, err := c.Meta.encode()
	if err != nil {
		return nil, err
	}
	p := &Pool{name: c.Name, join: c.Join, self: self, meta: c.Meta.clone(), wire: wire,
		publish: make(chan struct{}, 1), peers: map[string]peer{}, changed: make(chan struct{})}
	conf, err := p.tuning(c)
	if err != nil {
		return nil, err
	}
	if p.list, err = memberlist.Create(conf); err != nil {
		return nil, fmt.Errorf("gossip: listen on %s: %w", c.Bind, err)
	}
	ctx, stop := context.WithCancel(context.Background())
	p.stop = stop
	p.loops.Go(func() { p.rejoin(ctx) })
	p.loops.Go(func() { p.tell(ctx) })
	return p, nil
}

// tuning makes memberlist quick enough that a killed daemon is out within five
// seconds: a probe of each member every few half seconds, then a suspicion of
// 2 to 4 s in which it may object.
func (p *Pool) tuning(c Config) (*memberlist.Config, error) {
	host, portText, err := net.SplitHostPort(c.Bind)
	if err != nil {
		return nil, fmt.Errorf("gossip: address to bind: %w", err)
	}
	port, err := strconv.Atoi(portText)
	if err != nil {
		return nil, fmt.Errorf("gossip: address to bind: port %q is no number", portText)
	}
	logger := c.Log
	if logger == nil {
		logger = slog.Default()
	}
	conf := memberlist.DefaultLocalConfig()
	conf.Name = p.self.String()
	conf.BindAddr, conf.BindPort = host, port
	conf.AdvertisePort = port // 0: the port taken
	conf.SecretKey = c.Key
	conf.Delegate, conf.Events = (*delegate)(p), (*delegate)(p)
	conf.Logger = log.New(daemon.LineLog(logger.With("part", "gossip"), slog.LevelDebug), "", 0)
	conf.ProbeInterval, conf.ProbeTimeout = 500*time.Millisecond, 300*time.Millisecond
	conf.SuspicionMult, conf.SuspicionMaxTimeoutMult = 4, 2
	conf.AwarenessMaxMultiplier = 4 // a busy host doubts itself first, but not for long
	conf.GossipInterval, conf.GossipToTheDeadTime = 100*time.Millisecond, 10*time.Second
	// News goes out a few times and then no more. Who joins through a member in the
	// moment in which that one hears of somebody else may miss it, and would know
	// nobody to go to until members compare all they know.
	conf.RetransmitMult = 4
	conf.PushPullInterval = 3 * time.Second
	conf.TCPTimeout = 2 * time.Second
	conf.EnableCompression = false // packets of a few hundred bytes
	return conf, nil
}

// Addr is this member's gossip address, with the port taken.
func (p *Pool) Addr() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.addr
}

// Name is this member's name.
func (p *Pool) Name() string { return p.name }

// Members gives the living members of a role, this one included, by name; an
// empty role gives all. Peers whose meta does not parse are left out.
func (p *Pool) Members(role Role) []Member {
	p.mu.Lock()
	defer p.mu.Unlock()
	latest := map[string]peer{p.name: {life: p.self, addr: p.addr, meta: p.meta, ok: true}}
	for _, other := range p.peers {
		if !other.ok || other.name == p.name {
			continue // of our own name only this life counts
		}
		if old, twice := latest[other.name]; !twice || other.after(old.life) {
			latest[other.name] = other
		}
	}
	members := make([]Member, 0, len(latest))
	for name, m := range latest {
		if role == "" || m.meta.Role == role {
			members = append(members, Member{name, m.addr, m.meta.clone()})
		}
	}
	slices.SortFunc(members, func(a, b Member) int { return cmp.Compare(a.Name, b.Name) })
	return members
}

// Self is what this member tells now.
func (p *Pool) Self() Meta {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.meta.clone()
}

// Update changes what this member tells. It is cheap and returns before peers
// know; of many calls in a row they may see only the last. A meta that peers
// could not take (over 512 bytes) is refused and the old one stays.
func (p *Pool) Update(change func(*Meta)) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	next := p.meta.clone()
	change(&next)
	wire, err := next.encode()
	if err != nil {
		return err
	}
	if string(wire) == string(p.wire) {
		return nil
	}
	p.meta, p.wire = next, wire
	p.bump()
	select {
	case p.publish <- struct{}{}:
	default: // one is waiting already and will tell the latest
	}
	return nil
}

// Changed gives a channel that closes at the next change of membership or of a
// member's meta. Take it before Members, so that nothing slips between.
func (p *Pool) Changed() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.changed
}

// bump wakes all who wait for a change. Callers hold mu.
func (p *Pool) bump() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// Leave tells the others, waiting up to timeout for the word to go out, and
// stops. The pool is of no use afterwards.
func (p *Pool) Leave(timeout time.Duration) error {
	p.stop()
	p.loops.Wait()
	return errors.Join(p.list.Leave(timeout), p.list.Shutdown())
}
