package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/client"
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
	steps, err := b.stack.stepsOf(ctx, "berth_capture_seconds", "layer", "store", "ship", "agent", "stop", "devices", "write")
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
	b.add(figure{What: fmt.Sprintf("move after %d MiB were written to the disk: gap of a client that reads a stream", writtenMiB), Unit: "ms", Plain: true,
		Value: gaps.median(), Count: len(gaps),
		Note: fmt.Sprintf("capture %.0f, restore %.0f, total %.0f ms; steps of a capture, mean of moves and pauses: %s", captures.median(), restores.median(), totals.median(), steps())})
	b.add(figure{What: "pause after as much", Unit: "ms", Plain: true, Value: pauses.median(), Count: len(pauses)})
	return nil
}

// write gives the session's disk new content.
func (b *bench) write(ctx context.Context, s api.Session) error {
	return errors.Join(b.must(ctx, s.Id, fmt.Sprintf("dd if=/dev/urandom of=/workspace/written bs=1M count=%d oflag=direct conv=notrunc 2>/dev/null; sync", writtenMiB)), settleDown(ctx))
}

// moveWritten moves a session that has written, under a client that reads a
// stream of ticks, and takes the longest time without one, in milliseconds.
func (b *bench) moveWritten(ctx context.Context, s api.Session) (gap float64, moved api.MoveResult, err error) {
	if err := b.write(ctx, s); err != nil {
		return 0, moved, err
	}
	began, done := make(chan bool), make(chan error, 1)
	var longest time.Duration
	go func() {
		first, last := true, time.Now()
		for _, err := range b.stack.api.ExecStream(ctx, s.Id, api.Exec{Command: ticks, Shell: client.P(json.RawMessage(`"ticks"`)), TimeoutMs: client.P(120_000)}) {
			if err != nil {
				done <- err
				return
			}
			if now := time.Now(); first {
				first, last = false, now
				close(began)
			} else {
				longest, last = max(longest, now.Sub(last)), now
			}
		}
		done <- nil
	}()
	select {
	case <-began:
	case err := <-done:
		return 0, moved, fmt.Errorf("no tick: %w", err)
	}
	moved, err = b.stack.api.Move(ctx, s.Id, api.MoveSession{})
	err = errors.Join(err, b.must(ctx, s.Id, "sleep 0.2; touch /tmp/stop"), <-done)
	return float64(longest.Microseconds()) / 1000, moved, err
}

// ticks prints a line every 10 ms, and starts no process for that, until it is
// told to stop.
const ticks = "rm -f /tmp/stop; exec 9<> <(:); while [ ! -e /tmp/stop ]; do echo tick; read -t 0.01 -u 9; done; true"
