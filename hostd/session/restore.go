package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Rebuild makes a machine from a memory capture and leaves it frozen; first is
// called with its handle before anything else of it is written.
type Rebuild func(ctx context.Context, kind session.Kind, c machine.Capture, first func(machine.Handle) error) (*pool.Guest, error)

// restoring is a restore under way.
type restoring struct {
	op     string
	cancel context.CancelCauseFunc
}

var errCalledOff = errors.New("the operation was aborted")

// Restore makes a session's machine from a snapshot, completely, and holds it
// until the verdict. The same order again gives the same answer.
func (h *Host) Restore(ctx context.Context, id string, o hostlink.Restore) (hostlink.Restored, error) {
	finish, err := h.claim(ctx, targetOf(id))
	if err != nil {
		return hostlink.Restored{}, err
	}
	defer finish()
	if done, ok, err := h.restored(ctx, id, o); ok || err != nil {
		return done, err
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	h.mu.Lock()
	h.restoring[id] = restoring{o.OpID, cancel}
	h.mu.Unlock()
	defer func() {
		h.mu.Lock()
		delete(h.restoring, id)
		h.mu.Unlock()
	}()
	done, err := h.restore(ctx, id, o)
	h.letGo(o.OpID)
	if err != nil {
		return done, h.notRestored(ctx, id, err)
	}
	return done, nil
}

// targetOf names the claim of a target: a source of the same session may be
// ended on this host meanwhile.
func targetOf(id string) string { return "target " + id }

// notRestored is the answer to a restore that failed: another host may do better.
func (h *Host) notRestored(ctx context.Context, id string, err error) error {
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if e := (*apierr.Error)(nil); errors.As(err, &e) {
		return err
	}
	if errors.Is(err, syscall.ENOSPC) {
		return apierr.Wrap(err, apierr.NoCapacity, "the host has no room on its disk to restore the session")
	}
	h.log.Warn("a session could not be restored", "session", id, "error", err)
	return apierr.Wrap(err, apierr.Unavailable, "the host could not restore the session; try again soon").After(time.Second)
}

// restored answers an order that was obeyed before, or must not be.
func (h *Host) restored(ctx context.Context, id string, o hostlink.Restore) (done hostlink.Restored, ok bool, err error) {
	if s := h.findTarget(id); s != nil {
		a, err := s.ask(ctx, order{})
		if op := a.rec.Op; err == nil && (op == nil || op.ID != o.OpID) { // nil: it went on meanwhile
			err = apierr.New(apierr.OperationInProgress, "session %s is restored here for another operation", id).After(time.Second)
		} else if err == nil {
			done, ok = *op.Restored, true
		}
		return done, ok, err
	}
	tooLate := apierr.New(apierr.SessionNotRunning, "the order to restore session %s comes too late", id)
	if s := h.find(id); s != nil && s.epoch >= o.Acquire.Epoch {
		return done, false, tooLate
	}
	if late, err := h.late(id, o.Acquire.Epoch); err != nil || late {
		return done, false, errors.Join(err, tooLate)
	}
	if _, decided, err := h.book.Verdict(o.OpID); err != nil || decided {
		return done, false, errors.Join(err, tooLate)
	}
	return done, false, nil
}

// late says whether an epoch of a session is over on this host.
func (h *Host) late(id string, epoch uint64) (bool, error) {
	if t, ok, err := h.tombstone(id); err != nil || ok && t.Epoch >= epoch {
		return ok, err
	}
	l, ok, err := h.book.Left(id)
	return ok && l.Epoch >= epoch, err
}

// restore does the work. The record of the target is in the book before its
// machine: one without the other serves nobody.
func (h *Host) restore(ctx context.Context, id string, o hostlink.Restore) (hostlink.Restored, error) {
	began := time.Now()
	bag, fetched, err := h.fetch(ctx, id, o)
	rec := Record{Acquire: o.Acquire, Since: began.UTC(), Setup: bag.Setup, SetupErr: bag.SetupErr,
		Op: &Op{ID: o.OpID, Kind: o.Kind, Role: hostlink.Target, SnapshotID: o.Snapshot.ID, Memory: o.Snapshot.Memory, Since: began.UTC(), Fetched: fetched}}
	if !rec.Op.Memory {
		rec.portable(bag)
	}
	var guest *pool.Guest
	var acquired time.Duration
	if err == nil {
		guest, acquired, err = h.remake(ctx, &rec, o)
	}
	if err == nil {
		done := hostlink.Restored{Memory: rec.Op.Memory, AcquireMs: acquired.Milliseconds(), RestoreMs: (time.Since(began) - acquired).Milliseconds()}
		if err = h.hold(guest, &rec, done); err == nil {
			return *rec.Op.Restored, nil
		}
	}
	if e := h.book.Discard(rec, nil, nil); e != nil { // the next hostd does it
		h.log.Error("a target that failed stays in the book", "session", id, "error", e)
	}
	if guest != nil {
		h.discard(guest)
	}
	h.abandon(id, *rec.Op)
	return hostlink.Restored{}, err
}

// portable is what a fresh machine means for a session: what ran in the old one
// has ended.
func (r *Record) portable(bag hostlink.Baggage) {
	r.Op.HadClients = bag.HadClients
	if r.Setup == session.SetupRunning {
		r.Setup, r.SetupErr = session.SetupFailed, "The session went to another machine without its memory while setup ran."
	}
}

// hold makes a restored machine wait for the verdict.
func (h *Host) hold(g *pool.Guest, rec *Record, done hostlink.Restored) error {
	rec.Op.Restored = &done
	s := newLive(h, g, *rec, held, agentlink.State{})
	done.Status = s.status()
	if err := h.book.PutTarget(*rec); err != nil { // before the answer: it makes a commit possible
		s.cancel(nil)
		return err
	}
	h.mu.Lock()
	h.targets[s.id] = s
	h.mu.Unlock()
	h.owners.Go(s.run)
	return nil
}

// remake gives the session its machine, and says how long it took to get one.
func (h *Host) remake(ctx context.Context, rec *Record, o hostlink.Restore) (*pool.Guest, time.Duration, error) {
	if rec.Op.Memory {
		return h.remakeMemory(ctx, rec, o)
	}
	return h.remakePortable(ctx, rec, o)
}

func (h *Host) remakeMemory(ctx context.Context, rec *Record, o hostlink.Restore) (g *pool.Guest, acquired time.Duration, err error) {
	loaded, err := h.snapshots.Load(ctx, rec.Acquire.SessionID, o.Snapshot.ID, o.Key)
	if err != nil {
		return nil, 0, err
	}
	c := readAhead(loaded)
	began := time.Now()
	g, err = h.pool.Make(o.OpID, func() (*pool.Guest, error) {
		return h.rebuild(ctx, rec.Acquire.Kind, c, func(m machine.Handle) error {
			acquired = time.Since(began)
			rec.MachineID = m.Spec.ID
			return h.book.PutTarget(*rec)
		})
	})
	return g, acquired, errors.Join(err, c.Close())
}

// remakePortable takes a waiting machine and gives it the portable state. It
// has no way out before the verdict.
func (h *Host) remakePortable(ctx context.Context, rec *Record, o hostlink.Restore) (g *pool.Guest, acquired time.Duration, err error) {
	began := time.Now()
	if g, rec.Warm, err = h.pool.TakeKept(ctx, rec.Acquire.Kind, o.OpID); err != nil {
		return nil, 0, err
	}
	h.pool.Release(o.OpID) // a waiting machine had a place of its own
	acquired = time.Since(began)
	rec.MachineID = g.Machine.ID()
	return g, acquired, h.refurnish(ctx, g, *rec, o)
}

func (h *Host) refurnish(ctx context.Context, g *pool.Guest, rec Record, o hostlink.Restore) error {
	state, err := h.snapshots.LoadPortable(ctx, rec.Acquire.SessionID, o.Snapshot.ID, o.Key)
	if err != nil {
		return err
	}
	defer state.Close()
	if err := errors.Join(h.book.PutTarget(rec), g.Machine.Promote(ctx)); err != nil {
		return err
	}
	a := rec.Acquire
	sctx, cancel := context.WithTimeoutCause(ctx, startTime, fmt.Errorf("no answer within %s", startTime))
	err = g.Agent.Start(sctx, agentlink.Start{SessionID: a.SessionID, Kind: a.Kind, Viewport: a.Viewport, Held: true, Proxy: shellProxy(a)})
	cancel()
	if err != nil {
		return err
	}
	ictx, cancel := context.WithTimeoutCause(ctx, workTime, fmt.Errorf("not taken in within %s", workTime))
	defer cancel()
	return g.Agent.Import(ictx, state)
}

// abandon lets go of what came for an operation that came to nothing.
func (h *Host) abandon(id string, op Op) {
	if !op.Fetched {
		return
	}
	h.leaveLog(id)
	h.later("a snapshot that came for nothing", op.SnapshotID, func(_ context.Context, id string) error { return h.snapshots.Drop(id) })
}

func (h *Host) leaveLog(id string) {
	if err := h.events.Leave(id); err != nil {
		h.log.Warn("the event log of a session that left stays", "session", id, "error", err)
	}
}

// cleanTime bounds what is removed in the background.
const cleanTime = time.Minute

// later removes something that nobody waits for.
func (h *Host) later(what, id string, remove func(context.Context, string) error) {
	h.ending.Go(func() {
		ctx, cancel := context.WithTimeout(context.Background(), cleanTime)
		defer cancel()
		if err := remove(ctx, id); err != nil {
			h.log.Warn(what+" could not be removed", "snapshot", id, "error", err)
		}
	})
}

// callOff ends a restore under way whose operation was aborted, and waits until
// nothing of it is left.
func (h *Host) callOff(ctx context.Context, id string, v hostlink.Verdict) (was bool, err error) {
	h.pool.Release(v.OpID) // a place kept for a restore that never came
	h.letGo(v.OpID)
	h.mu.Lock()
	r, ok := h.restoring[id]
	h.mu.Unlock()
	if !ok || v.Committed || v.OpID != "" && r.op != v.OpID {
		return false, nil
	}
	r.cancel(errCalledOff)
	finish, err := h.claim(ctx, targetOf(id))
	if err != nil {
		return true, err
	}
	finish()
	return true, nil
}

// OpenSnapshot opens a snapshot for another host, without the parts it has.
func (h *Host) OpenSnapshot(ctx context.Context, id string, have []string) (io.ReadCloser, error) {
	if !h.snapshots.Has(id) {
		return nil, apierr.New(apierr.NotFound, "snapshot %s is not on this host", id)
	}
	return h.snapshots.Export(ctx, id, have)
}

// DeleteSnapshot removes a session's snapshot here and in the blob store.
func (h *Host) DeleteSnapshot(ctx context.Context, id, sessionID string) error {
	return h.snapshots.Delete(ctx, id, sessionID)
}

// OpenTemplate opens a template for another host.
func (h *Host) OpenTemplate(hash string) (io.ReadCloser, error) {
	if h.keeper == nil || !h.keeper.HasTemplate(hash) {
		return nil, apierr.New(apierr.NotFound, "template %s is not on this host", hash)
	}
	return h.keeper.OpenTemplate(hash)
}
