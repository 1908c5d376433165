package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/berth-dev/berth/hostd/control"
	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/microvm"
	"github.com/berth-dev/berth/hostd/machine/oci"
	"github.com/berth-dev/berth/shared/agentlink"
)

// The drivers that --driver names.
const (
	driverAuto    = "auto"
	driverOCI     = "oci"
	driverMicrovm = "microvm"
)

// homes are the folders below Home of each driver's machines.
var homes = map[string]string{driverOCI: "machines", driverMicrovm: "microvms"}

// driver makes the driver that the flags ask for, one that works here.
func (c hostConfig) driver(ctx context.Context, log *slog.Logger) (machine.Driver, error) {
	if c.Driver != driverAuto {
		return c.working(ctx, c.Driver, log)
	}
	d, err := c.working(ctx, driverMicrovm, log)
	if err == nil {
		return d, nil
	}
	log.Warn("machines of this host are containers, which share its kernel: microVMs, with hardware between them, do not work here", "why", err)
	d, errOCI := c.working(ctx, driverOCI, log)
	if errOCI != nil {
		return nil, errors.Join(err, errOCI)
	}
	return d, nil
}

// working makes a driver and tries it.
func (c hostConfig) working(ctx context.Context, name string, log *slog.Logger) (machine.Driver, error) {
	d, err := c.open(name, c.Accel, log)
	if err != nil {
		return nil, err
	}
	if err := d.Check(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("driver %s does not work on this host: %w", name, err), d.Close())
	}
	return d, nil
}

func (c hostConfig) open(name, accel string, log *slog.Logger) (machine.Driver, error) {
	needs := map[string]string{"--agent-layer": c.AgentLayer}
	if name == driverOCI {
		needs["--image-base"] = c.ImageBase
	} else {
		needs["--vm-files"] = c.VMFiles
	}
	for flag, dir := range needs {
		if dir == "" {
			return nil, fmt.Errorf("%s is not set, and driver %s needs it: 'make image' builds the guest image and says where it is", flag, name)
		}
	}
	home := filepath.Join(c.Home, homes[name])
	if name == driverOCI {
		return oci.New(oci.Config{Home: home, ImageBase: c.ImageBase, AgentLayer: c.AgentLayer, Log: log})
	}
	cache := c.TemplateCache
	if cache == "" {
		cache = filepath.Join(c.Home, "templates")
	}
	return microvm.New(microvm.Config{Home: home, Cache: cache, Boot: c.VMFiles, AgentLayer: c.AgentLayer, Accel: accel, Ready: ready, Settle: settle, Log: log})
}

// ready waits until all that a machine's kind has is up.
func ready(ctx context.Context, dial microvm.Dial) error {
	a := control.New(dial)
	defer a.Close()
	return a.Ready(ctx)
}

// settle makes a machine fit to become a template.
func settle(ctx context.Context, dial microvm.Dial) error {
	a := control.New(dial)
	defer a.Close()
	return a.Freeze(ctx, agentlink.Freeze{Template: true})
}

// sweepOthers ends the machines of the drivers that this host ran before it was
// given another, so that none runs on unseen.
func (c hostConfig) sweepOthers(ctx context.Context, mine string, log *slog.Logger) error {
	var errs []error
	for name, home := range homes {
		if _, err := os.Stat(filepath.Join(c.Home, home)); name == mine || err != nil {
			continue
		}
		errs = append(errs, c.sweepAll(ctx, name, log))
	}
	return errors.Join(errs...)
}

// sweepAll ends every machine of a driver. It starts none, so how its guests
// would be run does not matter.
func (c hostConfig) sweepAll(ctx context.Context, name string, log *slog.Logger) error {
	d, err := c.open(name, microvm.TCG, log)
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	return errors.Join(d.Sweep(ctx, func(string) bool { return false }), d.Close())
}

// recipe names what machines are made from; its parts are named by their content.
func (c hostConfig) recipe(driver string) string {
	base := c.ImageBase
	if driver == driverMicrovm {
		base = c.VMFiles
	}
	return base + " " + c.AgentLayer
}
