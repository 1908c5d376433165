package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/hostd/machine"
)

// savedName is where a captured machine's devices' state is, in its folder.
const savedName = "saved"

// capture is a frozen machine's difference from its template.
type capture struct {
	vm       *vm
	ram      ram
	template []byte // the template's memory, mapped
	layers   []machine.Layer
}

// Capture describes the frozen machine; see machine.Kept.
func (m *vm) Capture(ctx context.Context) (machine.Capture, error) {
	var c *capture
	err := m.change(ctx, "capture", func(q *monitor) error {
		if !m.state.Frozen {
			return errors.New("machine is not frozen")
		}
		if err := m.Restorable(); err != nil {
			return err
		}
		if err := q.saveDevices(ctx, filepath.Join(m.dir(), savedName)); err != nil {
			return err
		}
		s := m.state
		s.Captured = true
		if err := m.put(s); err != nil {
			return err
		}
		var err error
		c, err = m.describe()
		return err
	})
	if err != nil {
		return nil, err
	}
	return c, nil
}

// Restorable compares what the machine was started by with what would restore it.
func (m *vm) Restorable() error {
	if err := m.template.meta.isFor(m.driver.class); err != nil {
		return fmt.Errorf("machine was started by another QEMU or on another processor, and nothing here could restore it: %w", err)
	}
	return nil
}

// describe lists what the capture consists of. The caller holds mu.
func (m *vm) describe() (_ *capture, err error) {
	c := &capture{vm: m}
	if c.layers, err = m.layers(m.state.Layers); err != nil {
		return nil, err
	}
	if c.ram, err = findRAM(m.process.Pid(), m.template.meta.RAM.Size); err != nil {
		return nil, err
	}
	c.template, err = mapRAM(m.template.holder.ram, m.template.meta.RAM.Size)
	return c, err
}

// Driver is "microvm".
func (c *capture) Driver() string { return driverName }

// CPUClass is what the machine ran on.
func (c *capture) CPUClass() string { return c.vm.driver.class }

// Template is the content hash of the template that the pages differ from.
func (c *capture) Template() string { return c.vm.template.hash }

// TemplateHash is that of the machine's template's content.
func (m *vm) TemplateHash() string { return m.template.hash }

// Pages yields the pages that differ; an index counts from the start of the
// guest's memory.
func (c *capture) Pages() iter.Seq2[machine.Page, error] {
	return func(yield func(machine.Page, error) bool) {
		if !c.vm.Frozen() || c.vm.process.Ended() {
			yield(machine.Page{}, fmt.Errorf("capture of %s: the machine is not frozen any more", c.vm.ID()))
			return
		}
		c.ram.delta(c.template)(yield)
	}
}

// Device is the devices' state.
func (c *capture) Device() (io.ReadCloser, error) {
	return os.Open(filepath.Join(c.vm.dir(), savedName))
}

// Layers are the disk's.
func (c *capture) Layers() []machine.Layer { return c.layers }

// Close lets go of the template's memory.
func (c *capture) Close() error {
	if c.template == nil {
		return nil
	}
	data := c.template
	c.template = nil
	return unix.Munmap(data)
}
