package main

import (
	"context"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// lane leads through proxyd, for a session of so many rules that match no site.
func (e *egressBench) lane(session string, rules int) (lane, error) {
	pid, err := e.stack.pid("proxyd")
	if err != nil {
		return lane{}, err
	}
	secret, err := trust.LoadOrCreate(filepath.Join(e.stack.home, "cluster.secret"))
	if err != nil {
		return lane{}, err
	}
	pass := proxylink.Pass{SessionID: session, ProjectID: "bench", Epoch: 1, Version: 1, Expires: time.Now().Add(time.Hour)}
	for i := range rules {
		pattern := fmt.Sprintf(`(^|\.)(shop|store|cart|pay)%d[a-z]{2,9}\.(com|net|org)$|`, i)
		pattern += strings.Repeat("x", egress.MaxPattern-len(pattern))
		pass.Routes = append(pass.Routes, proxylink.Route{Rule: egress.Rule{Type: egress.Custom, Server: "http://proxy.invalid:1", DomainPattern: pattern}})
	}
	sealed, err := proxylink.SealPass(secret, pass)
	if err != nil {
		return lane{}, err
	}
	hello, err := proxylink.AppendHello(nil, proxylink.Hello{Proof: secret.Proof(), Host: "bench", SessionID: session, Epoch: 1, Pass: sealed})
	return lane{Addr: fmt.Sprintf("127.0.0.1:%d", e.stack.base+201), Hello: hello, pid: pid}, err // as daemons.sh says
}

// inside makes a session and gives what downloads in its shell, by the session's
// listener, hostd and proxyd: GB/s.
func (e *egressBench) inside(ctx context.Context) (get func(context.Context) (float64, error), release func(), err error) {
	in := kinds["shell"]
	in.Proxy = api.ProxySetting(`[{"type":"none","scope":"all"}]`)
	s, err := e.stack.api.CreateSession(ctx, in, "")
	if err != nil {
		return nil, nil, err
	}
	command := fmt.Sprintf("curl --silent --show-error --http0.9 --proxytunnel --max-time 1.5 --output /dev/null --write-out %%{speed_download} http://%s/; true", e.bulk.addrs[0])
	get = func(ctx context.Context) (float64, error) {
		r, err := e.stack.api.Exec(ctx, s.Id, api.Exec{Command: command})
		if err != nil {
			return 0, err
		}
		rate, err := strconv.ParseFloat(strings.TrimSpace(r.Stdout), 64)
		if err == nil && rate == 0 {
			err = fmt.Errorf("curl got nothing: %s", r.Stderr)
		}
		return rate / 1e9, err
	}
	return get, func() { _ = e.stack.release(context.WithoutCancel(ctx), s.Id) }, nil
}
