package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"syscall"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Snapshots is the store of captures. Whatever takes long obeys its context.
type Snapshots interface {
	// Draft begins to store a memory capture, while the machine runs; what the same
	// order stored before makes way.
	Draft(ctx context.Context, sessionID string, o hostlink.Capture) (Draft, error)
	// Hold takes in what another host's Draft gave for it, as a part that this host
	// has.
	Hold(ctx context.Context, sessionID string, r io.Reader) (Held, error)
	// WritePortable stores an agent's export and says what it is; what the same
	// order stored before makes way. On error nothing of it is left.
	WritePortable(ctx context.Context, sessionID string, o hostlink.Capture, state io.Reader) (session.Snapshot, error)
	// Load opens a memory capture, on this host or in the blob store. Its parts may
	// be read at once.
	Load(ctx context.Context, sessionID, id string, key []byte) (machine.Capture, error)
	// LoadPortable opens an agent's export, as Load does.
	LoadPortable(ctx context.Context, sessionID, id string, key []byte) (io.ReadCloser, error)
	// Has says whether a snapshot is on this host, whole.
	Has(id string) bool
	// Parts names what this host has of a session's snapshots: an Export to it
	// may leave those out.
	Parts(sessionID string) []string
	// Export opens a snapshot, sealed as it is, for another host's Import.
	Export(ctx context.Context, id string, have []string) (io.ReadCloser, error)
	Import(ctx context.Context, sessionID, id string, r io.Reader) error
	// Delete removes a snapshot, here and in the blob store; that there is none
	// is no error. Without sessionID one that only the blob store has stays.
	Delete(ctx context.Context, id, sessionID string) error
	// DeleteSession removes all of a session's, here and in the blob store.
	DeleteSession(ctx context.Context, sessionID string) error
	// Drop removes a snapshot here only.
	Drop(id string) error
	// List names the snapshots on this host, and those of them that are in the
	// blob store.
	List() (all, durable []string)
}

// Draft is a memory capture that is being stored. One goroutine has it, and
// closes it.
type Draft interface {
	// Layers stores layers that stand still, unless they are stored already.
	Layers(ctx context.Context, layers []machine.Layer) error
	// Export opens what is stored so far, and what the previous snapshot has of the
	// memory, without what another host has, for its Hold.
	Export(ctx context.Context, have []string) (io.ReadCloser, error)
	// Write stores the rest of the machine, which has stopped, and says what it is.
	// On error nothing of it is left once the draft is closed.
	Write(ctx context.Context, c machine.Capture) (session.Snapshot, error)
	Close() error
}

// Held is disk layers that came ahead of a snapshot.
type Held interface {
	// Open gives the layers, to be read until the capture is closed, which has
	// nothing else.
	Open(key []byte) (machine.Capture, error)
	// Release lets go of them: they go, unless a snapshot has them by then.
	Release() error
}

const (
	// freezeTime is what an agent has to stop the customer's processes before a
	// memory capture, which works without it.
	freezeTime = 2 * time.Second
	// exportFreezeTime is the same before an export, which needs the agent.
	exportFreezeTime = 20 * time.Second
	// workTime bounds a capture whose order names no deadline.
	workTime = 10 * time.Minute
	// beyondDisk is what an export may be larger than the machine's disk: tabs,
	// storage, frames of the archive.
	beyondDisk = 1 << 30
)

// work is what takes long in a session's operation, beside its owner, which
// goes on answering.
type work struct {
	cancel context.CancelCauseFunc
	out    chan outcome // one, whatever comes
}

// outcome is how a work ended.
type outcome struct {
	captured hostlink.Captured
	still    time.Time // of a capture: when it began to stop the machine; zero: it did not
	state    agentlink.State
	err      error
}

// result is where a work's outcome comes; never, for none.
func (w *work) result() <-chan outcome {
	if w == nil {
		return nil
	}
	return w.out
}

// begin starts a work. It must not touch what the owner owns.
func (s *live) begin(do func(context.Context) outcome) {
	ctx, cancel := context.WithCancelCause(s.ctx)
	s.work = &work{cancel, make(chan outcome, 1)}
	out := s.work.out
	s.host.owners.Go(func() { out <- do(ctx) })
}

// settle ends a work under way and waits until it is over; what came of it is
// of no more interest.
func (s *live) settle() {
	if s.work == nil {
		return
	}
	s.work.cancel(errEnded)
	for {
		select {
		case n := <-s.heard: // a work may wait for what the agent tells
			s.take(n)
		case out := <-s.work.out:
			s.stoodStill(out)
			s.work = nil
			return
		}
	}
}

