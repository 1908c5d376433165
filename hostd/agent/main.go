// Command agent is the first process inside every machine. It runs the
// session's Chrome and shells, serves its files, and ends every client's
// WebSocket; hostd and gateway only carry bytes to it.
//
//	fd 3 ─▶ front ─┬─ 'C' ─▶ control: state, start, notices, captures (hostd)
//	               └─ 'L' ─▶ session link ─▶ HTTP: /exec /files /terminal /cdp …  (gateway)
//	                                           │        │        │        │
//	                                         shell    files   terminal   cdp ─▶ Chrome ◀─ browser
//
// It trusts nobody inside the machine and is trusted by nobody outside with
// more than its own session.
package main

import (
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"os"
	"runtime/debug"
	"slices"
	"sync"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
)

// config is what the driver says.
type config struct {
	kind      session.Kind
	workspace string
	logLevel  slog.Level
}

func parse(args []string) (config, error) {
	var c config
	flags := flag.NewFlagSet("agent", flag.ContinueOnError)
	kind := flags.String("kind", string(session.Both), "what the machine has: browser, shell or both")
	flags.StringVar(&c.workspace, "workspace", agentlink.Workspace, "the session's folder")
	flags.TextVar(&c.logLevel, "log-level", slog.LevelInfo, "least level logged: debug, info, warn or error")
	if err := flags.Parse(args); err != nil {
		return config{}, err
	}
	c.kind = session.Kind(*kind)
	if !slices.Contains(session.Kinds(), c.kind) {
		return config{}, fmt.Errorf("--kind: must be browser, shell or both, not %q", *kind)
	}
	return c, nil
}

func main() {
	cfg, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	status := 0
	switch {
	case err != nil:
	case os.Getpid() == 1:
		if err = harden(); err == nil {
			status, err = runInit()
		}
	default:
		err = runAgent(cfg)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "agent:", err)
		status = 1
	}
	os.Exit(status)
}

func runAgent(cfg config) error {
	holdSignals()
	if err := harden(); err != nil {
		return err
	}
	// The agent's heap is a few MiB in every machine: half of Go's usual
	// headroom costs no time that anyone sees.
	debug.SetGCPercent(50)
	listener, err := inherited()
	if err != nil {
		return err
	}
	log := slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: cfg.logLevel})).With("daemon", "agent")
	slog.SetDefault(log)
	a, err := build(guestParts(cfg), log)
	if err != nil {
		return err
	}
	return a.run(context.Background(), listener)
}

// run serves until ctx ends, then ends everything it started, in reverse.
func (a *agent) run(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var lineage [16]byte
	_, _ = rand.Read(lineage[:]) // never fails
	streams := link.Listen(link.Options{Lineage: lineage})
	a.capture.renew = streams.Renew
	control := newConns(l.Addr())
	f := &front{link: streams, control: control, log: a.log}

	var wg sync.WaitGroup
	part := func(what string, run func() error) {
		wg.Go(func() {
			if err := run(); err != nil && ctx.Err() == nil {
				cancel(fmt.Errorf("%s: %w", what, err))
			}
		})
	}
	if a.browser != nil {
		// A Chrome that cannot start is the machine's state to tell, not the
		// agent's end.
		wg.Go(func() { _ = a.browser.Run(ctx) })
	}
	wg.Go(func() { a.machine.warm(ctx) })
	part("control", func() error { return serveHTTP(ctx, control, a.machine.control(), a.log) })
	part("link", func() error { return serveHTTP(ctx, streams, a.customer, a.log) })
	part("front", func() error { return f.serve(l) })

	<-ctx.Done()
	_ = l.Close()
	_ = control.Close()
	_ = streams.Close()
	a.machine.end()
	a.machine.work.Wait()
	a.close()
	wg.Wait()
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return nil
}
