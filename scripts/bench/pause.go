package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/api"
)

// pauses is what one browsed session's two pauses cost.
type pauses struct{ bytes, again, ms, againMs samples }

// pause: a browsed session is paused, resumed, and paused again untouched.
func (b *bench) pause(ctx context.Context) error {
	if err := b.warm(ctx); err != nil {
		return err
	}
	whole, used, err := b.stack.guestMemory()
	if err != nil {
		return err
	}
	steps, err := b.stack.stepsOf(ctx, "berth_capture_seconds", "layer", "agent", "stop", "devices", "write")
	if err != nil {
		return err
	}
	var p pauses
	side := func(ctx context.Context, counts bool) error { return b.pauseTwice(ctx, counts, &p) }
	if err := interleave(ctx, 0, b.rounds(3, 2), side); err != nil {
		return err
	}
	const mb = 1e6
	b.add(figure{What: "pause of a browsed session, bytes written", Beside: "its memory, what is not zeros", Unit: "MB",
		Value: p.bytes.median() / mb, Peer: used / mb, Now: 1.0 / 5, Aim: 1.0 / 10, Count: len(p.bytes),
		Note: "disk layers and devices included, packed and sealed; the peer is raw, and of the template: the session's own pages would come on top"})
	b.add(figure{What: "the same", Beside: "its whole memory", Unit: "MB", Plain: true, Value: p.bytes.median() / mb, Peer: whole / mb, Count: len(p.bytes)})
	b.add(figure{What: "pause, seconds per GiB of guest", Unit: "s",
		Value: p.ms.median() / 1000 / (whole / (1 << 30)), Now: 1, Aim: 0.5, Count: len(p.ms),
		Note: fmt.Sprintf("a pause %.0f ms; steps of a capture, mean of first and second ones: %s", p.ms.median(), steps())})
	b.add(figure{What: "second pause of an untouched resumed session, bytes", Beside: "the first", Unit: "MB",
		Value: p.again.median() / mb, Peer: p.bytes.median() / mb, Now: 1.0 / 5, Aim: 1.0 / 20, Count: len(p.again)})
	b.add(figure{What: "the same, time", Beside: "the first", Unit: "ms", Plain: true, Value: p.againMs.median(), Peer: p.ms.median(), Count: len(p.again)})
	return nil
}

func (b *bench) pauseTwice(ctx context.Context, counts bool, p *pauses) (err error) {
	s, err := b.firstReply(ctx, "both", nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.stack.release(context.WithoutCancel(ctx), s.Id), b.stack.quiet(ctx)) }()
	if err := errors.Join(b.work(ctx, s), settleDown(ctx)); err != nil {
		return err
	}
	first, ms, err := b.pauseOnce(ctx, s)
	if err != nil {
		return err
	}
	if _, err := b.stack.api.Resume(ctx, s.Id); err != nil {
		return err
	}
	again, againMs, err := b.pauseOnce(ctx, s)
	if counts && err == nil {
		p.bytes, p.ms = append(p.bytes, first), append(p.ms, ms)
		p.again, p.againMs = append(p.again, again), append(p.againMs, againMs)
	}
	return err
}

func (b *bench) pauseOnce(ctx context.Context, s api.Session) (bytes, ms float64, err error) {
	began := time.Now()
	if _, err := b.stack.api.Pause(ctx, s.Id); err != nil {
		return 0, 0, err
	}
	ms = float64(time.Since(began).Microseconds()) / 1000
	bytes, err = b.stack.pausedBytes(ctx, s.Id)
	return bytes, ms, err
}

// resume: a paused session to its first CDP answer, beside a create that takes
// a machine from the pool.
func (b *bench) resume(ctx context.Context) error {
	s, err := b.firstReply(ctx, "both", nil)
	if err != nil {
		return err
	}
	defer func() { _ = b.stack.release(context.WithoutCancel(ctx), s.Id) }() // down ends it otherwise
	if err := b.work(ctx, s); err != nil {
		return err
	}
	var resumed, created samples
	berth := func(ctx context.Context, counts bool) error {
		if _, err := b.stack.api.Pause(ctx, s.Id); err != nil {
			return err
		}
		if err := errors.Join(b.stack.full(ctx), settleDown(ctx)); err != nil {
			return err
		}
		began := time.Now()
		if _, err := b.stack.api.Resume(ctx, s.Id); err != nil {
			return err
		}
		err := cdpAnswers(ctx, s)
		if counts {
			resumed.since(began)
		}
		return err
	}
	peer := func(ctx context.Context, counts bool) error {
		if err := errors.Join(b.stack.full(ctx), settleDown(ctx)); err != nil {
			return err
		}
		into := &created
		if !counts {
			into = nil
		}
		other, err := b.firstReply(ctx, "both", into)
		if err != nil {
			return err
		}
		return b.stack.release(ctx, other.Id)
	}
	if err := interleave(ctx, 1, b.rounds(3, 2), berth, peer); err != nil {
		return err
	}
	b.add(figure{What: "resume to first CDP reply", Beside: "warm create to first CDP reply", Unit: "ms",
		Value: resumed.median(), Peer: created.median(), Now: 5, Aim: 3, Count: len(resumed)})
	return nil
}
