package main

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"os"
	"time"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/hostd/agent/browser"
	"github.com/berth-dev/berth/hostd/agent/cdp"
	"github.com/berth-dev/berth/hostd/agent/files"
	"github.com/berth-dev/berth/hostd/agent/freeze"
	"github.com/berth-dev/berth/hostd/agent/identity"
	"github.com/berth-dev/berth/hostd/agent/shell"
	"github.com/berth-dev/berth/hostd/agent/terminal"
	"github.com/berth-dev/berth/hostd/agent/workspace"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
)

// agent is everything that runs, wired.
type agent struct {
	log      *slog.Logger
	machine  *machine
	freezer  *freeze.Freezer
	capture  *capture
	browser  *browser.Browser // nil when the kind has none
	customer http.Handler     // of the session link
	undo     []func()         // what close runs, last first
}

// parts says of what an agent is built; tests give others than a guest's.
type parts struct {
	config
	account account.Account
	state   string // folder for the agent's own files, made when missing
	browser browser.Config
	freeze  freeze.Config
	root    string // whose machine-id and keys a clone gets anew
	mend    func(t agentlink.Thaw, asOf time.Time, log *slog.Logger) error
}

func guestParts(cfg config) parts {
	return parts{
		config: cfg, account: account.Guest(), state: "/run/berth-agent", browser: browser.GuestConfig(), root: "/", mend: mend,
		freeze: freeze.Config{Cgroup: "/sys/fs/cgroup", Machine: true, BrowserGID: agentlink.BrowserGID},
	}
}

// build makes the parts that the kind has; run starts them.
func build(p parts, log *slog.Logger) (_ *agent, err error) {
	a := &agent{log: log}
	defer func() {
		if err != nil {
			a.close()
			err = fmt.Errorf("build: %w", err)
		}
	}()
	a.machine = newMachine(p.kind, log)
	tree, err := openWorkspace(p)
	if err != nil {
		return nil, err
	}
	a.undo = append(a.undo, func() { _ = tree.Close() })
	a.freezer = freeze.Open(p.freeze, log)
	a.undo = append(a.undo, func() { _ = a.freezer.Close() })
	a.capture = &capture{
		machine: a.machine, freezer: a.freezer, work: tree.Root, log: log, mend: p.mend,
		identity: func(ctx context.Context) error { return identity.New(ctx, p.root, p.state) },
	}
	a.machine.capture = a.capture
	disk := files.New(tree, p.account)
	disk.Freezer = a.freezer
	mounts := []part{disk}
	if p.kind.HasBrowser() {
		mounts = append(mounts, a.addBrowser(p))
	} else {
		mounts = append(mounts, noBrowser)
	}
	if p.kind.HasShell() {
		mounts = append(mounts, a.addShells(p, tree)...)
	} else {
		mounts = append(mounts, noShell)
	}
	a.customer = customer(a.machine.taken, a.awaitThaw, mounts...)
	return a, nil
}

func openWorkspace(p parts) (*workspace.Tree, error) {
	if err := os.MkdirAll(p.state, 0o755); err != nil {
		return nil, err
	}
	return workspace.Open(p.workspace)
}

func (a *agent) addBrowser(p parts) part {
	cfg := p.browser
	cfg.Freezer = a.freezer
	cfg.Event = func(level, text string) {
		if a.machine.taken() { // what befell a waiting machine is no session's concern
			a.machine.tell(level, text, "browser")
		}
	}
	a.browser = browser.New(cfg, a.log)
	a.machine.chrome, a.capture.browser = a.browser, a.browser
	broker := cdp.New(cdp.Config{
		Chrome: broked{a.browser}, Downloads: cfg.Downloads,
		OnClients: func(n int) { a.machine.notices.add(agentlink.Notice{Clients: &n}) },
		Await:     a.awaitThaw,
	}, a.log)
	a.machine.counted = broker
	a.undo = append(a.undo, broker.Close)
	return broker
}

// broked shows the supervisor to the broker, which knows no browser package.
type broked struct{ *browser.Browser }

func (b broked) Endpoint(ctx context.Context) (cdp.Endpoint, error) {
	e, err := b.Browser.Endpoint(ctx)
	return cdp.Endpoint(e), err
}

func (a *agent) addShells(p parts, tree *workspace.Tree) []part {
	shells := shell.New(shell.Config{
		Account: p.account, Workspace: tree, StateDir: p.state, Freezer: a.freezer, Log: a.log,
		OnExec: func(d shell.Done) { a.machine.notices.event(execEvent(d)) },
	})
	terminals := terminal.New(terminal.Config{Account: p.account, Workspace: p.workspace, Freezer: a.freezer, Log: a.log})
	a.machine.shells, a.capture.shells = shells, shells
	a.machine.environments = []environment{shells, terminals}
	a.undo = append(a.undo, shells.Close, terminals.Close)
	return []part{shells, at{agentlink.PathTerminal, terminals}}
}

// awaitThaw waits while the customer's processes stand still.
func (a *agent) awaitThaw(ctx context.Context) error { return a.freezer.Await(ctx, freeze.Customer) }

func execEvent(d shell.Done) event.Event {
	data, _ := json.Marshal(d)
	return event.Event{Type: event.Exec, Text: d.Command, Data: data}
}

// close ends what build made, last first.
func (a *agent) close() {
	for len(a.undo) > 0 {
		last := len(a.undo) - 1
		a.undo[last]()
		a.undo = a.undo[:last]
	}
}
