package gossip

import (
	"context"
	"net"
	"time"

	"github.com/hashicorp/memberlist"
)

// Pacing of the two loops.
const (
	rejoinEvery = 500 * time.Millisecond
	tellEvery   = 100 * time.Millisecond // at most so often; gossip itself is no faster
	tellWithin  = 2 * time.Second
)

// rejoin dials every address of Join at which no living member answers, so
// that it does not matter who starts first, and a gateway that came back, or
// the other half of a split, is found again.
func (p *Pool) rejoin(ctx context.Context) {
	tick := time.NewTicker(rejoinEvery)
	defer tick.Stop()
	for {
		for _, addr := range p.join {
			if !p.answers(addr) {
				_, _ = p.list.Join([]string{addr}) // who is away now is tried again
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
	}
}

// answers asks the living member at an address whether it is there, by the
// name of its life: one that was killed and started again at its address would
// otherwise stay unknown until its old life is given up, which takes seconds.
func (p *Pool) answers(addr string) bool {
	udp, err := net.ResolveUDPAddr("udp", addr)
	if err != nil {
		return false
	}
	life, alive := p.lifeAt(udp.String())
	if !alive || life == p.self.String() {
		return alive
	}
	_, err = p.list.Ping(life, udp)
	return err == nil
}

// lifeAt gives the latest life at an address.
func (p *Pool) lifeAt(addr string) (name string, alive bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	var latest life
	for full, other := range p.peers {
		if other.addr == addr && (!alive || other.start > latest.start) {
			name, latest, alive = full, other.life, true
		}
	}
	return name, alive
}

// tell sends updates out, one at a time.
func (p *Pool) tell(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case <-p.publish:
		}
		_ = p.list.UpdateNode(tellWithin) // on a timeout the periodic exchange brings it
		select {
		case <-ctx.Done():
			return
		case <-time.After(tellEvery):
		}
	}
}

// delegate is Pool's face to memberlist.
type delegate Pool

// NodeMeta gives what this member tells of itself.
func (d *delegate) NodeMeta(int) []byte {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.wire
}

// NotifyMsg is not used.
func (d *delegate) NotifyMsg([]byte) {}

// GetBroadcasts is not used.
func (d *delegate) GetBroadcasts(int, int) [][]byte { return nil }

// LocalState is not used.
func (d *delegate) LocalState(bool) []byte { return nil }

// MergeRemoteState is not used.
func (d *delegate) MergeRemoteState([]byte, bool) {}

// NotifyJoin takes in a member that came. Like the two below it runs under
// memberlist's own lock and must not call back.
func (d *delegate) NotifyJoin(n *memberlist.Node) { d.learn(n) }

// NotifyUpdate takes in what a member tells anew.
func (d *delegate) NotifyUpdate(n *memberlist.Node) { d.learn(n) }

// NotifyLeave forgets a member that left or died.
func (d *delegate) NotifyLeave(n *memberlist.Node) {
	p := (*Pool)(d)
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.peers, n.Name)
	p.bump()
}

func (d *delegate) learn(n *memberlist.Node) {
	meta, err := decodeMeta(n.Meta)
	l, named := parseLife(n.Name)
	p := (*Pool)(d)
	p.mu.Lock()
	defer p.mu.Unlock()
	if l == p.self {
		p.addr = n.Address()
	}
	p.peers[n.Name] = peer{l, n.Address(), meta, named && err == nil}
	p.bump()
}
