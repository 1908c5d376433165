package microvm

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/cgroup"
)

const (
	minDisk    = 32 << 20 // bytes
	deviceName = "device" // a restored machine's devices' state, in its folder
)

// data is the driver's part of a handle.
type data struct {
	Template string `json:"template"` // content hash
}

// Start makes a machine as a clone of its template; see machine.Driver. The
// spec names the template by its content hash; where it does not, the one that
// this host makes for the kind and size is taken, and made if need be.
func (d *Driver) Start(ctx context.Context, spec machine.Spec, persist func(machine.Handle) error) (machine.Machine, error) {
	m, err := d.start(ctx, spec, nil, persist)
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.ID, err)
	}
	conn, err := m.Dial(ctx)
	if err == nil {
		return m, conn.Close()
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	return nil, fmt.Errorf("start %s: %w", spec.ID, errors.Join(err, m.Stop(clean)))
}

// Restore makes a machine from a capture and leaves it frozen; see machine.Keeper.
func (d *Driver) Restore(ctx context.Context, spec machine.Spec, c machine.Capture, persist func(machine.Handle) error) (machine.Kept, error) {
	if c.Driver() != driverName || c.CPUClass() != d.class {
		return nil, fmt.Errorf("restore %s: the capture is of driver %q and CPU class %q, this host has %q and %q",
			spec.ID, c.Driver(), c.CPUClass(), driverName, d.class)
	}
	if !d.store.has(c.Template()) {
		return nil, fmt.Errorf("restore %s: template %.12q of the capture is not on this host", spec.ID, c.Template())
	}
	m, err := d.start(ctx, spec, c, persist)
	if err != nil {
		return nil, fmt.Errorf("restore %s: %w", spec.ID, err)
	}
	return m, nil
}

// start makes a machine from its template, and from what a capture changes in
// it if there is one.
func (d *Driver) start(ctx context.Context, spec machine.Spec, c machine.Capture, persist func(machine.Handle) error) (*vm, error) {
	if err := checkSpec(spec); err != nil {
		return nil, err
	}
	t, err := d.templateOf(ctx, spec, c)
	if err != nil {
		return nil, err
	}
	if err := t.fits(spec); err != nil {
		return nil, err
	}
	return d.startFrom(ctx, t, spec, c, nil, persist)
}

// templateOf is the capture's template if there is a capture, else the spec's.
func (d *Driver) templateOf(ctx context.Context, spec machine.Spec, c machine.Capture) (*template, error) {
	if c != nil {
		return d.open(ctx, c.Template())
	}
	return d.templateFor(ctx, spec)
}

