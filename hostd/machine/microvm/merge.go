package microvm

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// mergeJob is QEMU's name for the copying of layers into the topmost one.
const mergeJob = "merge"

// merge copies the upper layers into the topmost one, which nobody has captured
// yet, as far down as a layer is not much larger than all above it. So layers
// are ever larger downwards: few in number, less than three times what they
// hold in sum, and each byte is copied a few times in its life. The lowest least
// of them stay whatever their size. The caller holds mu; the guest runs on.
func (m *vm) merge(ctx context.Context, q *monitor, least int) error {
	sizes := make([]int64, len(m.state.Layers))
	for i, name := range m.state.Layers {
		var err error
		if sizes[i], err = takes(filepath.Join(m.dir(), layerFile(name))); err != nil {
			return err
		}
	}
	last := len(sizes) - 1
	stay := min(max(staying(sizes), least), last)
	if stay == last {
		return nil
	}
	s := m.state
	s.Merging = &stay
	if err := m.put(s); err != nil {
		return err
	}
	below := topNode
	if stay > 0 {
		below = s.Layers[stay-1]
	}
	if err := stream(ctx, q, s.Layers[last], below); err != nil {
		return errors.Join(err, m.agree(ctx))
	}
	gone := slices.Clone(s.Layers[stay:last])
	s.Layers, s.Merging = append(slices.Clone(s.Layers[:stay]), s.Layers[last]), nil
	if err := m.put(s); err != nil {
		return err
	}
	return m.dropLayers(ctx, q, gone)
}

// staying is how many of the lower layers are left alone, by the sizes of all,
// lowest first.
func staying(sizes []int64) int {
	stay := len(sizes) - 1
	for above := sizes[stay]; stay > 0 && sizes[stay-1] <= 2*above; stay-- {
		above += sizes[stay-1]
	}
	return stay
}

// takes is the room of a sparse file on disk, bytes.
func takes(path string) (int64, error) {
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return 0, fmt.Errorf("%s: %w", path, err)
	}
	return 512 * st.Blocks, nil
}

// stream has QEMU copy what lies between two nodes into the upper one, and
// waits.
func stream(ctx context.Context, q *monitor, upper, below string) error {
	err := q.do(ctx, "block-stream", map[string]any{"job-id": mergeJob, "device": upper, "base-node": below, "auto-dismiss": false}, nil)
	if err != nil {
		return err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		status, reason, err := jobStatus(ctx, q)
		if err != nil {
			return err
		}
		if status == "concluded" {
			err := q.do(ctx, "job-dismiss", map[string]string{"id": mergeJob}, nil)
			if reason != "" {
				err = errors.Join(fmt.Errorf("merge disk layers: QEMU: %s", reason), err)
			}
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("merge disk layers: %w", context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}

// jobStatus is "" when there is no job.
func jobStatus(ctx context.Context, q *monitor) (status, reason string, err error) {
	var jobs []struct {
		Status string `json:"status"`
		Error  string `json:"error"`
	}
	if err := q.do(ctx, "query-jobs", nil, &jobs); err != nil || len(jobs) == 0 {
		return "", "", err
	}
	return jobs[0].Status, jobs[0].Error, nil
}

// cancelMerge ends a job that nobody waits for any more; what it has copied
// does no harm.
func cancelMerge(ctx context.Context, q *monitor) error {
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		status, _, err := jobStatus(ctx, q)
		switch {
		case err != nil || status == "":
			return err
		case status == "concluded":
			err = q.do(ctx, "job-dismiss", map[string]string{"id": mergeJob}, nil)
		case status == "running" || status == "ready" || status == "paused":
			err = q.do(ctx, "job-cancel", map[string]string{"id": mergeJob}, nil)
		}
		if err != nil {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(wait):
		}
	}
}

// dropLayers forgets layers that have become part of another, topmost first.
func (m *vm) dropLayers(ctx context.Context, q *monitor, names []string) error {
	for _, name := range slices.Backward(names) {
		if err := q.do(ctx, "blockdev-del", map[string]string{"node-name": name}, nil); err != nil {
			return err
		}
		if err := os.Remove(filepath.Join(m.dir(), layerFile(name))); err != nil {
			return err
		}
	}
	return nil
}