// worked takes a work's outcome in.
func (s *live) worked(out outcome) {
	s.work.cancel(nil)
	s.work = nil
	s.stoodStill(out)
	if s.phase == capturing {
		s.captured(out)
	} else {
		s.gone(out)
	}
}

// stoodStill notes since when a capture's machine stands still: until then it ran
// on while its disk was shipped, and its time passed.
func (s *live) stoodStill(out outcome) {
	if s.phase != capturing {
		return
	}
	op := *s.rec.Op
	if op.Since = out.still.UTC(); out.still.IsZero() {
		op.Since = time.Now().UTC()
	}
	s.rec.Op = &op
}

// answer answers those who wait for a work.
func (s *live) answer(a answer) {
	for _, reply := range s.waiting {
		reply <- a
	}
	s.waiting = nil
}

// capture obeys an order to capture: it answers with what was captured for it
// before, or begins. The operation is in the book before anything stops, so
// that the next hostd knows why the machine stands still.
func (s *live) capture(o hostlink.Capture, reply chan answer) {
	op := s.rec.Op
	switch {
	case o.Epoch != s.epoch:
		reply <- answer{err: apierr.New(apierr.SessionNotRunning, "session %s runs here with epoch %d, not %d", s.id, s.epoch, o.Epoch)}
	case op != nil && op.ID == o.OpID && s.phase == held && op.Captured != nil:
		reply <- answer{captured: *op.Captured}
	case op != nil && op.ID == o.OpID && s.phase == capturing:
		s.waiting = append(s.waiting, reply)
	case s.phase == going: // after an abort, or because hostd died half way through this very order
		reply <- answer{err: apierr.New(apierr.Unavailable, "the session's machine is being set going; give the order again")}
	case s.phase != running:
		reply <- answer{err: apierr.New(apierr.OperationInProgress, "session %s is in another operation on its host", s.id).After(time.Second)}
	default:
		if err := s.choose(&o); err != nil {
			reply <- answer{err: err}
			return
		}
		if err := s.stop(o); err != nil {
			reply <- answer{err: err}
			return
		}
		s.waiting = []chan answer{reply}
		s.begin(func(ctx context.Context) outcome { return s.captureNow(ctx, o) })
	}
}

// choose makes an order for a memory one without where no host could go on with
// it: the machine has outlived the monitor that it was started by, say. What only
// a memory would carry over must not be lost by that.
func (s *live) choose(o *hostlink.Capture) error {
	k := s.kept()
	if k == nil || o.Portable {
		return nil
	}
	why := k.Restorable()
	if why == nil {
		return nil
	}
	if s.rec.Setup == session.SetupRunning {
		return apierr.New(apierr.OperationInProgress, "the session's machine can only go on without its memory, and setup, which is still running, would be cut; try again when it is done").After(time.Second)
	}
	s.log.Warn("captured without its memory", "op", o.OpID, "error", why)
	o.Portable = true
	return nil
}

// stop makes a running session the source of an operation.
func (s *live) stop(o hostlink.Capture) error {
	if _, decided, err := s.host.book.Verdict(o.OpID); err != nil {
		return notCaptured(err)
	} else if decided {
		return apierr.New(apierr.OperationInProgress, "operation %s has been decided: the order to capture comes too late", o.OpID)
	}
	rec := s.rec
	rec.Op = &Op{ID: o.OpID, Kind: o.Kind, Role: hostlink.Source, SnapshotID: o.SnapshotID,
		Memory: !o.Portable && s.kept() != nil, Since: time.Now().UTC(), HadClients: s.hadClients}
	if err := s.write(rec); err != nil {
		return notCaptured(err)
	}
	s.still()
	s.phase = capturing
	return nil
}

// notCaptured is the answer to an order that failed. Not Unavailable: the same
// again would stop the session once more for nothing.
func notCaptured(err error) error {
	if errors.Is(err, syscall.ENOSPC) {
		return apierr.Wrap(err, apierr.NoCapacity, "the host has no room on its disk to capture the session, which runs on")
	}
	if e := (*apierr.Error)(nil); errors.As(err, &e) {
		return err
	}
	return apierr.Wrap(err, apierr.Internal, "the host could not capture the session, which runs on")
}

