package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/machine/cgroup"
)

// Adopt takes a machine of an earlier hostd over; see machine.Driver. It is as
// frozen as its state on disk says: what a hostd died in the middle of is done.
func (d *Driver) Adopt(ctx context.Context, h machine.Handle) (machine.Machine, error) {
	if h.Driver != driverName || h.Version != handleVersion || !validID.MatchString(h.Spec.ID) {
		return nil, fmt.Errorf("adopt: handle of driver %q version %d and id %q is not one of %s version %d",
			h.Driver, h.Version, h.Spec.ID, driverName, handleVersion)
	}
	m, err := d.adopt(ctx, h)
	if err == nil {
		return m, nil
	}
	clean, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTime)
	defer cancel()
	if err := d.remove(clean, h.Spec.ID); err != nil {
		return nil, fmt.Errorf("adopt %s: %w", h.Spec.ID, err)
	}
	return nil, fmt.Errorf("adopt %s: %w: %w", h.Spec.ID, machine.ErrGone, err)
}

func (d *Driver) adopt(ctx context.Context, h machine.Handle) (*vm, error) {
	dir := d.dir(h.Spec.ID)
	s, err := readState(dir)
	if err != nil {
		return nil, err
	}
	p, err := d.groups.Open(d.group(h.Spec.ID), s.Pid)
	if err != nil {
		return nil, err
	}
	m, err := d.takeOver(ctx, h, p, s)
	if err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return m, nil
}

func (d *Driver) takeOver(ctx context.Context, h machine.Handle, p *cgroup.Process, s state) (*vm, error) {
	t, err := d.open(ctx, s.Template)
	if err != nil {
		return nil, err
	}
	dir := d.dir(h.Spec.ID)
	q, err := dialMonitor(ctx, dir)
	if err != nil {
		return nil, err
	}
	if s, err = settle(ctx, q, dir, s); err != nil {
		return nil, errors.Join(err, q.Close())
	}
	return newVM(d, h, p, t, s, q), nil
}

// settle makes QEMU and the written state agree.
func settle(ctx context.Context, q *monitor, dir string, s state) (state, error) {
	status, err := q.status(ctx)
	if err != nil {
		return s, err
	}
	if running := status == "running"; running == s.Frozen {
		command := "cont"
		if s.Frozen {
			command = "stop"
		}
		if err := q.do(ctx, command, nil, nil); err != nil {
			return s, err
		}
	}
	top, err := topLayer(ctx, q)
	if err != nil || top == s.Layers[len(s.Layers)-1] {
		return s, err
	}
	// A layer was added that the state does not tell of yet.
	if _, err := os.Stat(filepath.Join(dir, layerFile(top))); err != nil || !validLayer.MatchString(top) {
		return s, fmt.Errorf("QEMU writes to a disk layer %q that is not here", top)
	}
	s.Layers, s.Captured = append(s.Layers, top), false
	return s, s.write(dir)
}

// topLayer is the name of the node that QEMU writes to.
func topLayer(ctx context.Context, q *monitor) (string, error) {
	var disks []struct {
		Inserted struct {
			Node string `json:"node-name"`
		} `json:"inserted"`
	}
	if err := q.do(ctx, "query-block", nil, &disks); err != nil {
		return "", err
	}
	for _, disk := range disks {
		if disk.Inserted.Node != "" {
			return disk.Inserted.Node, nil
		}
	}
	return "", errors.New("QEMU has no disk")
}
