package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"time"

	hostsession "github.com/berth-dev/berth/hostd/session"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
)

const (
	// proxydWait is how long a machine's new connection waits for some proxyd of
	// the region to be there: a restart is a pause, not an error.
	proxydWait = 10 * time.Second
	// proxydTry bounds one dial: a proxyd whose computer is gone answers nothing,
	// and the next one may.
	proxydTry = 2 * time.Second
	// proxydShun is how long a proxyd that could not be reached is tried last.
	proxydShun = 5 * time.Second
	// proxydTell bounds telling proxyds of a session's new pass.
	proxydTell = proxydTry
)

// members is what this file needs of gossip.
type members interface {
	Members(role gossip.Role) []gossip.Member
	Changed() <-chan struct{}
}

// proxyds are those of a region. Safe for concurrent use.
type proxyds struct {
	pool   members
	region string
	host   string // this hostd's name
	proof  string // of the cluster's secret
	log    *slog.Logger

	mu     sync.Mutex
	failed map[string]time.Time // guarded by mu: addresses that could not be reached, and when
}

func newProxyds(pool members, region, host, proof string, log *slog.Logger) *proxyds {
	return &proxyds{pool: pool, region: region, host: host, proof: proof, log: log, failed: map[string]time.Time{}}
}

// way makes a session's way to proxyd, shut at first.
func (p *proxyds) way(sessionID string, epoch uint64) hostsession.Way {
	return &way{proxyds: p, changed: make(chan struct{}), met: map[string]struct{}{},
		hello: proxylink.Hello{Proof: p.proof, Host: p.host, SessionID: sessionID, Epoch: epoch}}
}

// addrs are the addresses to try, each session's in an order of its own that
// does not change: its connections meet in one proxyd, which bounds their number
// and knows which of its passes is the newest. Those that failed just now come last.
func (p *proxyds) addrs(sessionID string) (all []string) {
	for _, m := range p.pool.Members(gossip.Proxyd) {
		if m.Region == p.region {
			all = append(all, m.Addr)
		}
	}
	slices.SortFunc(all, func(a, b string) int { return cmp.Compare(rank(sessionID, b), rank(sessionID, a)) })
	p.mu.Lock()
	defer p.mu.Unlock()
	for addr, at := range p.failed {
		if time.Since(at) > proxydShun {
			delete(p.failed, addr)
		}
	}
	slices.SortStableFunc(all, func(a, b string) int { return int(p.shunned(a) - p.shunned(b)) })
	return all
}

// rank orders proxyds for a session: without one of them, or with one more, the
// others keep their order.
func rank(sessionID, addr string) uint64 {
	h := fnv.New64a()
	_, _ = io.WriteString(h, addr+"\x00"+sessionID) // never fails
	return h.Sum64()
}

// shunned is 1 for an address that failed just now. Callers hold mu.
func (p *proxyds) shunned(addr string) int8 {
	if _, ok := p.failed[addr]; ok {
		return 1
	}
	return 0
}

// note remembers how a try went.
func (p *proxyds) note(addr string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if err != nil {
		p.failed[addr] = time.Now()
	} else {
		delete(p.failed, addr)
	}
}

// way is one session's; safe for concurrent use.
type way struct {
	*proxyds
	hello proxylink.Hello // without its pass

	mu      sync.Mutex
	frame   []byte              // guarded by mu: the hello with the newest pass, made once; nil while shut
	changed chan struct{}       // guarded by mu: closed and replaced when frame changes
	met     map[string]struct{} // guarded by mu: addresses that have had connections
}

var errShut = errors.New("the session's way out is shut")

// Show implements session.Way.
func (w *way) Show(pass []byte) {
	h := w.hello
	h.Pass = pass
	frame, err := proxylink.AppendHello(nil, h)
	if err != nil { // the gateway seals none so long
		w.log.Error("a session's pass cannot be shown to proxyd", "session", h.SessionID, "error", err)
		return
	}
	w.set(frame)
	w.tell(frame)
}

// Shut implements session.Way.
func (w *way) Shut() { w.set(nil) }

// tell shows a pass to the proxyds that may have seen an older one: they end
// kept-alive connections that wait for their next request, so that this one too
// goes by the new pass. It returns when they have, or cannot in time.
func (w *way) tell(frame []byte) {
	ctx, cancel := context.WithTimeout(context.Background(), proxydTell)
	defer cancel()
	var all sync.WaitGroup
	w.mu.Lock()
	for addr := range w.met {
		all.Go(func() { w.tellOne(ctx, addr, frame) })
	}
	w.mu.Unlock()
	all.Wait()
}

func (w *way) tellOne(ctx context.Context, addr string, frame []byte) {
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	if err != nil {
		if ctx.Err() == nil { // refused: it is gone, and its connections with it
			w.mu.Lock()
			defer w.mu.Unlock()
			delete(w.met, addr)
		}
		return
	}
	defer conn.Close()
	until, _ := ctx.Deadline()
	_ = conn.SetDeadline(until)
	if _, err := conn.Write(frame); err == nil && conn.(*net.TCPConn).CloseWrite() == nil {
		_, _ = conn.Read(make([]byte, 1)) // it closes once it has read the pass
	}
}

func (w *way) set(frame []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frame = frame
	close(w.changed)
	w.changed = make(chan struct{})
}

func (w *way) now() (frame []byte, changed <-chan struct{}) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.frame, w.changed
}

// meet notes that addr is about to be shown the frame that it gives.
func (w *way) meet(addr string) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.frame != nil {
		w.met[addr] = struct{}{}
	}
	return w.frame
}

// Dial implements session.Way: it tries the proxyds of the region, and again
// when something changes, until ctx or its patience ends.
func (w *way) Dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, proxydWait, apierr.New(apierr.ProxyUnavailable, "no proxyd of region %s answers", w.region))
	defer cancel()
	last := errors.New("gossip knows none")
	for {
		pool := w.pool.Changed()
		frame, changed := w.now()
		if frame == nil {
			return nil, errShut
		}
		for _, addr := range w.addrs(w.hello.SessionID) {
			conn, err := w.try(ctx, addr)
			if err == nil || errors.Is(err, errShut) {
				return conn, err
			}
			last = err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("reach proxyd: %w (last try: %w)", context.Cause(ctx), last)
		case <-pool:
		case <-changed:
		case <-time.After(200 * time.Millisecond): // it may listen again before gossip says so
		}
	}
}

// try connects to one proxyd and shows it what is the newest pass by then.
func (w *way) try(ctx context.Context, addr string) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, proxydTry)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "tcp", addr)
	w.note(addr, err)
	if err != nil {
		return nil, err
	}
	frame := w.meet(addr)
	if frame == nil {
		conn.Close()
		return nil, errShut
	}
	_ = conn.SetWriteDeadline(time.Now().Add(proxydTry)) // a pass may be longer than what the kernel takes at once
	if _, err := conn.Write(frame); err != nil {
		conn.Close()
		return nil, err
	}
	return conn, conn.SetWriteDeadline(time.Time{})
}
