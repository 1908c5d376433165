// Package oci is the machine driver for hosts without virtualisation: every
// machine is a container of runc with a user namespace, cgroup, seccomp list,
// root and disk of its own. DESIGN.md beside hostd/machine tells the flow.
//
// One folder anchors a machine: <Home>/<id> is made first and removed last,
// and whatever else exists of the machine is either in that folder, in the
// cgroup of the same name, or held by the machine's processes alone (mounts,
// loop device and disk live in a mount namespace that nobody else is in and
// vanish with them). So one function, remove, ends a machine in any state.
package oci

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"regexp"
	"sync"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/cgroup"
)

const (
	driverName    = "oci"
	handleVersion = 1
	idRange       = 65536 // ids of one machine, machine.Slot.UIDBase
)

// Config says where the driver finds and puts things. Home, ImageBase and
// AgentLayer are required.
type Config struct {
	Home       string       // folder of machine folders, the driver's alone
	ImageBase  string       // root file system of the guest image, never written
	AgentLayer string       // folder laid over ImageBase, holds usr/lib/berth/agent
	Runc       string       // path or name of runc; default "runc"
	Cgroup     string       // parent of the machines' cgroups; default "/berth/<hash of Home>"
	Log        *slog.Logger // default slog.Default
}

// Driver makes machines with runc. Safe for concurrent use.
type Driver struct {
	cfg    Config
	groups cgroup.Layout
	idmaps idmaps
	root   string // where machines' roots are mounted, each in its own mount namespace

	template sync.Mutex // guards making of disk templates

	mu   sync.Mutex
	live map[string]*container // machines of this Driver value, guarded by mu
}

var _ machine.Driver = (*Driver)(nil)

// New makes a driver and its Home. It does not look at the host: Check does.
func New(cfg Config) (*Driver, error) {
	for _, dir := range []struct {
		name string
		path *string
	}{{"Home", &cfg.Home}, {"ImageBase", &cfg.ImageBase}, {"AgentLayer", &cfg.AgentLayer}} {
		if *dir.path == "" {
			return nil, fmt.Errorf("oci: %s is empty", dir.name)
		}
		abs, err := filepath.Abs(*dir.path)
		if err != nil {
			return nil, fmt.Errorf("oci: %s: %w", dir.name, err)
		}
		*dir.path = abs
	}
	if cfg.Runc == "" {
		cfg.Runc = "runc"
	}
	if cfg.Cgroup == "" {
		// By Home, so that two hostds on one host never sweep each other's.
		sum := sha256.Sum256([]byte(cfg.Home))
		cfg.Cgroup = "/berth/" + hex.EncodeToString(sum[:4])
	}
	if cfg.Log == nil {
		cfg.Log = slog.Default()
	}
	if err := os.MkdirAll(filepath.Join(cfg.Home, templateDir), 0o700); err != nil {
		return nil, fmt.Errorf("oci: make Home: %w", err)
	}
	groups, err := cgroup.Find()
	if err != nil {
		return nil, fmt.Errorf("oci: %w", err)
	}
	root, err := rootPoint(cfg.Home, cfg.ImageBase, cfg.AgentLayer)
	if err != nil {
		return nil, fmt.Errorf("oci: %w", err)
	}
	return &Driver{cfg: cfg, groups: groups, root: root, live: map[string]*container{}}, nil
}

// Name is "oci".
func (d *Driver) Name() string { return driverName }

// Isolation is the operator's sentence.
func (d *Driver) Isolation() string {
	return "machines are containers: each has its own user, pid, mount, network, ipc, uts and cgroup namespaces, " +
		"a system call allow list and resource limits, and root inside is an unprivileged id outside; " +
		"but all share this host's kernel, so a kernel bug is a way out. Use a driver with virtual machines for hostile code."
}

// Close lets go of the driver's machines without ending them: their Done
// channels never close, a later Driver on the same Home adopts them.
func (d *Driver) Close() error {
	d.mu.Lock()
	live := d.live
	d.live = map[string]*container{}
	d.mu.Unlock()
	for _, c := range live {
		c.detach()
	}
	err := d.idmaps.close()
	d.groups.DropParent(d.cfg.Cgroup)
	return err
}

// Sweep removes every machine below Home, whole or half-made, and every
// cgroup below the driver's parent whose id keep refuses. It must not run
// beside a Start.
func (d *Driver) Sweep(ctx context.Context, keep func(id string) bool) error {
	ids, err := d.known()
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	var errs []error
	for _, id := range ids {
		if keep(id) {
			continue
		}
		d.cfg.Log.Info("removing a leftover machine", "machine", id)
		if err := d.sweepOne(ctx, id); err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", id, err))
		}
	}
	d.groups.DropParent(d.cfg.Cgroup) // where no machine is left
	errs = append(errs, d.dropTemplateLeftovers())
	return errors.Join(errs...)
}

// sweepOne has a time of its own, so that one machine that does not die leaves
// time for the others.
func (d *Driver) sweepOne(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	d.mu.Lock()
	c := d.live[id]
	d.mu.Unlock()
	if c != nil { // adopted or started by this Driver: it holds the disk
		return c.Stop(ctx)
	}
	return d.remove(ctx, id)
}

// known lists the ids of all machine folders and cgroups, without repetition.
func (d *Driver) known() ([]string, error) {
	entries, err := os.ReadDir(d.cfg.Home)
	if err != nil {
		return nil, err
	}
	seen := map[string]bool{}
	var ids []string
	add := func(id string) {
		if validID.MatchString(id) && !seen[id] {
			seen[id] = true
			ids = append(ids, id)
		}
	}
	for _, e := range entries {
		add(e.Name())
	}
	for _, id := range d.groups.Children(d.cfg.Cgroup) {
		add(id)
	}
	return ids, nil
}

// validID keeps an id from being a path, an option of runc or too long for a
// cgroup's name.
var validID = regexp.MustCompile(`^[0-9a-f]{1,64}$`)

func (d *Driver) dir(id string) string   { return filepath.Join(d.cfg.Home, id) }
func (d *Driver) group(id string) string { return d.cfg.Cgroup + "/" + id }
