package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/api"
)

// create: POST /v1/sessions to the first CDP reply over a new WebSocket,
// beside fork of the same Chromium to its first CDP reply.
func (b *bench) create(ctx context.Context) error {
	if err := b.withPeer(ctx); err != nil {
		return err
	}
	var post, warm, cold samples
	berth := func(ctx context.Context, counts bool) error {
		if err := b.stack.quiet(ctx); err != nil {
			return err
		}
		began := time.Now()
		s, err := b.stack.create(ctx, "browser")
		if err != nil {
			return err
		}
		if counts {
			post.since(began)
		}
		ws, err := openSocket(ctx, *s.ConnectUrl, dialPlain)
		if err == nil {
			err = ws.version()
			ws.close()
		}
		if counts {
			warm.since(began)
		}
		return errors.Join(err, b.stack.release(ctx, s.Id))
	}
	direct := func(ctx context.Context, counts bool) error {
		if err := b.stack.quiet(ctx); err != nil {
			return err
		}
		c, began, err := b.peer.spawn()
		if err != nil {
			return err
		}
		ws, err := openSocket(ctx, c.url, dialPlain)
		if err == nil {
			err = ws.version()
			ws.close()
		}
		if counts {
			cold.since(began)
		}
		return errors.Join(err, c.kill())
	}
	if err := interleave(ctx, 1, b.rounds(15, 5), berth, direct); err != nil {
		return err
	}
	b.add(figure{What: "warm create, POST to first CDP reply, p50", Beside: "spawn of the same Chromium to its first CDP reply", Unit: "ms",
		Value: warm.median(), Peer: cold.median(), Now: 1.0 / 10, Aim: 1.0 / 20, Count: len(warm),
		Note: fmt.Sprintf("POST to 201 alone %.1f ms; p95 of the whole %.1f ms beside %.0f ms", post.median(), warm.quantile(0.95), cold.quantile(0.95))})
	return nil
}

// lap is what one round of a browser's life took.
type lap struct{ start, connect, open, end, all samples }

func (l *lap) note() string {
	return fmt.Sprintf("start %.1f, connect %.1f, goto %.1f, end %.1f ms", l.start.median(), l.connect.median(), l.open.median(), l.end.median())
}

// browse connects, attaches to the first page and opens the site.
func (b *bench) browse(ctx context.Context, url string, l *lap) error {
	t := time.Now()
	ws, err := openSocket(ctx, url, dialPlain)
	if err != nil {
		return err
	}
	defer ws.close()
	if err := ws.version(); err != nil {
		return err
	}
	page, err := ws.attach()
	if err != nil {
		return err
	}
	l.connect.since(t)
	t = time.Now()
	err = ws.open(page, b.web.url)
	l.open.since(t)
	return err
}

// lifecycle: a whole use of a browser, and the processor time it costs, with
// that of the machine that takes the used one's place in the pool.
func (b *bench) lifecycle(ctx context.Context) error {
	if err := errors.Join(b.withPeer(ctx), b.withWeb()); err != nil {
		return err
	}
	var berth, direct lap
	var berthCPU, directCPU samples
	rounds := func(ctx context.Context, counts bool) error {
		l, cpu := &berth, &berthCPU
		if !counts {
			l, cpu = &lap{}, &samples{}
		}
		if err := b.stack.quiet(ctx); err != nil {
			return err
		}
		before, err := b.stack.cpu()
		if err != nil {
			return err
		}
		if err := b.berthLap(ctx, l); err != nil {
			return err
		}
		if err := b.stack.quiet(ctx); err != nil { // the refill counts
			return err
		}
		after, err := b.stack.cpu()
		*cpu = append(*cpu, after-before)
		return err
	}
	spawned := func(ctx context.Context, counts bool) error {
		l, cpu := &direct, &directCPU
		if !counts {
			l, cpu = &lap{}, &samples{}
		}
		used, err := b.directLap(ctx, l)
		*cpu = append(*cpu, used)
		return err
	}
	if err := interleave(ctx, 1, b.rounds(15, 4), rounds, spawned); err != nil {
		return err
	}
	b.add(figure{What: "create + connect + goto + release, p50", Beside: "spawn + connect + goto + kill", Unit: "ms",
		Value: berth.all.median(), Peer: direct.all.median(), Now: 1.0 / 3, Aim: 1.0 / 4, Count: len(berth.all),
		Note: "Berth: " + berth.note() + "; direct: " + direct.note()})
	b.add(figure{What: "CPU seconds per session of that kind, refill included", Beside: "the spawned Chromium", Unit: "s", Plain: true,
		Value: berthCPU.median(), Peer: directCPU.median(), Count: len(berthCPU)})
	return nil
}

