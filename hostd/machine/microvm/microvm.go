// Package microvm is the machine driver with hardware isolation: every machine
// is a QEMU microvm process under KVM (or, when asked for, under emulation),
// started as a copy-on-write clone of a template and captured as its difference
// from it. DESIGN.md beside hostd/machine tells the flow.
//
// One folder anchors a machine: <Home>/<id> is made first and removed last, and
// whatever else exists of the machine is either in that folder or held by its
// one process, which is in the cgroup of the same name. So one function,
// remove, ends a machine in any state.
package microvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/cgroup"
)

const (
	driverName    = "microvm"
	handleVersion = 1
	idRange       = 65536 // ids of one slot, machine.Slot.UIDBase

	// CPU shares of one virtual processor: a full one, and the background one
	// of a machine that waits in the pool; and the cores that it may burst to.
	fullShares       = 1024
	backgroundShares = 64
	burst            = 2
)

// Dial connects to a machine's agent; nothing has been written yet.
type Dial func(ctx context.Context) (net.Conn, error)

// Config says where the driver finds and puts things. Home, Cache, Boot,
// AgentLayer and Ready are required.
type Config struct {
	Home       string // folder of machine folders, the driver's alone
	Cache      string // folder of templates, on the file system of Boot if possible
	Boot       string // folder with vmlinuz, initrd and disk.ext4, made by scripts/image/vm.sh
	AgentLayer string // folder that holds usr/lib/berth/agent
	Accel      string // Auto, KVM or TCG; default Auto
	QEMU       string // path or name, below /usr; default "qemu-system-x86_64"
	Cgroup     string // parent of the machines' cgroups; default "/berth/<hash of Home>"
	// Ready waits until the agent answers and all that the machine's kind has was
	// up once.
	Ready func(ctx context.Context, dial Dial) error
	// Settle makes a machine that is ready fit to be captured into a template;
	// nil: it is.
	Settle func(ctx context.Context, dial Dial) error
	Log    *slog.Logger // default slog.Default
}

// Driver makes machines with QEMU. Safe for concurrent use.
type Driver struct {
	cfg     Config
	qemu    string // absolute path
	version string // QEMU's version and build
	accel   accelerator
	class   string
	groups  cgroup.Layout
	store   store
	ahead   *ahead

	building chan struct{} // holds one token: whoever has it may make, load and add templates

	mu        sync.Mutex
	live      map[string]*vm       // machines of this Driver value, guarded by mu
	templates map[string]*template // by hash, loaded, guarded by mu
}

var _ machine.Keeper = (*Driver)(nil)

// New makes a driver, its Home and its Cache. It runs QEMU once, for its
// version; the rest of the host is for Check to look at.
func New(cfg Config) (*Driver, error) {
	if err := cfg.complete(); err != nil {
		return nil, fmt.Errorf("microvm: %w", err)
	}
	d := &Driver{cfg: cfg, live: map[string]*vm{}, templates: map[string]*template{}, store: store{cfg.Cache},
		building: make(chan struct{}, 1)}
	d.ahead = newAhead(d.cfg.Home)
	d.building <- struct{}{}
	if err := d.look(); err != nil {
		return nil, fmt.Errorf("microvm: %w", err)
	}
	return d, nil
}

func (c *Config) complete() error {
	for _, dir := range []struct {
		name string
		path *string
	}{{"Home", &c.Home}, {"Cache", &c.Cache}, {"Boot", &c.Boot}, {"AgentLayer", &c.AgentLayer}} {
		if *dir.path == "" {
			return fmt.Errorf("%s is empty", dir.name)
		}
		abs, err := filepath.Abs(*dir.path)
		if err != nil {
			return fmt.Errorf("%s: %w", dir.name, err)
		}
		*dir.path = abs
	}
	if c.Ready == nil {
		return errors.New("no function Ready")
	}
	if c.Settle == nil {
		c.Settle = func(context.Context, Dial) error { return nil }
	}
	if c.QEMU == "" {
		c.QEMU = "qemu-system-x86_64"
	}
	if c.Cgroup == "" {
		// By Home, so that two hostds on one host never sweep each other's.
		sum := sha256.Sum256([]byte(c.Home))
		c.Cgroup = "/berth/" + hex.EncodeToString(sum[:4])
	}
	if c.Log == nil {
		c.Log = slog.Default()
	}
	for _, dir := range []string{c.Home, c.Cache} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			return err
		}
	}
	return nil
}

