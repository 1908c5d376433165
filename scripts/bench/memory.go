package main

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// memory: what one more idle session takes, beside one more idle Chromium,
// each measured while the other side has none. PSS of all processes, agent
// included, and what MemAvailable loses, kernel memory and disk included.
func (b *bench) memory(ctx context.Context) error {
	const many = 6
	if err := b.withPeer(ctx); err != nil {
		return err
	}
	var berthPSS, berthAvail, peerPSS, peerAvail, stockPSS, stockAvail samples
	berth := func(ctx context.Context, counts bool) error {
		return b.weigh(ctx, counts, &berthPSS, &berthAvail, many, func() (func() ([]int, error), func() error, error) {
			var ids []string
			end := func() error {
				var errs []error
				for _, id := range ids {
					errs = append(errs, b.stack.release(context.WithoutCancel(ctx), id))
				}
				return errors.Join(append(errs, b.stack.quiet(ctx))...)
			}
			for range many {
				s, err := b.stack.create(ctx, "browser")
				if err != nil {
					return nil, end, err
				}
				ids = append(ids, s.Id)
			}
			return func() ([]int, error) { return procs(b.stack.group()), nil }, end, nil
		})
	}
	direct := func(flags []string, psses, avails *samples) func(ctx context.Context, counts bool) error {
		return func(ctx context.Context, counts bool) error {
			return b.weigh(ctx, counts, psses, avails, many, func() (func() ([]int, error), func() error, error) {
				return b.spawnMany(many, flags)
			})
		}
	}
	if err := interleave(ctx, 0, b.rounds(3, 1), berth,
		direct(b.peer.args, &peerPSS, &peerAvail), direct(stock, &stockPSS, &stockAvail)); err != nil {
		return err
	}
	b.add(figure{What: "memory of one more idle browser session, PSS", Beside: "that Chromium alone, same flags", Unit: "MiB",
		Value: berthPSS.median(), Peer: peerPSS.median(), Now: 1.1, Aim: 0.8, Count: len(berthPSS) * many})
	b.add(figure{What: "the same, PSS", Beside: "that Chromium alone, headless and debugging port its only flags", Unit: "MiB", Plain: true,
		Value: berthPSS.median(), Peer: stockPSS.median(), Count: len(stockPSS) * many,
		Note: fmt.Sprintf("MemAvailable of that %.0f MiB", stockAvail.median())})
	b.add(figure{What: "the same, MemAvailable", Beside: "that Chromium alone, same flags", Unit: "MiB",
		Value: berthAvail.median(), Peer: peerAvail.median(), Now: 1.1, Aim: 0.8, Count: len(berthAvail) * many,
		Note: fmt.Sprintf("rounds: %.0f beside %.0f MiB; others' memory moves this figure", []float64(berthAvail), []float64(peerAvail))})
	return nil
}

// spawnMany starts Chromiums without Berth.
func (b *bench) spawnMany(n int, flags []string) (pids func() ([]int, error), end func() error, err error) {
	var all []*chrome
	end = func() error {
		var errs []error
		for _, c := range all {
			errs = append(errs, c.kill())
		}
		return errors.Join(errs...)
	}
	for range n {
		c, _, err := b.peer.spawnWith(flags)
		if err != nil {
			return nil, end, err
		}
		all = append(all, c)
	}
	return func() (pids []int, err error) {
		for _, c := range all {
			pids = append(pids, procs(c.group)...)
		}
		return pids, nil
	}, end, nil
}

// settleTime lets a started Chromium do what it does once at start.
const settleTime = 5 * time.Second

func (b *bench) weigh(ctx context.Context, counts bool, psses, avails *samples, many float64,
	start func() (pids func() ([]int, error), end func() error, err error)) (err error) {
	before, err := meminfo("MemAvailable")
	if err != nil {
		return err
	}
	pids, end, err := start()
	ended := false
	defer func() {
		if !ended {
			err = errors.Join(err, end())
		}
	}()
	if err != nil {
		return err
	}
	if err := settleDown(ctx); err != nil {
		return err
	}
	during, err := meminfo("MemAvailable")
	if err != nil {
		return err
	}
	all, err := pids()
	if err != nil {
		return err
	}
	each := pss(all) / many
	ended = true
	if err := errors.Join(end(), settleDown(ctx)); err != nil {
		return err
	}
	after, err := meminfo("MemAvailable")
	if counts && err == nil {
		*psses = append(*psses, each)
		// Against the mean of before and after: what others take or give
		// steadily meanwhile cancels out.
		*avails = append(*avails, float64((before+after)/2-during)/1024/many)
	}
	return err
}

func settleDown(ctx context.Context) error {
	select {
	case <-time.After(settleTime):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
