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
	// adopting is how many machines are adopted at once.
	adopting = 16
)

// Revive takes the machine of a handle over, with slot and agent. An error
// (machine.ErrGone when it has died) means that the machine does not run.
type Revive func(ctx context.Context, h machine.Handle) (*pool.Guest, error)

// Current says whether a waiting machine is what would be made today.
type Current func(s machine.Spec) bool

// Adopt takes over what outlived an earlier hostd: sessions go on, those that
// were held stay so until their verdict, waiting machines go back to the pool,
// and what died meanwhile gets its tombstone. Call it once, before anything else
// and after the driver's sweep of what the book does not know; the slots of dead
// machines are swept after it. It fails when the book cannot be read or written:
// then nobody knows which machine is whose.
func (h *Host) Adopt(ctx context.Context, revive Revive, current Current) error {
	handles, owner, err := h.readBook()
	if err != nil {
		return fmt.Errorf("adopt: %w", err)
	}
	var group errgroup.Group
	group.SetLimit(adopting)
	for _, handle := range handles {
		rec := owner[handle.Spec.ID]
		delete(owner, handle.Spec.ID)
		group.Go(func() error { return h.adoptOne(ctx, revive, current, handle, rec) })
	}
	err = group.Wait()
	for _, rec := range owner { // without a machine: begun or ended half way
		err = errors.Join(err, h.adoptDead(*rec))
	}
	if err == nil {
		err = h.closeLogs()
	}
	if err != nil {
		return fmt.Errorf("adopt: %w", err)
	}
	return context.Cause(ctx)
}

// readBook gives all handles, and the records by their machine.
func (h *Host) readBook() ([]machine.Handle, map[string]*Record, error) {
	handles, err := h.book.Machines()
	sessions, errS := h.book.Sessions()
	targets, errT := h.book.Targets()
	owner := make(map[string]*Record, len(sessions)+len(targets))
	for _, r := range append(targets, sessions...) {
		key := r.MachineID
		if key == "" {
			key = "none yet of " + r.Acquire.SessionID
		}
		owner[key] = &r
	}
	return handles, owner, errors.Join(err, errS, errT)
}

// adoptOne decides over one machine; rec is nil where no session has it. Such
// a machine has never served one (Book), so it may wait for the next.
func (h *Host) adoptOne(ctx context.Context, revive Revive, current Current, handle machine.Handle, rec *Record) error {
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
			return h.adoptDead(*rec)
		}
		return h.book.DeleteMachine(handle.Spec.ID)
	}
	switch {
	case rec != nil && rec.Op != nil:
		return h.adoptHeld(guest, *rec)
	case rec == nil && frozen(guest): // made from a capture, and hostd died before it was anybody's
		return h.adoptUseless(guest, nil, errors.New("frozen"))
	case rec == nil && !h.templateOfToday(guest):
		return h.adoptUseless(guest, nil, errors.New("its template is not the one of today"))
	}
	sctx, cancel := context.WithTimeoutCause(ctx, stateTime, fmt.Errorf("no answer within %s", stateTime))
	defer cancel()
	st, err := guest.Agent.State(sctx)
	switch {
	case ctx.Err() != nil:
		return nil
	case rec != nil && err == nil && st.SessionID == rec.Acquire.SessionID:
		h.pool.Adopted()
		s := newLive(h, guest, *rec, running, st)
		s.openWay()
		h.own(s)
		log.Info("session adopted", "session", st.SessionID)
		return nil
	case rec == nil && err == nil && st.SessionID == "" && st.Ready && current(handle.Spec):
		if h.wake != nil {
			h.pool.Rejoin(guest, h.wake)
		} else {
			h.pool.Offer(guest)
		}
		log.Info("waiting machine adopted")
		return nil
	}
	return h.adoptUseless(guest, rec, err)
}

func frozen(g *pool.Guest) bool {
	k, ok := g.Machine.(machine.Kept)
	return ok && k.Frozen()
}

// templateOfToday says whether a waiting machine was started from the template
// that new ones are: of an earlier QEMU's, its memory could not be captured.
func (h *Host) templateOfToday(g *pool.Guest) bool {
	k, ok := g.Machine.(machine.Kept)
	if !ok || h.keeper == nil {
		return true
	}
	recipe, err := h.keeper.Recipe(k.Handle().Spec)
	return err == nil && h.keeper.Made(recipe) == k.TemplateHash()
}

// adoptHeld goes on with an operation. Before the answer to its order is in the
// book no verdict can want the outcome, so a half captured machine goes on and a
// half restored one goes.
func (h *Host) adoptHeld(g *pool.Guest, rec Record) error {
	op := rec.Op
	switch {
	case op.Role == hostlink.Target && op.Restored == nil:
		return h.adoptUseless(g, &rec, errors.New("half restored"))
	case op.Going || op.Role == hostlink.Source && op.Captured == nil:
		h.pool.Adopted()
		h.own(newLive(h, g, rec, going, agentlink.State{}))
	default:
		h.pool.Adopted()
		h.ownHeld(g, rec)
	}
	h.log.Info("session adopted in an operation", "session", rec.Acquire.SessionID, "op", op.ID, "role", op.Role)
	return nil
}

// ownHeld starts the owner of a session that waits for its verdict.
func (h *Host) ownHeld(g *pool.Guest, rec Record) {
	s := newLive(h, g, rec, held, agentlink.State{})
	if rec.Op.Role == hostlink.Source {
		h.own(s)
		return
	}
	h.mu.Lock()
	h.targets[s.id] = s
	h.mu.Unlock()
	h.owners.Go(s.run)
}

// adoptUseless ends a machine of no more use: half taken, half booted, of an
// older image, or its agent does not answer.
func (h *Host) adoptUseless(g *pool.Guest, rec *Record, why error) error {
	h.log.Warn("a machine of no more use is ended", "machine", g.Machine.ID(), "error", why)
	h.pool.Adopted()
	err := h.book.DeleteMachine(g.Machine.ID())
	if rec != nil {
		err = h.adoptDead(*rec)
	}
	h.discard(g)
	return err
}

// adoptDead decides over a session whose machine is gone. One whose operation
// may have been committed waits for the verdict without it.
func (h *Host) adoptDead(rec Record) error {
	switch op := rec.Op; {
	case op != nil && op.Role == hostlink.Target && op.Restored == nil:
		err := h.book.Discard(rec, nil, nil)
		h.abandon(rec.Acquire.SessionID, *op)
		return err
	case op != nil && !op.Going && (op.Captured != nil || op.Restored != nil):
		h.ownHeld(nil, rec)
		return nil
	}
	return h.lost(rec)
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
// readers see their end and the week until they are forgotten begins. The log of
// a paused session stays open.
func (h *Host) closeLogs() error {
	open, err := h.events.Unfinished()
	if err != nil {
		return err
	}
	for _, id := range open {
		if h.find(id) == nil && h.findTarget(id) == nil {
			err = errors.Join(err, h.closeLog(id))
		}
	}
	return err
}

func (h *Host) closeLog(id string) error {
	t, ended, err := h.book.Tombstone(id)
	if err != nil {
		return err
	}
	left, went, err := h.book.Left(id)
	switch {
	case err != nil:
		return err
	case !ended && went && left.paused():
		if h.events.Last(id) == left.Baggage.LastSeq { // hostd died before it could say so
			h.paused(left)
		}
		return nil
	case !ended && went:
		return h.events.Leave(id)
	case !ended:
		t = hostlink.Tombstone{SessionID: id, EndedAt: time.Now().UTC(), Error: "The session is not on this host any more."}
	}
	h.finish(t)
	return nil
}
