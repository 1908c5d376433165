// Package hosts knows the living hosts, from gossip, and speaks to them: the
// host link for orders, the session link to the agents behind them.
package hosts

import (
	"context"
	"sync"
	"time"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

// Hosts are the hosts of this gateway's region. Safe for concurrent use.
type Hosts struct {
	members Members
	secret  *trust.Secret
	record  Record

	mu      sync.Mutex // guards what follows
	clients map[string]*hostClient
	agents  map[string]*agentStreams // kept streams by session
}

// hostClient is the client of a host while it has that address.
type hostClient struct {
	addr string
	*hostlink.Client
}

// Members is what this package needs of gossip.
type Members interface {
	Members(role gossip.Role) []gossip.Member
	Changed() <-chan struct{}
}

// New makes the view of the hosts that members knows; record says which of them
// has a session.
func New(members Members, secret *trust.Secret, record Record) *Hosts {
	return &Hosts{members: members, secret: secret, record: record, clients: map[string]*hostClient{}, agents: map[string]*agentStreams{}}
}

// List gives the living hosts as placement chooses among them.
func (h *Hosts) List() []placement.Host {
	members := h.members.Members(gossip.Hostd)
	out := make([]placement.Host, len(members))
	for i, m := range members {
		warm := make(map[session.Kind]int, len(m.Warm))
		for kind, n := range m.Warm {
			warm[session.Kind(kind)] = n
		}
		out[i] = placement.Host{Name: m.Name, Region: m.Region, Driver: m.Driver, Free: m.Free, Warm: warm, CPUClass: m.CPUClass, Addr: m.Addr}
	}
	return out
}

// Changed is closed at the next change of the pool.
func (h *Hosts) Changed() <-chan struct{} { return h.members.Changed() }

// Client gives the client of a host by name; Unavailable when gossip does not
// know it now.
func (h *Hosts) Client(name string) (*hostlink.Client, error) {
	for _, m := range h.members.Members(gossip.Hostd) {
		if m.Name == name {
			return h.client(name, m.Addr), nil
		}
	}
	return nil, apierr.New(apierr.Unavailable, "the session's host %s cannot be reached now; try again soon", name).After(time.Second)
}

func (h *Hosts) client(name, addr string) *hostlink.Client {
	h.mu.Lock()
	defer h.mu.Unlock()
	c := h.clients[name]
	if c == nil || c.addr != addr {
		if c != nil {
			c.Close()
		}
		c = &hostClient{addr, hostlink.NewClient(addr, h.secret)}
		h.clients[name] = c
	}
	return c.Client
}

// Acquire asks a host for a machine.
func (h *Hosts) Acquire(ctx context.Context, host string, a hostlink.Acquire) (hostlink.Status, error) {
	c, err := h.Client(host)
	if err != nil {
		return hostlink.Status{}, err
	}
	return c.Acquire(ctx, a)
}

// End orders a session's end on a host.
func (h *Hosts) End(ctx context.Context, host string, t hostlink.Tombstone) (hostlink.Tombstone, error) {
	c, err := h.Client(host)
	if err != nil {
		return t, err
	}
	return c.End(ctx, t)
}

// Close drops idle connections.
func (h *Hosts) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, c := range h.clients {
		c.Close()
	}
	for _, t := range h.agents {
		t.CloseIdleConnections()
	}
}
