package microvm

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"

	"github.com/berth-dev/berth/hostd/machine"
)

// Names of the two lowest disk nodes, which all machines of a template share.
const (
	baseNode = "base" // the guest image
	topNode  = "top"  // what the template's boot wrote over it
)

func layerFile(name string) string { return name + ".qcow2" }

// emptyImage makes an empty image of a size, whose header names no other file.
// qemu-img runs once a size; what it made is copied from then on.
func (s store) emptyImage(ctx context.Context, qemuImg string, size int64) (string, error) {
	path := filepath.Join(s.dir, "empty", fmt.Sprintf("%d.qcow2", size))
	if info, err := os.Stat(path); err == nil && info.Size() > 0 {
		return path, nil
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return "", err
	}
	half := filepath.Join(filepath.Dir(path), newID()+".tmp")
	defer os.Remove(half)
	out, err := exec.CommandContext(ctx, qemuImg, "create", "-q", "-f", "qcow2", "-o", "compat=1.1,lazy_refcounts=on", half, fmt.Sprint(size)).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("qemu-img: %w: %s (apt-get install qemu-utils)", err, strings.TrimSpace(string(out)))
	}
	// It is used for ever: a power failure must not leave its name without its content.
	if err := syncAll(filepath.Dir(path)); err != nil {
		return "", err
	}
	return path, os.Rename(half, path)
}

// newLayer makes an empty layer's file in a machine's folder, open.
func (d *Driver) newLayer(ctx context.Context, dir, name string, size int64) (*os.File, error) {
	from, err := d.store.emptyImage(ctx, d.qemuImg(), size)
	if err != nil {
		return nil, err
	}
	empty, err := os.Open(from)
	if err != nil {
		return nil, err
	}
	defer empty.Close()
	f, err := os.OpenFile(filepath.Join(dir, layerFile(name)), os.O_CREATE|os.O_EXCL|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if _, err := copyBlocks(f, empty); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

func (d *Driver) qemuImg() string { return filepath.Join(filepath.Dir(d.qemu), "qemu-img") }

// AddLayer puts a new disk layer on top while the machine runs; see
// machine.Kept. Before that small layers become one, so that a session that is
// paused again and again does not collect them.
func (m *vm) AddLayer(ctx context.Context, stay int) (still []machine.Layer, err error) {
	err = m.change(ctx, "add a disk layer to", func(q *monitor) error {
		if !m.state.Frozen {
			if err := m.merge(ctx, q, stay); err != nil {
				return err
			}
		}
		if err := m.addLayer(ctx, q); err != nil {
			return err
		}
		still, err = m.layers(m.state.Layers[:len(m.state.Layers)-1])
		return err
	})
	return still, err
}

// layers describes layers by their names.
func (m *vm) layers(names []string) (all []machine.Layer, err error) {
	for _, name := range names {
		path := filepath.Join(m.dir(), layerFile(name))
		info, err := os.Stat(path)
		if err != nil {
			return nil, err
		}
		all = append(all, machine.Layer{Name: name, Size: info.Size(), Open: func() (io.ReadCloser, error) { return os.Open(path) }})
	}
	return all, nil
}

// addLayer has QEMU write into a new layer from now on. The caller holds mu.
func (m *vm) addLayer(ctx context.Context, q *monitor) error {
	name, below := newLayerName(), m.state.Layers[len(m.state.Layers)-1]
	f, err := m.driver.newLayer(ctx, m.dir(), name, m.template.meta.Disk)
	if err != nil {
		return err
	}
	defer f.Close()
	set, err := q.addFile(ctx, f)
	if err != nil {
		return err
	}
	node := image("qcow2", name, fdset(set), true)
	// It gets what is below when it becomes the top.
	err = q.do(ctx, "blockdev-add", struct {
		blockImage
		Backing *string `json:"backing"`
	}{node, nil}, nil)
	if err != nil {
		return err
	}
	if err := q.do(ctx, "blockdev-snapshot", map[string]string{"node": below, "overlay": name}, nil); err != nil {
		return errors.Join(err, m.agree(ctx))
	}
	s := m.state
	s.Layers = append(slices.Clone(s.Layers), name)
	s.Captured = false
	return m.put(s)
}