// startFrom is start with everything checked. A tap is given where the slot's
// is not to be opened.
func (d *Driver) startFrom(ctx context.Context, t *template, spec machine.Spec, c machine.Capture, tap *os.File, persist func(machine.Handle) error) (*vm, error) {
	own, err := json.Marshal(data{t.hash})
	if err != nil {
		return nil, err
	}
	h := machine.Handle{Driver: driverName, Version: handleVersion, Spec: spec, Data: own}
	if err := persist(h); err != nil {
		return nil, fmt.Errorf("persist: %w", err)
	}
	// Not MkdirAll: a folder that exists is another machine's, to be left alone.
	if err := os.Mkdir(d.dir(spec.ID), 0o700); err != nil {
		return nil, err
	}
	l := &launch{driver: d, handle: h, template: t, dir: d.dir(spec.ID), tap: tap}
	m, err := l.run(ctx, c)
	if err == nil {
		return m, nil
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	return nil, errors.Join(err, l.undo(clean))
}

func checkSpec(spec machine.Spec) error {
	switch {
	case !validID.MatchString(spec.ID):
		return fmt.Errorf("id %q is not lower-case hex of 1 to 64 digits", spec.ID)
	case spec.DiskBytes < minDisk || spec.DiskBytes%4096 != 0:
		return fmt.Errorf("diskBytes is %d, want a multiple of 4096 from %d", spec.DiskBytes, minDisk)
	case spec.Pids < 1:
		return fmt.Errorf("pids is %d, want at least 1", spec.Pids)
	case spec.Size.VCPU < 1 || spec.Size.GiB < 1:
		return fmt.Errorf("size is %d processors and %d GiB, want at least 1 of each", spec.Size.VCPU, spec.Size.GiB)
	case spec.Slot.UIDBase < idRange:
		return fmt.Errorf("slot.uidBase is %d, want at least %d: lower ids are the host's", spec.Slot.UIDBase, idRange)
	case !filepath.IsAbs(spec.Slot.NetNS):
		return fmt.Errorf("slot.netns is %q, want a path", spec.Slot.NetNS)
	}
	return nil
}

// fits says whether machines of a spec can be made from the template.
func (t *template) fits(spec machine.Spec) error {
	if t.meta.VCPU != spec.Size.VCPU || t.meta.RAM.Size != int64(spec.Size.GiB)<<30 || t.meta.Disk != t.meta.Base.Size+spec.DiskBytes {
		return fmt.Errorf("template %.12s has %d processors, %d GiB of memory and %d bytes of disk, not %d, %d and %d", t.hash,
			t.meta.VCPU, t.meta.RAM.Size>>30, t.meta.Disk-t.meta.Base.Size, spec.Size.VCPU, spec.Size.GiB, spec.DiskBytes)
	}
	return nil
}

// launch is a machine in the making.
type launch struct {
	driver   *Driver
	handle   machine.Handle
	template *template
	dir      string
	tap      *os.File // nil: the slot's
	layers   []string
	opened   []*os.File
	process  *cgroup.Process
	qmp      *monitor
}

// keep has a file closed when the launch is over: QEMU has its own by then.
func (l *launch) keep(f *os.File, err error) (*os.File, error) {
	if err == nil {
		l.opened = append(l.opened, f)
	}
	return f, err
}

func (l *launch) closeFiles() {
	for _, f := range l.opened {
		_ = f.Close() // what was written was checked
	}
	l.opened = nil
}

// undo removes everything of a machine whose launch failed.
func (l *launch) undo(ctx context.Context) error {
	var err error
	if l.process != nil { // which may not be in its cgroup yet
		err = end(l.process)
	}
	err = errors.Join(err, l.driver.remove(ctx, l.handle.Spec.ID))
	if l.qmp != nil {
		_ = l.qmp.Close() // QEMU has gone
	}
	return err
}

func (l *launch) run(ctx context.Context, c machine.Capture) (*vm, error) {
	defer l.closeFiles()
	device, err := l.files(ctx, c)
	if err != nil {
		return nil, err
	}
	if err := l.spawn(ctx, device); err != nil {
		return nil, err
	}
	m, err := l.load(ctx, c)
	if err != nil {
		if words := l.driver.lastWords(l.handle.Spec.ID); words != "" {
			err = fmt.Errorf("%w; QEMU said: %s", err, words)
		}
		return nil, err
	}
	return m, nil
}

// files puts disk layers and devices' state into the machine's folder. On top
// of a capture's layers, which stand still, comes one to write to.
func (l *launch) files(ctx context.Context, c machine.Capture) (device *os.File, err error) {
	if c == nil {
		device, err = l.keep(os.Open(l.template.device))
	} else {
		device, err = l.fetch(c)
	}
	if err != nil {
		return nil, err
	}
	live := newLayerName()
	f, err := l.driver.newLayer(ctx, l.dir, live, l.template.meta.Disk)
	if err != nil {
		return nil, err
	}
	l.layers = append(l.layers, live)
	return device, f.Close()
}

// fetch copies a capture's layers and devices' state.
func (l *launch) fetch(c machine.Capture) (device *os.File, err error) {
	for _, layer := range c.Layers() {
		if !validLayer.MatchString(layer.Name) {
			return nil, fmt.Errorf("layer %q: not a name of a layer", layer.Name)
		}
		if layer.Size < 0 || layer.Size > fileLimit(l.template.meta.Disk) {
			return nil, fmt.Errorf("layer %s has %d bytes, more than a disk of this size can take", layer.Name, layer.Size)
		}
		if l.driver.ahead.give(layer, l.dir) {
			l.layers = append(l.layers, layer.Name)
			continue
		}
		f, err := l.fetchTo(layerFile(layer.Name), layer.Size, layer.Open)
		if err != nil {
			return nil, fmt.Errorf("layer %s: %w", layer.Name, err)
		}
		if err := f.Close(); err != nil {
			return nil, err
		}
		l.layers = append(l.layers, layer.Name)
	}
	return l.keep(l.fetchTo(deviceName, -1, c.Device))
}

// maxDevice bounds a devices' state, bytes.
const maxDevice = 16 << 20

// fetchTo copies a stream into a new file, open at its start; size -1 is any.
func (l *launch) fetchTo(name string, size int64, open func() (io.ReadCloser, error)) (_ *os.File, err error) {
	from, err := open()
	if err != nil {
		return nil, err
	}
	defer from.Close()
	f, err := os.OpenFile(filepath.Join(l.dir, name), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	limit := size
	if size < 0 {
		limit = maxDevice
	}
	n, err := copySparse(f, io.LimitReader(from, limit+1))
	if err == nil && (n > limit || size >= 0 && n < size) {
		err = fmt.Errorf("%s has %d bytes, want %d", name, n, limit)
	}
	if err == nil {
		_, err = f.Seek(0, io.SeekStart)
	}
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// copySparse writes a stream into an empty file, zeros as holes.
func copySparse(f *os.File, r io.Reader) (n int64, err error) {
	buf := make([]byte, blockSize)
	for {
		got, err := io.ReadFull(r, buf)
		if got > 0 && !isZero(buf[:got]) {
			if _, err := f.WriteAt(buf[:got], n); err != nil {
				return n, err
			}
		}
		n += int64(got)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return n, f.Truncate(n)
		}
		if err != nil {
			return n, err
		}
	}
}

// deviceFD is QEMU's descriptor of the devices' state: the first that a command
// gives away.
const deviceFD = 3

// spawn starts QEMU, which waits for its memory and devices' state.
func (l *launch) spawn(ctx context.Context, device *os.File) (err error) {
	d, spec, t := l.driver, l.handle.Spec, l.template
	tap := l.tap
	if tap == nil {
		if tap, err = l.keep(openTap(spec.Slot.NetNS)); err != nil {
			return err
		}
	}
	var c command
	c.wait(device)
	c.machine(d.accel, t.meta.VCPU, t.holder.ram, t.meta.RAM.Size, false)
	c.console(nil)
	if err := l.disk(&c); err != nil {
		return err
	}
	c.devices(l.layers[len(l.layers)-1], tap)
	if err := d.groups.Make(d.group(spec.ID), d.limits(spec)); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	l.process, err = d.spawn(spec.ID, spec.Slot.UIDBase, fileLimit(t.meta.Disk), c)
	return err
}

// disk adds the chain: guest image, template, layers.
func (l *launch) disk(c *command) error {
	c.node(image("raw", baseNode, c.file(l.template.base), false))
	c.node(image("qcow2", topNode, c.file(l.template.top), false).over(baseNode))
	below := topNode
	for i, name := range l.layers {
		live := i == len(l.layers)-1
		mode := os.O_RDONLY
		if live {
			mode = os.O_RDWR
		}
		f, err := l.keep(os.OpenFile(filepath.Join(l.dir, layerFile(name)), mode, 0))
		if err != nil {
			return err
		}
		c.node(image("qcow2", name, c.file(f), live).over(below))
		below = name
	}
	return nil
}

// load fills memory and devices, and lets a clone go.
func (l *launch) load(ctx context.Context, c machine.Capture) (_ *vm, err error) {
	if l.qmp, err = dialMonitor(ctx, l.dir); err != nil {
		return nil, err
	}
	if c != nil {
		r, err := findRAM(l.process.Pid(), l.template.meta.RAM.Size)
		if err != nil {
			return nil, err
		}
		if err := r.write(c.Pages()); err != nil {
			return nil, err
		}
	}
	if err := l.qmp.load(ctx, deviceFD); err != nil {
		return nil, err
	}
	s := state{Pid: l.process.Pid(), Template: l.template.hash, Layers: l.layers, Frozen: c != nil}
	if err := s.write(l.dir); err != nil {
		return nil, err
	}
	if c == nil {
		if err := l.qmp.do(ctx, "cont", nil, nil); err != nil {
			return nil, err
		}
	}
	return newVM(l.driver, l.handle, l.process, l.template, s, l.qmp), nil
}