func (b *bench) berthLap(ctx context.Context, l *lap) error {
	began := time.Now()
	s, err := b.stack.create(ctx, "browser")
	if err != nil {
		return err
	}
	l.start.since(began)
	err = b.browse(ctx, *s.ConnectUrl, l)
	t := time.Now()
	err = errors.Join(err, b.stack.release(ctx, s.Id))
	l.end.since(t)
	l.all.since(began)
	return err
}

func (b *bench) directLap(ctx context.Context, l *lap) (cpu float64, err error) {
	if err := b.stack.quiet(ctx); err != nil {
		return 0, err
	}
	c, began, err := b.peer.spawn()
	if err != nil {
		return 0, err
	}
	l.start.since(began)
	err = b.browse(ctx, c.url, l)
	cpu, errCPU := groupCPU(c.group)
	t := time.Now()
	err = errors.Join(err, errCPU, c.kill())
	l.end.since(t)
	l.all.since(began)
	return cpu, err
}

// burst: creates at once, beside one after the other, on a pool that holds them.
func (b *bench) burst(ctx context.Context) error {
	const many = 12
	var together, alone samples
	at := func(ctx context.Context, counts bool) error {
		if err := b.stack.quiet(ctx); err != nil {
			return err
		}
		took, err := b.createMany(ctx, many)
		if counts {
			together = append(together, took...)
		}
		return err
	}
	one := func(ctx context.Context, counts bool) error {
		if err := b.stack.quiet(ctx); err != nil {
			return err
		}
		for range 4 { // the refill is as busy as it is in the other rounds
			began := time.Now()
			s, err := b.stack.create(ctx, "browser")
			if err != nil {
				return err
			}
			if counts {
				alone.since(began)
			}
			defer b.stack.release(context.WithoutCancel(ctx), s.Id)
		}
		return nil
	}
	if err := interleave(ctx, b.rounds(1, 0), b.rounds(3, 1), one, at); err != nil {
		return err
	}
	b.add(figure{What: "12 creates at once, p95", Beside: "sequential create, p50", Unit: "ms",
		Value: together.quantile(0.95), Peer: alone.median(), Now: 4, Aim: 2, Count: len(together),
		Note: fmt.Sprintf("p50 of those at once %.1f ms; pool of 12", together.median())})
	return nil
}

func (b *bench) createMany(ctx context.Context, n int) (samples, error) {
	type made struct {
		session api.Session
		took    time.Duration
		err     error
	}
	results := make(chan made, n)
	for range n {
		go func() {
			began := time.Now()
			s, err := b.stack.create(ctx, "browser")
			results <- made{s, time.Since(began), err}
		}()
	}
	var took samples
	var errs []error
	var ids []string
	for range n {
		m := <-results
		took = append(took, float64(m.took.Microseconds())/1000)
		errs = append(errs, m.err)
		if m.err == nil {
			ids = append(ids, m.session.Id)
		}
	}
	for _, id := range ids {
		errs = append(errs, b.stack.release(ctx, id))
	}
	return took, errors.Join(errs...)
}