// look finds out what this host gives machines.
func (d *Driver) look() (err error) {
	path, err := exec.LookPath(d.cfg.QEMU)
	if err != nil {
		return fmt.Errorf("%w: apt-get install --no-install-recommends qemu-system-x86", err)
	}
	if d.qemu, err = filepath.EvalSymlinks(path); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if d.version, err = versionOf(ctx, d.qemu); err != nil {
		return err
	}
	if d.accel, err = pickAccelerator(d.cfg.Accel); err != nil {
		return err
	}
	processor, err := d.accel.processor()
	if err != nil {
		return err
	}
	// The counter's rate to a tenth of a megahertz: what differs less drifts by
	// less than a clock is set right by at every thaw.
	d.class = fmt.Sprintf("%s %s %.1fMHz qemu-%s", d.accel.name, processor, float64(d.accel.khz)/1000, d.version)
	d.groups, err = cgroup.Find()
	return err
}

// Name is "microvm".
func (d *Driver) Name() string { return driverName }

// CPUClass names what a memory capture needs to run again. The guest's kernel
// is not in it: it is part of the memory.
func (d *Driver) CPUClass() string { return d.class }

// Isolation is the operator's sentence.
func (d *Driver) Isolation() string {
	const rest = "each machine is a virtual machine with a kernel of its own in an unprivileged QEMU process, which has its own user id, " +
		"empty namespaces without the host's files, a system call filter and resource limits"
	if d.accel.name == KVM {
		return rest + "; the processor's virtualisation (KVM) separates it from the host."
	}
	return rest + "; but instructions are EMULATED (tcg): ten times slower and more, and QEMU does not promise that its emulator keeps " +
		"hostile code in. Use it for tests only."
}

// Close lets go of the driver's machines and templates without ending them:
// their Done channels never close, a later Driver on the same Home adopts them.
func (d *Driver) Close() error {
	d.mu.Lock()
	live, templates := d.live, d.templates
	d.live, d.templates = map[string]*vm{}, map[string]*template{}
	d.mu.Unlock()
	var errs []error
	for _, m := range live {
		errs = append(errs, m.detach())
	}
	for _, t := range templates {
		errs = append(errs, t.close())
	}
	d.groups.DropParent(d.cfg.Cgroup)
	return errors.Join(errs...)
}

// Sweep removes every machine below Home, whole or half-made, whose id keep
// refuses, and then the memory of templates that no machine runs from (their
// files stay). It must not run beside a Start.
func (d *Driver) Sweep(ctx context.Context, keep func(id string) bool) error {
	ids, err := d.known()
	if err != nil {
		return fmt.Errorf("sweep: %w", err)
	}
	var errs []error
	used := map[string]bool{}
	for _, id := range ids {
		if keep(id) {
			if s, err := readState(d.dir(id)); err == nil {
				used[s.Template] = true
			}
			continue
		}
		d.cfg.Log.Info("removing a leftover machine", "machine", id)
		if err := d.sweepOne(ctx, id); err != nil {
			errs = append(errs, fmt.Errorf("sweep %s: %w", id, err))
		}
	}
	errs = append(errs, d.dropHolders(ctx, used), d.store.sweep(), d.ahead.sweep())
	d.groups.DropParent(d.cfg.Cgroup) // where no machine is left
	return errors.Join(errs...)
}

// sweepOne has a time of its own, so that one machine that does not die leaves
// time for the others.
func (d *Driver) sweepOne(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, cleanupTime)
	defer cancel()
	d.mu.Lock()
	m := d.live[id]
	d.mu.Unlock()
	if m != nil {
		return m.Stop(ctx)
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

// remove ends a machine in whatever state it is, whole, half-made or
// half-removed, and removes everything of it. The folder goes last: while it
// is there, Sweep finds the machine.
func (d *Driver) remove(ctx context.Context, id string) error {
	if err := d.groups.Kill(ctx, d.group(id)); err != nil {
		return fmt.Errorf("kill: %w", err)
	}
	if err := d.groups.Rmdir(ctx, d.group(id)); err != nil {
		return err
	}
	if err := os.RemoveAll(d.dir(id)); err != nil {
		return fmt.Errorf("remove folder: %w", err)
	}
	return nil
}

// validID keeps an id from being a path or too long for a cgroup's name.
var validID = regexp.MustCompile(`^[0-9a-f]{1,64}$`)

func (d *Driver) dir(id string) string   { return filepath.Join(d.cfg.Home, id) }
func (d *Driver) group(id string) string { return d.cfg.Cgroup + "/" + id }
