package main

import (
	"context"
	"fmt"
	"net"
	"path/filepath"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/trust"
)

// hops says where evaluate's time goes: the same call to Chrome, to the agent
// over a session link of our own, through hostd, and through the gateway.
func (b *bench) hops(ctx context.Context) error {
	g, release, err := b.open(ctx)
	if err != nil {
		return err
	}
	defer release()
	secret, err := trust.LoadOrCreate(filepath.Join(b.stack.home, "cluster.secret"))
	if err != nil {
		return err
	}
	host := hostlink.NewClient(fmt.Sprintf("127.0.0.1:%d", b.stack.base+101), secret)
	defer host.Close()
	agent := func(ctx context.Context) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", filepath.Join(b.stack.home, "hostd", "machines", filepath.Base(g.group), "agent.sock"))
		if err != nil {
			return nil, err
		}
		_, err = conn.Write([]byte{agentlink.PrefaceLink})
		return conn, err
	}
	tunnel := func(ctx context.Context) (net.Conn, error) { return host.Tunnel(ctx, g.Id, 1) }
	straight, err := g.direct(ctx)
	if err != nil {
		return err
	}
	defer straight.ws.close()
	ways := []struct {
		name, url string
		dial      dialer
		took      samples
		c         *caller
	}{
		{name: "Chrome", c: straight},
		{name: "agent", url: "ws://agent" + agentlink.PathCDP, dial: overLink(agent)},
		{name: "hostd, agent", url: "ws://agent" + agentlink.PathCDP, dial: overLink(tunnel)},
		{name: "gateway, hostd, agent", url: *g.ConnectUrl, dial: dialPlain},
	}
	var sides []func(context.Context, bool) error
	for i := range ways {
		w := &ways[i]
		if w.c == nil {
			if w.c, err = newCaller(ctx, w.url, w.dial); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			defer w.c.ws.close()
		}
		sides = append(sides, w.c.evaluate(&w.took))
	}
	if err := interleave(ctx, 3, b.rounds(40, 15), sides...); err != nil {
		return err
	}
	for _, w := range ways[1:] {
		b.add(figure{What: "evaluate by way of " + w.name, Beside: "the same Chromium directly", Unit: "µs", Plain: true,
			Value: w.took.median(), Peer: ways[0].took.median(), Count: len(w.took)})
	}
	return nil
}

func overLink(d link.Dialer) dialer {
	return func(ctx context.Context, _, _ string) (net.Conn, error) { return link.Dial(ctx, d, link.Options{}) }
}
