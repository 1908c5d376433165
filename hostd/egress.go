package main

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// proxydWait is how long a machine's new connection waits for some proxyd of
// the region to be there: a restart is a pause, not an error.
const proxydWait = 10 * time.Second

// proxydTry bounds one dial: a proxyd whose computer is gone answers nothing,
// and the next one may.
const proxydTry = 2 * time.Second

// members is what this file needs of gossip.
type members interface {
	Members(role gossip.Role) []gossip.Member
	Changed() <-chan struct{}
}

// egressVia gives each session its way out: any proxyd of the region.
func egressVia(pool members, region string, secret *trust.Secret) func(string, uint64) func(context.Context) (net.Conn, error) {
	return func(sessionID string, epoch uint64) func(context.Context) (net.Conn, error) {
		hello := proxylink.Hello{Proof: secret.Proof(), SessionID: sessionID, Epoch: epoch}
		return func(ctx context.Context) (net.Conn, error) {
			ctx, cancel := context.WithTimeoutCause(ctx, proxydWait,
				apierr.New(apierr.ProxyUnavailable, "no proxyd of region %s answers", region))
			defer cancel()
			return dialProxyd(ctx, pool, region, hello)
		}
	}
}

// dialProxyd tries the proxyds of the region in random order, and again when
// the pool changes, until ctx ends.
func dialProxyd(ctx context.Context, pool members, region string, hello proxylink.Hello) (net.Conn, error) {
	last := errors.New("gossip knows none")
	for {
		changed := pool.Changed()
		all := pool.Members(gossip.Proxyd)
		rand.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
		for _, m := range all {
			if m.Region != region {
				continue
			}
			try, cancel := context.WithTimeout(ctx, proxydTry)
			conn, err := proxylink.Dial(try, m.Addr, hello)
			cancel()
			if err == nil {
				return conn, nil
			}
			last = err
		}
		select {
		case <-ctx.Done():
			return nil, fmt.Errorf("reach proxyd: %w (last try: %w)", context.Cause(ctx), last)
		case <-changed:
		case <-time.After(200 * time.Millisecond): // it may listen again before gossip says so
		}
	}
}
