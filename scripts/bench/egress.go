package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/berth-dev/berth/shared/egress"
)

// egress measures the stack's own proxyd at its front: with ledger, gossip and
// a gateway that follows, by connections that begin as hostd's do, with a pass.
// Its peers have no sessions, passes, rules or counts. Load and sites are
// processes of their own, so that one does not wait for another's scheduler.
func (b *bench) egress(ctx context.Context) (err error) {
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(callers + 8)) // each caller blocks in system calls
	e, err := b.newEgress()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, e.close()) }()
	for _, part := range []func(context.Context) error{e.throughput, e.connections, e.quiet} {
		if err := part(ctx); err != nil {
			return err
		}
	}
	return nil
}

// egressBench is what the parts share.
type egressBench struct {
	*bench
	bulk, echo           *child
	proxyd, ruled        lane // ruled: by a pass with the most and longest rules
	tiny, squid, haproxy lane
	peers                *proxies
}

func (b *bench) newEgress() (*egressBench, error) {
	if err := b.withWeb(); err != nil { // for its address
		return nil, err
	}
	e := &egressBench{bench: b}
	err := e.start()
	if err != nil {
		err = errors.Join(err, e.close())
	}
	return e, err
}

func (e *egressBench) start() (err error) {
	if e.bulk, err = startChild("bulk-site", nil); err != nil {
		return err
	}
	if e.echo, err = startChild("echo-site", nil); err != nil {
		return err
	}
	if e.peers, err = startProxies(e.stack.base, e.bulk.addrs[0]); err != nil {
		return err
	}
	e.tiny, e.squid, e.haproxy = e.peers.lanes()
	if e.proxyd, err = e.lane("bench-plain", 0); err != nil {
		return err
	}
	e.ruled, err = e.lane("bench-ruled", egress.MaxRules)
	return err
}

func (e *egressBench) close() error {
	return errors.Join(e.peers.close(), e.bulk.close(), e.echo.close())
}

// slice is how long one side of a round runs.
func (e *egressBench) slice() time.Duration {
	if e.quick {
		return 400 * time.Millisecond
	}
	return time.Second
}

// throughput: one download as fast as it goes, and the processor time of it.
func (e *egressBench) throughput(ctx context.Context) error {
	inside, release, err := e.inside(ctx)
	if err != nil {
		return err
	}
	defer release()
	type side struct {
		lane
		rate, cpu samples // GB/s, s/GB
	}
	sides := []*side{{lane: e.proxyd}, {lane: e.tiny}, {lane: e.squid}, {lane: e.haproxy}, {lane: lane{Addr: e.bulk.addrs[0], Direct: true}}}
	var rounds []func(context.Context, bool) error
	for _, s := range sides {
		rounds = append(rounds, func(_ context.Context, counts bool) error {
			rate, cpu, err := download(s.lane, e.bulk.addrs[0], e.slice())
			if counts {
				s.rate, s.cpu = append(s.rate, rate), append(s.cpu, cpu)
			}
			return err
		})
	}
	var machine samples // GB/s
	rounds = append(rounds, func(ctx context.Context, counts bool) error {
		rate, err := inside(ctx)
		if counts {
			machine = append(machine, rate)
		}
		return err
	})
	if err := interleave(ctx, 1, e.rounds(7, 3), rounds...); err != nil {
		return err
	}
	own := sides[0]
	for i, peer := range []struct {
		name     string
		now, aim float64
	}{{"tinyproxy", 2.5, 3.5}, {"squid", 1.3, 2}, {"HAProxy, tcp, splice", 0.8, 1.1}} {
		e.add(figure{What: "one download through proxyd", Beside: peer.name, Unit: "GB/s", More: true, Now: peer.now, Aim: peer.aim,
			Value: own.rate.median(), Peer: sides[i+1].rate.median(), Count: len(own.rate)})
	}
	e.add(figure{What: "the same", Beside: "without a proxy", Unit: "GB/s", Plain: true, Value: own.rate.median(), Peer: sides[4].rate.median(), Count: len(own.rate)})
	e.add(figure{What: "the same by curl in a session's shell, scope all", Beside: "at proxyd's front", Unit: "GB/s", Plain: true,
		Value: machine.median(), Peer: own.rate.median(), Count: len(machine)})
	e.add(figure{What: "CPU seconds per GB of it", Beside: "tinyproxy", Unit: "s", Now: 1.0 / 4, Aim: 1.0 / 8,
		Value: own.cpu.median(), Peer: sides[1].cpu.median(), Count: len(own.cpu),
		Note: fmt.Sprintf("squid %.3f, HAProxy %.3f s", sides[2].cpu.median(), sides[3].cpu.median())})
	return nil
}

