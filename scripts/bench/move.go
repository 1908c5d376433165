package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/api"
)

// mover is a browsed session whose client evaluates in a loop.
type mover struct {
	api.Session
	ballast bool // its memory is filled anew before each move
	gaps    samples
	timings [3]samples // capture, restore, total
}

// move: the longest time a client that evaluates in a loop waits for an answer
// while its session moves. Beside it a session whose every move has to carry as
// much new memory as the guest uses at all, by the same path: what stopping and
// copying the whole memory would be.
func (b *bench) move(ctx context.Context) error {
	if err := b.warm(ctx); err != nil {
		return err
	}
	_, used, err := b.stack.guestMemory()
	if err != nil {
		return err
	}
	delta, err := b.newMover(ctx, false)
	if err != nil {
		return err
	}
	defer delta.end(b)
	whole, err := b.newMover(ctx, true)
	if err != nil {
		return err
	}
	defer whole.end(b)
	side := func(m *mover) func(context.Context, bool) error {
		return func(ctx context.Context, counts bool) error { return b.moveOnce(ctx, m, counts, int(used)) }
	}
	capture, err := b.stack.stepsOf(ctx, "berth_capture_seconds", "layer", "agent", "stop", "devices", "write")
	if err != nil {
		return err
	}
	thaw, err := b.stack.stepsOf(ctx, "berth_thaw_seconds", "cont", "answer", "agent")
	if err != nil {
		return err
	}
	if err := interleave(ctx, 1, b.rounds(3, 2), side(delta)); err != nil {
		return err
	}
	steps := fmt.Sprintf("capture %s; thaw %s", capture(), thaw())
	if err := interleave(ctx, 0, b.rounds(3, 2), side(delta), side(whole)); err != nil {
		return err
	}
	b.add(figure{What: "gap of a memory move that a CDP client sees", Beside: fmt.Sprintf("the same with %.0f MB of new memory to carry, as much as the guest uses", used/1e6), Unit: "ms",
		Value: delta.gaps.median(), Peer: whole.gaps.median(), Now: 1.0 / 4, Aim: 1.0 / 8, Count: len(delta.gaps),
		Note: fmt.Sprintf("capture %.0f beside %.0f ms, restore %.0f beside %.0f, total %.0f beside %.0f; %s; stopped all the way, no round of pages before", delta.timings[0].median(), whole.timings[0].median(),
			delta.timings[1].median(), whole.timings[1].median(), delta.timings[2].median(), whole.timings[2].median(), steps)})
	return nil
}

func (b *bench) newMover(ctx context.Context, ballast bool) (*mover, error) {
	s, err := b.firstReply(ctx, "both", nil)
	if err != nil {
		return nil, err
	}
	if err := b.work(ctx, s); err != nil {
		return nil, errors.Join(err, b.stack.release(context.WithoutCancel(ctx), s.Id))
	}
	return &mover{Session: s, ballast: ballast}, nil
}

func (m *mover) end(b *bench) {
	_ = b.stack.release(context.Background(), m.Id) // down ends it otherwise
}

// moveOnce moves a session under its client and takes the longest gap.
func (b *bench) moveOnce(ctx context.Context, m *mover, counts bool, ballast int) error {
	if m.ballast {
		if err := b.fill(ctx, m.Id, ballast); err != nil {
			return err
		}
	}
	if err := settleDown(ctx); err != nil {
		return err
	}
	client, err := newCaller(ctx, *m.ConnectUrl, dialPlain)
	if err != nil {
		return err
	}
	defer client.ws.close()
	stop, gap := make(chan struct{}), make(chan error, 1)
	var longest time.Duration
	go func() {
		var err error
		longest, err = client.evaluateUntil(stop)
		gap <- err
	}()
	moved, err := b.stack.api.Move(ctx, m.Id, api.MoveSession{})
	if err == nil { // the first answer from the new machine
		err = cdpAnswers(ctx, m.Session)
	}
	close(stop)
	if err := errors.Join(err, <-gap); err != nil {
		return err
	}
	if counts {
		m.gaps = append(m.gaps, float64(longest.Microseconds())/1000)
		t := moved.Timings
		for i, ms := range []int64{t.CaptureMs, t.RestoreMs, t.TotalMs} {
			m.timings[i] = append(m.timings[i], float64(ms))
		}
	}
	return nil
}

// evaluateUntil calls without a pause and gives the longest time between two
// answers.
func (c *caller) evaluateUntil(stop <-chan struct{}) (longest time.Duration, err error) {
	for last := time.Now(); ; {
		select {
		case <-stop:
			return longest, nil
		default:
		}
		if _, err := c.ws.call(c.page, "Runtime.evaluate", `{"expression":"1+1","returnByValue":true}`); err != nil {
			return 0, err
		}
		now := time.Now()
		longest, last = max(longest, now.Sub(last)), now
	}
}

// fill gives a process in the session memory that no page of any snapshot is
// like: pages half random, half zeros, which pack about as well as others do.
func (b *bench) fill(ctx context.Context, id string, bytes int) error {
	return b.must(ctx, id, fmt.Sprintf(`kill $BALLAST 2>/dev/null; rm -f filled; python3 -c '
import os, time
mib = b"".join(os.urandom(2048) + bytes(2048) for _ in range(256))
all = bytearray(mib * %d)
open("filled", "w").close()
time.sleep(100000)' & BALLAST=$!; until [ -e filled ]; do sleep 0.2; kill -0 $BALLAST || exit 1; done`, bytes>>20))
}