// captureNow stops the machine and captures it.
func (s *live) captureNow(ctx context.Context, o hostlink.Capture) (out outcome) {
	began := time.Now()
	end := o.Deadline
	if end.IsZero() {
		end = began.Add(workTime)
	}
	ctx, cancel := context.WithDeadlineCause(ctx, end, errors.New("the operation's deadline has passed"))
	defer cancel()
	snap := &out.captured.Snapshot
	if k := s.kept(); k != nil && !o.Portable {
		*snap, out.err = s.captureMemory(ctx, k, o, &out.still)
	} else {
		out.still = began
		*snap, out.err = s.capturePortable(ctx, k, o)
	}
	snap.ID, snap.Host = o.SnapshotID, s.host.name
	out.captured.CaptureMs = time.Since(out.still).Milliseconds()
	return out
}

// captureMemory captures a machine with its memory. What can be done while it
// runs comes first. An agent that does not answer is no obstacle: a guest's root
// may have ended it, and the processors stop without it.
func (s *live) captureMemory(ctx context.Context, k machine.Kept, o hostlink.Capture, still *time.Time) (session.Snapshot, error) {
	step := newSteps("capture")
	defer step.log(s.log)
	d, err := s.host.snapshots.Draft(ctx, s.id, o)
	if err != nil {
		return session.Snapshot{}, err
	}
	defer s.closeDraft(d)
	if err := s.shipStill(ctx, k, d, o, step); err != nil {
		return session.Snapshot{}, err
	}
	*still = time.Now()
	fctx, cancel := context.WithTimeout(ctx, freezeTime)
	if err := s.guest.Agent.Freeze(fctx, agentlink.Freeze{}); err != nil {
		s.log.Warn("the agent did not freeze its processes; the machine is captured without", "error", err)
	}
	cancel()
	s.gate.set(false)
	step.done("agent")
	if err := k.Freeze(ctx); err != nil {
		return session.Snapshot{}, fmt.Errorf("freeze: %w", err)
	}
	step.done("stop")
	c, err := k.Capture(ctx)
	if err != nil {
		return session.Snapshot{}, fmt.Errorf("capture: %w", err)
	}
	step.done("devices")
	snap, err := d.Write(ctx, c)
	err = errors.Join(err, c.Close())
	step.done("write")
	return snap, err
}

// capturePortable stores what the agent exports. The agent goes with the
// machine, so what it has to tell is taken in first.
func (s *live) capturePortable(ctx context.Context, k machine.Kept, o hostlink.Capture) (snap session.Snapshot, err error) {
	fctx, cancel := context.WithTimeoutCause(ctx, exportFreezeTime, fmt.Errorf("no answer within %s", exportFreezeTime))
	defer cancel()
	if err := s.guest.Agent.Freeze(fctx, agentlink.Freeze{Portable: true}); err != nil {
		return snap, fmt.Errorf("freeze: %w", err)
	}
	s.gate.set(false)
	s.drainBeside(ctx)
	state, err := s.guest.Agent.Export(ctx, s.guest.Machine.Handle().Spec.DiskBytes+beyondDisk)
	if err != nil {
		return snap, err
	}
	snap, err = s.host.snapshots.WritePortable(ctx, s.id, o, state)
	if err = errors.Join(err, state.Close()); err == nil && k != nil {
		err = k.Freeze(ctx) // so that Chrome does nothing any more
	}
	return snap, err
}

// drainBeside is drain for a work: the owner takes the notices in.
func (s *live) drainBeside(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, drainTime)
	defer cancel()
	st, err := s.guest.Agent.State(ctx)
	if err == nil && st.LastNotice > 0 {
		_, err = s.ask(ctx, order{reach: st.LastNotice})
	}
	if err != nil {
		s.log.Warn("the agent's last events may be lost", "error", err)
	}
}

// captured takes in how a capture ended: the machine is held until the verdict,
// or goes on.
func (s *live) captured(out outcome) {
	err := out.err
	if err == nil {
		rec, op := s.rec, *s.rec.Op
		op.Captured = &out.captured
		rec.Op = &op
		if err = s.write(rec); err == nil { // before the answer: it makes a commit possible
			s.phase = held
			s.deaf()
			s.shutWay()
			s.answerTold()
			s.answer(answer{captured: out.captured})
			s.log.Info("session captured", "op", op.ID, "kind", op.Kind, "memory", out.captured.Snapshot.Memory,
				"bytes", out.captured.Snapshot.Bytes, "ms", out.captured.CaptureMs)
			return
		}
	}
	s.log.Warn("a capture failed; the session goes on", "op", s.rec.Op.ID, "error", err)
	s.answer(answer{err: notCaptured(err)})
	s.setGoing()
}
