package microvm

import (
	"context"
	"errors"
	"fmt"
	"slices"

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
	made, err := d.store.read(s.Template)
	if err != nil {
		return nil, err
	}
	t, err := d.openAs(ctx, s.Template, made.CPUClass)
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
	return settleLayers(ctx, q, dir, s)
}

// settleLayers finds out what became of a change of layers that a hostd died in.
func settleLayers(ctx context.Context, q *monitor, dir string, s state) (state, error) {
	if err := cancelMerge(ctx, q); err != nil {
		return s, err
	}
	top, depth, err := topLayer(ctx, q)
	if err != nil {
		return s, err
	}
	last := s.Layers[len(s.Layers)-1]
	switch {
	case top == last && depth == len(s.Layers)+1:
	case top == last && s.Merging != nil && depth == *s.Merging+2:
		s.Layers = append(slices.Clone(s.Layers[:*s.Merging]), last)
	case validLayer.MatchString(top) && depth == len(s.Layers)+2: // added, and not written down
		s.Layers, s.Captured = append(slices.Clone(s.Layers), top), false
	default:
		return s, fmt.Errorf("QEMU writes to disk layer %q over %d others, not to %q over %d", top, depth, last, len(s.Layers)+1)
	}
	s.Merging = nil
	return s, s.write(dir)
}

// topLayer is the name of the node that QEMU writes to, and how many are below.
func topLayer(ctx context.Context, q *monitor) (name string, depth int, err error) {
	var disks []struct {
		Inserted struct {
			Node  string `json:"node-name"`
			Depth int    `json:"backing_file_depth"`
		} `json:"inserted"`
	}
	if err := q.do(ctx, "query-block", nil, &disks); err != nil {
		return "", 0, err
	}
	for _, disk := range disks {
		if disk.Inserted.Node != "" {
			return disk.Inserted.Node, disk.Inserted.Depth, nil
		}
	}
	return "", 0, errors.New("QEMU has no disk")
}
