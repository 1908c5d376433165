package microvm

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/berth-dev/berth/hostd/machine"
)

// template is a captured pristine machine, loaded: machines start from it.
// Immutable.
type template struct {
	hash   string
	meta   meta
	holder holder
	device string // path
	base   *os.File
	top    *os.File
}

// files closes all but the memory.
func (t *template) files() error {
	var errs []error
	for _, f := range []*os.File{t.base, t.top} {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

func (t *template) close() error { return errors.Join(t.files(), t.holder.close()) }

// Template is the content hash of the template that machines of a spec start
// from on this host. It makes the template where there is none: that boots a
// guest, which takes a second with KVM and a minute with emulation.
func (d *Driver) Template(ctx context.Context, spec machine.Spec) (string, error) {
	t, err := d.templateFor(ctx, spec)
	if err != nil {
		return "", fmt.Errorf("template: %w", err)
	}
	return t.hash, nil
}

// templateFor is the template that a spec names, or else the one that its kind
// and size are made by here.
func (d *Driver) templateFor(ctx context.Context, spec machine.Spec) (*template, error) {
	if validHash.MatchString(spec.Template) {
		return d.open(ctx, spec.Template)
	}
	recipe, err := d.Recipe(spec)
	if err != nil {
		return nil, err
	}
	hash := d.store.index(recipe)
	if hash == "" {
		if hash, err = d.make(ctx, spec, recipe); err != nil {
			return nil, err
		}
	}
	return d.open(ctx, hash)
}

// make builds the template of a recipe unless somebody just has.
func (d *Driver) make(ctx context.Context, spec machine.Spec, recipe string) (string, error) {
	leave, err := d.enter(ctx)
	if err != nil {
		return "", err
	}
	defer leave()
	if hash := d.store.index(recipe); hash != "" {
		return hash, nil
	}
	return d.build(ctx, spec, recipe)
}

// enter waits for the right to make, load and add templates.
func (d *Driver) enter(ctx context.Context) (leave func(), err error) {
	select {
	case <-d.building:
		return func() { d.building <- struct{}{} }, nil
	case <-ctx.Done():
		return nil, fmt.Errorf("wait for another template: %w", context.Cause(ctx))
	}
}

// Made is the hash of the template made by a recipe, "" when there is none here.
func (d *Driver) Made(recipe string) string {
	if !validHash.MatchString(recipe) {
		return ""
	}
	return d.store.index(recipe)
}

// SetMade says that a template is by a recipe.
func (d *Driver) SetMade(recipe, hash string) error {
	if !d.store.has(hash) {
		return fmt.Errorf("template %.12q is not on this host", hash)
	}
	m, err := d.store.read(hash)
	if err != nil {
		return err
	}
	if m.Recipe != recipe { // a host that says otherwise would keep this one from ever making its own
		return fmt.Errorf("template %.12s is by recipe %.12q, not %.12q", hash, m.Recipe, recipe)
	}
	return d.store.setIndex(recipe, hash)
}

// Recipe is the hash of all that the template of a spec is made by.
func (d *Driver) Recipe(spec machine.Spec) (string, error) {
	h := sha256.New()
	fmt.Fprintf(h, "%d %s %s %d %d %d %d\n", metaVersion, d.class, spec.Kind, spec.Size.VCPU, spec.Size.GiB, spec.DiskBytes, spec.Pids)
	for _, path := range []string{d.bootFile("vmlinuz"), d.bootFile("initrd"), d.bootFile("disk.ext4"), d.agentFile()} {
		p, err := d.store.sum(path)
		if err != nil {
			return "", err
		}
		fmt.Fprintln(h, p.Hash)
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

func (d *Driver) agentFile() string { return filepath.Join(d.cfg.AgentLayer, agentPath) }

// open loads a template, once: every file is read and has to have its hash.
func (d *Driver) open(ctx context.Context, hash string) (*template, error) {
	return d.openAs(ctx, hash, d.class)
}

// openAs is open for a CPU class that need not be this host's any more: a
// machine that runs does not mind that QEMU was replaced meanwhile.
func (d *Driver) openAs(ctx context.Context, hash, class string) (*template, error) {
	if t := d.loaded(hash); t != nil {
		return t, t.meta.isFor(class)
	}
	leave, err := d.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	if t := d.loaded(hash); t != nil {
		return t, t.meta.isFor(class)
	}
	t, err := d.load(ctx, hash, class)
	if err == nil && class == d.class { // else nothing starts from it
		if err = d.prove(ctx, t); err != nil {
			err = errors.Join(err, t.close()) // its holder stays for the next try
		}
	}
	if err != nil {
		return nil, fmt.Errorf("template %.12s: %w", hash, err)
	}
	d.mu.Lock()
	d.templates[hash] = t
	d.mu.Unlock()
	return t, nil
}

func (d *Driver) loaded(hash string) *template {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.templates[hash]
}

func (d *Driver) load(ctx context.Context, hash, class string) (_ *template, err error) {
	t := &template{hash: hash, device: d.store.path(hash, "device")}
	if t.meta, err = d.store.read(hash); err != nil {
		return nil, err
	}
	if err := t.meta.isFor(class); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, t.files())
		}
	}()
	for _, c := range t.meta.contents() {
		if c.name == "ram" {
			continue // its loader checks it
		}
		got, err := d.store.sum(d.store.path(hash, c.name))
		if err != nil {
			return nil, err
		}
		if got != c.part {
			return nil, fmt.Errorf("%s is damaged: hash %.12s, want %.12s", c.name, got.Hash, c.part.Hash)
		}
	}
	if t.base, err = os.Open(d.store.path(hash, "base")); err != nil {
		return nil, err
	}
	if t.top, err = os.Open(d.store.path(hash, "top.qcow2")); err != nil {
		return nil, err
	}
	t.holder, err = d.hold(ctx, hash, t.meta.RAM)
	return t, err
}
