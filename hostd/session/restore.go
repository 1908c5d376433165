package session

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/hostlink"
)

const (
	// stateTime bounds the agent's answer when its machine is adopted: one that
	// hangs costs its session, not the start of hostd.
	stateTime = 10 * time.Second
	// restoring is how many machines are adopted at once.
	restoring = 16
)

// Revive takes the machine of a handle over, with slot and agent. An error
// (machine.ErrGone when it has died) means that the machine does not run.
type Revive func(ctx context.Context, h machine.Handle) (*pool.Guest, error)

// Current says whether a waiting machine is what would be made today.
type Current func(s machine.Spec) bool

// Restore adopts what outlived an earlier hostd: sessions go on, waiting
// machines go back to the pool, and what died meanwhile gets its tombstone.
// Call it once, before anything else and after the driver's sweep of what the
// book does not know; the slots of dead machines are swept after it. It fails
// when the book cannot be read or written: then nobody knows which machine is
// whose.
func (h *Host) Restore(ctx context.Context, revive Revive, current Current) error {
	handles, err := h.book.Machines()
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	records, err := h.book.Sessions()
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	owner := make(map[string]*Record, len(records))
	for _, r := range records {
		owner[r.MachineID] = &r
	}
	var group errgroup.Group
	group.SetLimit(restoring)
	for _, handle := range handles {
		rec := owner[handle.Spec.ID]
		delete(owner, handle.Spec.ID)
		group.Go(func() error { return h.restoreOne(ctx, revive, current, handle, rec) })
	}
	err = group.Wait()
	for _, rec := range owner { // a session without a machine: it ended half way
		err = errors.Join(err, h.lost(*rec))
	}
	if err == nil {
		err = h.closeLogs()
	}
	if err != nil {
		return fmt.Errorf("restore: %w", err)
	}
	return context.Cause(ctx)
}

// restoreOne decides over one machine; rec is nil where no session has it. Such
// a machine has never served one (Book), so it may wait for the next.
func (h *Host) restoreOne(ctx context.Context, revive Revive, current Current, handle machine.Handle, rec *Record) error {
	log := h.log.With("machine", handle.Spec.ID)
	guest, err := revive(ctx, handle)
	if err != nil {
		if ctx.Err() != nil {
			return nil // asked to stop meanwhile: the next start sees to it
		}
		if !errors.Is(err, machine.ErrGone) {
			log.Warn("a machine could not be adopted", "error", err)
		}
		if rec != nil {
			return h.lost(*rec)
		}
		return h.book.DeleteMachine(handle.Spec.ID)
	}
	sctx, cancel := context.WithTimeoutCause(ctx, stateTime, fmt.Errorf("no answer within %s", stateTime))
	defer cancel()
	st, err := guest.Agent.State(sctx)
	switch {
	case ctx.Err() != nil:
		return nil
	case rec != nil && err == nil && st.SessionID == rec.Acquire.SessionID:
		h.readopt(guest, *rec, st)
		log.Info("session adopted", "session", st.SessionID)
		return nil
	case rec == nil && err == nil && st.SessionID == "" && st.Ready && current(handle.Spec):
		h.pool.Offer(guest)
		log.Info("waiting machine adopted")
		return nil
	}
	log.Warn("a machine of no more use is ended", "error", err) // half taken, half booted, of an older image, or its agent does not answer
	h.pool.Adopted()
	if rec != nil {
		err = h.lost(*rec)
	} else {
		err = h.book.DeleteMachine(handle.Spec.ID)
	}
	h.discard(guest)
	return err
}

// readopt goes on with a session that an earlier hostd began.
func (h *Host) readopt(g *pool.Guest, rec Record, st agentlink.State) {
	g.Slot.SetEgress(h.egress(rec.Acquire.SessionID, rec.Acquire.Epoch))
	h.pool.Adopted()
	h.adopt(g, rec, st)
}

func (h *Host) lost(rec Record) error {
	t := hostlink.Tombstone{SessionID: rec.Acquire.SessionID, Epoch: rec.Acquire.Epoch, EndedAt: time.Now().UTC(),
		Error: "The session's machine was lost while its host restarted."}
	if err := h.book.End(t, rec.MachineID); err != nil {
		return err
	}
	h.finish(t)
	return nil
}

// closeLogs finishes the logs whose sessions had ended when hostd died, so that
// readers see their end and the week until they are forgotten begins.
func (h *Host) closeLogs() error {
	open, err := h.events.Unfinished()
	if err != nil {
		return err
	}
	for _, id := range open {
		if h.find(id) != nil {
			continue
		}
		t, ok, err := h.book.Tombstone(id)
		if err != nil {
			return err
		}
		if !ok {
			t = hostlink.Tombstone{SessionID: id, EndedAt: time.Now().UTC(), Error: "The session is not on this host any more."}
		}
		h.finish(t)
	}
	return nil
}
