package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/api"
)

// writtenMiB is what a session has written to its disk before each operation.
const writtenMiB = 300

// written: a session that has just written much to its disk moves and pauses.
// The writes go past the guest's page cache, so that it is the disk that has to
// be carried and not memory.
func (b *bench) written(ctx context.Context) error {
	s, err := b.stack.create(ctx, "shell")
	if err != nil {
		return err
	}
	defer func() { _ = b.stack.release(context.WithoutCancel(ctx), s.Id) }() // down ends it otherwise
	for range b.stack.setup.hosts {
		if _, err := b.stack.api.Move(ctx, s.Id, api.MoveSession{}); err != nil {
			return fmt.Errorf("first move: %w", err)
		}
	}
	steps, err := b.stack.stepsOf(ctx, "berth_capture_seconds", "layer", "ship", "agent", "stop", "devices", "write")
	if err != nil {
		return err
	}
	var gaps, captures, restores, totals, pauses samples
	once := func(ctx context.Context, counts bool) error {
		gap, moved, err := b.moveWritten(ctx, s)
		if err != nil {
			return err
		}
		if err := b.write(ctx, s); err != nil {
			return err
		}
		_, pause, err := b.pauseOnce(ctx, s)
		if err != nil {
			return err
		}
		if _, err := b.stack.api.Resume(ctx, s.Id); err != nil {
			return err
		}
		gaps, pauses = append(gaps, gap), append(pauses, pause)
		captures, restores, totals = append(captures, float64(moved.Timings.CaptureMs)), append(restores, float64(moved.Timings.RestoreMs)), append(totals, float64(moved.Timings.TotalMs))
		return nil
	}
	if err := interleave(ctx, 0, b.rounds(3, 2), once); err != nil {
		return err
	}
	b.add(figure{What: fmt.Sprintf("move after %d MiB were written to the disk: gap of a client that runs commands", writtenMiB), Unit: "ms", Plain: true,
		Value: gaps.median(), Count: len(gaps),
		Note: fmt.Sprintf("capture %.0f, restore %.0f, total %.0f ms; steps of a capture, mean of moves and pauses: %s", captures.median(), restores.median(), totals.median(), steps())})
	b.add(figure{What: "pause after as much", Unit: "ms", Plain: true, Value: pauses.median(), Count: len(pauses)})
	return nil
}

// write gives the session's disk new content.
func (b *bench) write(ctx context.Context, s api.Session) error {
	return errors.Join(b.must(ctx, s.Id, fmt.Sprintf("dd if=/dev/urandom of=/workspace/written bs=1M count=%d oflag=direct conv=notrunc 2>/dev/null; sync", writtenMiB)), settleDown(ctx))
}

// moveWritten moves a session under a client that runs one command after the
// other, and takes the longest time that one needs, in milliseconds.
func (b *bench) moveWritten(ctx context.Context, s api.Session) (gap float64, moved api.MoveResult, err error) {
	if err := b.write(ctx, s); err != nil {
		return 0, moved, err
	}
	stop, done := make(chan struct{}), make(chan error, 1)
	var longest time.Duration
	go func() {
		for {
			began := time.Now()
			if err := b.must(ctx, s.Id, "true"); err != nil {
				done <- err
				return
			}
			longest = max(longest, time.Since(began))
			select {
			case <-stop:
				done <- nil
				return
			default:
			}
		}
	}()
	moved, err = b.stack.api.Move(ctx, s.Id, api.MoveSession{})
	close(stop)
	err = errors.Join(err, <-done)
	return float64(longest.Microseconds()) / 1000, moved, err
}
