package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
)

const (
	// shipRounds is how many disk layers a capture adds at most before the stop.
	shipRounds = 3
	// shipWorth is how long a round takes after which the machine may have written
	// enough for another.
	shipWorth = 500 * time.Millisecond
)

// shipStill does what can be done of a capture while the machine runs: it puts a
// new disk layer on top, stores those that stand still, and gives them to the
// host that the session moves to. What the machine has written meanwhile stands
// still in the next round.
func (s *live) shipStill(ctx context.Context, k machine.Kept, d Draft, o hostlink.Capture, step *steps) error {
	give, still := o.To != "", 0
	for range shipRounds {
		began := time.Now()
		layers, err := k.AddLayer(ctx, still)
		if err != nil {
			return fmt.Errorf("add a disk layer: %w", err)
		}
		step.done("layer")
		if err := d.Layers(ctx, layers); err != nil {
			return fmt.Errorf("store the disk layers that stand still: %w", err)
		}
		step.done("store")
		if give {
			give = s.give(ctx, d, o)
			step.done("ship")
		}
		if still = len(layers); time.Since(began) < shipWorth {
			return nil
		}
	}
	return nil
}

// give gives the target of a move what is stored so far. Where that fails it
// fetches all of it after the stop.
func (s *live) give(ctx context.Context, d Draft, o hostlink.Capture) bool {
	to := s.host.peers(o.To)
	defer to.Close()
	have, err := to.Parts(ctx, s.id)
	var all io.ReadCloser
	if err == nil {
		all, err = d.Export(ctx, have)
	}
	if err == nil {
		err = errors.Join(to.Ahead(ctx, s.id, o.OpID, all), all.Close())
	}
	if err != nil {
		s.log.Warn("disk layers could not be given ahead to where the session moves", "op", o.OpID, "error", err)
	}
	return err == nil
}

func (s *live) closeDraft(d Draft) {
	if err := d.Close(); err != nil {
		s.log.Warn("what is left of a capture stays until the next start", "error", err)
	}
}

// expected is what may come ahead for a restore, from Prepare until it is done,
// undone or overdue.
type expected struct {
	sessionID string
	ctx       context.Context // ends with it
	cancel    context.CancelCauseFunc
	overdue   *time.Timer
	key       []byte
	came      []came // guarded by the Host's mu
}

// came is layers that came ahead: as they are in a snapshot, and as the driver
// has them for the machine.
type came struct {
	held Held
	drop func() error
}

func (c came) release() error { return errors.Join(c.drop(), c.held.Release()) }

// expect says that a restore is to come, for which something may come ahead.
func (h *Host) expect(o hostlink.Prepare, sessionID string) {
	ctx, cancel := context.WithCancelCause(h.ctx)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed || h.expected[o.OpID] != nil { // the same order again
		cancel(nil)
		return
	}
	h.expected[o.OpID] = &expected{sessionID: sessionID, ctx: ctx, cancel: cancel, key: o.Key,
		overdue: time.AfterFunc(time.Until(o.Deadline), func() { h.letGo(o.OpID) })}
}

// Parts names what this host has of a session's snapshots.
func (h *Host) Parts(id string) []string { return h.snapshots.Parts(id) }

// Ahead takes in what of a capture there is before its machine stops.
func (h *Host) Ahead(ctx context.Context, id, opID string, in io.Reader) error {
	h.mu.Lock()
	e := h.expected[opID]
	h.mu.Unlock()
	unexpected := apierr.New(apierr.NotFound, "nothing of session %s is expected for operation %s", id, opID)
	if e == nil || e.sessionID != id {
		return unexpected
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(e.ctx, func() { cancel(unexpected) })()
	c, err := h.takeAhead(ctx, e, in)
	if err != nil {
		return err
	}
	h.mu.Lock()
	if h.expected[opID] == e {
		e.came = append(e.came, c)
		h.mu.Unlock()
		return nil
	}
	h.mu.Unlock()
	return errors.Join(unexpected, c.release())
}

// takeAhead stores layers, and unpacks them for the machine that is to come.
func (h *Host) takeAhead(ctx context.Context, e *expected, in io.Reader) (c came, err error) {
	if c.held, err = h.snapshots.Hold(ctx, e.sessionID, in); err != nil {
		return c, err
	}
	layers, err := c.held.Open(e.key)
	if err == nil {
		c.drop, err = h.keeper.AddLayers(ctx, layers.Layers())
		err = errors.Join(err, layers.Close())
	}
	if err != nil {
		if c.drop != nil {
			err = errors.Join(err, c.drop())
		}
		return c, errors.Join(err, c.held.Release())
	}
	return c, nil
}

// letGo ends the expectation of a restore: what came ahead and is in no snapshot
// goes.
func (h *Host) letGo(opID string) {
	h.mu.Lock()
	e := h.expected[opID]
	delete(h.expected, opID)
	h.mu.Unlock()
	if e == nil {
		return
	}
	e.overdue.Stop()
	e.cancel(errCalledOff)
	for _, c := range e.came {
		if err := c.release(); err != nil {
			h.log.Warn("what came ahead of a snapshot stays until the next start", "session", e.sessionID, "error", err)
		}
	}
}

// letAllGo is letGo for a hostd that stops.
func (h *Host) letAllGo() {
	h.mu.Lock()
	var ops []string
	for op := range h.expected {
		ops = append(ops, op)
	}
	h.mu.Unlock()
	for _, op := range ops {
		h.letGo(op)
	}
}