// connections: connect, CONNECT, one byte there and back, close.
func (e *egressBench) connections(ctx context.Context) error {
	lanes := []lane{e.proxyd, e.ruled, e.tiny, e.squid}
	rates, cpus := make([]samples, len(lanes)), make([]samples, len(lanes)) // 1/s, µs each
	var rounds []func(context.Context, bool) error
	for i, l := range lanes {
		rounds = append(rounds, func(_ context.Context, counts bool) error {
			rate, cpu, err := connect(l, e.echo.addrs, e.slice()*6/10)
			if counts {
				rates[i], cpus[i] = append(rates[i], rate), append(cpus[i], cpu)
			}
			return err
		})
	}
	if err := interleave(ctx, 1, e.rounds(9, 4), rounds...); err != nil {
		return err
	}
	note := fmt.Sprintf("CPU each: proxyd %.0f, tinyproxy %.0f, squid %.0f µs", cpus[0].median(), cpus[2].median(), cpus[3].median())
	for _, f := range []figure{
		{What: "connections through proxyd, a byte each way", Beside: "tinyproxy", Value: rates[0].median(), Peer: rates[2].median(), Now: 0.9, Aim: 1.2, Note: note},
		{What: "the same", Beside: "squid", Value: rates[0].median(), Peer: rates[3].median(), Now: 1.5, Aim: 2},
		{What: "the same, with 10 rules of 256 characters", Beside: "with none", Value: rates[1].median(), Peer: rates[0].median(), Now: 0.95, Aim: 0.98},
	} {
		f.Unit, f.More, f.Count = "/s", true, len(rates[0])
		e.add(f)
	}
	return nil
}

// quiet: turns of one byte of a session while another one downloads as fast as
// it can, beside the same turns with nobody else there.
func (e *egressBench) quiet(ctx context.Context) error {
	var alone, beside, bare, medians, taken samples // µs; bare: no proxy between the same ends
	turn := func(l lane, into *samples, counts bool) (samples, error) {
		all, err := turns(l, e.echo.addrs[0], e.slice())
		if counts && err == nil {
			*into = append(*into, all.quantile(0.99))
		}
		return all, err
	}
	other, err := e.lane("bench-other", 0)
	if err != nil {
		return err
	}
	straight := lane{Addr: e.echo.addrs[0], Direct: true}
	err = interleave(ctx, 1, e.rounds(9, 4),
		func(_ context.Context, counts bool) error { _, err := turn(e.proxyd, &alone, counts); return err },
		func(_ context.Context, counts bool) (err error) {
			sink, err := startChild("sink", &drain{other, e.bulk.addrs[0]})
			if err != nil {
				return err
			}
			defer func() { err = errors.Join(err, sink.close()) }()
			busy, err := turn(e.proxyd, &beside, counts)
			if err != nil {
				return err
			}
			if _, err = turn(straight, &bare, counts); err != nil {
				return err
			}
			rate, err := sink.result()
			if counts {
				medians, taken = append(medians, busy.median()), append(taken, rate)
			}
			return err
		})
	if err != nil {
		return err
	}
	e.add(figure{What: "a quiet session's turn while another saturates, p99", Beside: "alone", Unit: "µs", Now: 3, Aim: 2,
		Value: beside.median(), Peer: alone.median(), Count: len(alone),
		Note: fmt.Sprintf("p50 %.0f µs; the other takes %.2f GB/s; medians of the rounds' p99", medians.median(), taken.median())})
	e.add(figure{What: "the same", Beside: "without a proxy between the same ends, while another saturates", Unit: "µs", Plain: true,
		Value: beside.median(), Peer: bare.median(), Count: len(bare)})
	return nil
}
