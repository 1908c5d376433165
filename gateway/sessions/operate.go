package sessions

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"time"

	"github.com/google/uuid"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// operation is one pause, resume or move on its way from open to verdict. Its
// steps go on when the client that asked for it has left.
type operation struct {
	s       *Service
	found   session.Session // as it was opened
	op      session.Operation
	timings Timings
	told    uint64 // version of the settings that the target got with its order

	ctx  context.Context // ends at the deadline, and when the record has decided
	stop context.CancelFunc
}

// verdictTime is what of an operation's time is kept for its verdict.
const verdictTime = 5 * time.Second

// open begins an operation in the record.
func (s *Service) open(ctx context.Context, found session.Session, op session.Operation) (*operation, error) {
	ctx = context.WithoutCancel(ctx)
	now := time.Now().UTC().Truncate(time.Millisecond)
	op.ID, op.By, op.StartedAt, op.Deadline = uuid.NewString(), s.run, now, now.Add(s.cfg.OperationDeadline)
	if op.SnapshotID == "" {
		op.SnapshotID = op.ID
	}
	o := &operation{s: s, found: found, op: op}
	err := s.step("open")
	if err == nil {
		o.found, err = s.record.OpenOperation(ctx, found.ID, op, newKey())
	}
	if err == nil {
		err = s.step("opened")
	}
	if err != nil {
		if apierr.Is(err, apierr.Unavailable) { // it may be in the log all the same
			_, _, _ = s.record.AbortOperation(ctx, found.ID, op.ID)
		}
		return nil, fmt.Errorf("%s: %w", op.Kind, err)
	}
	s.log.Info("operation opened", "operation", op.ID, "kind", op.Kind, "session", found.ID, "from", op.From, "to", op.To, "portable", op.Portable)
	o.ctx, o.stop = o.while(ctx)
	return o, nil
}

// newKey makes what seals a session's snapshots.
func newKey() []byte {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails since Go 1.24
	return key
}

// while gives a context for the steps before the verdict.
func (o *operation) while(ctx context.Context) (context.Context, context.CancelFunc) {
	total := o.op.Deadline.Sub(o.op.StartedAt)
	ctx, cancelTime := context.WithDeadlineCause(ctx, o.op.Deadline.Add(-min(verdictTime, total/4)),
		apierr.New(apierr.Timeout, "the %s was not done within %s and was undone; try again", o.op.Kind, total))
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			now, ok, changed := o.s.record.View().WatchSession(o.found.ID)
			if !ok || now.Op == nil || now.Op.ID != o.op.ID {
				cancel(calledOff(now, o.op))
				return
			}
			select {
			case <-changed:
			case <-ctx.Done():
				return
			}
		}
	}()
	return ctx, func() { cancel(context.Canceled); <-done; cancelTime() }
}

// calledOff says why an operation is over that did not come to its end.
func calledOff(now session.Session, op session.Operation) error {
	if err := running(now); err != nil {
		return err
	}
	if op.Kind == session.Pause {
		return apierr.New(apierr.OperationInProgress, "the pause was called off: a request came that needs the session running")
	}
	return apierr.New(apierr.OperationInProgress, "the %s was called off: it took too long; try again", op.Kind)
}

// prepare asks the target of a move to keep a place, while the session runs on.
func (o *operation) prepare() error {
	order := hostlink.Prepare{OpID: o.op.ID, Kind: o.found.Kind, Memory: !o.op.Portable, From: o.address(o.op.From), Key: o.found.Key, Deadline: o.op.Deadline}
	_, err := ask(o, "prepare", o.op.To, func(ctx context.Context, c *hostlink.Client) (struct{}, error) {
		return struct{}{}, c.Prepare(ctx, o.found.ID, order)
	})
	return err
}

// capture stops and captures the machine at the source.
func (o *operation) capture() (session.Snapshot, error) {
	o.remind(o.op.From)
	order := hostlink.Capture{OpID: o.op.ID, Kind: o.op.Kind, Epoch: o.found.Epoch, SnapshotID: o.op.SnapshotID, Key: o.found.Key,
		Portable: o.op.Portable, Durable: o.s.cfg.PauseDurable && o.op.Kind == session.Pause, Deadline: o.op.Deadline}
	if o.found.Snapshot != nil {
		order.Previous = o.found.Snapshot.ID
	}
	if o.op.Kind == session.Move && o.op.To != o.op.From && !o.op.Portable {
		order.To = o.listens(o.op.To)
	}
	done, err := ask(o, "capture", o.op.From, func(ctx context.Context, c *hostlink.Client) (hostlink.Captured, error) {
		return c.Capture(ctx, o.found.ID, order)
	})
	if err == nil && done.Snapshot.ID != order.SnapshotID {
		err = apierr.New(apierr.Internal, "host %s captured %q, not %q", o.op.From, done.Snapshot.ID, order.SnapshotID)
	}
	o.timings.Capture = time.Duration(done.CaptureMs) * time.Millisecond
	return done.Snapshot, err
}

// remind tells a host the verdict of the operation before: it may not have
// heard it yet, and hold a machine for it.
func (o *operation) remind(host string) {
	if last := o.found.LastOp; last != nil {
		o.s.tell(o.ctx, host, o.found.ID, hostlink.Verdict{OpID: last.OpID, Committed: last.Committed})
	}
}

// restore makes the machine at the target from a snapshot.
func (o *operation) restore(snap session.Snapshot) error {
	o.remind(o.op.To)
	s := o.found
	if now, ok := o.s.record.View().Session(s.ID); ok {
		s = now // settings may have changed since it was opened
	}
	set, err := o.s.settings(s, o.op.Epoch)
	if err != nil {
		return err
	}
	o.told = set.Version
	order := hostlink.Restore{OpID: o.op.ID, Kind: o.op.Kind, Snapshot: snap, Key: s.Key, From: o.address(snap.Host), Deadline: o.op.Deadline,
		Acquire: hostlink.Acquire{SessionID: s.ID, ProjectID: s.ProjectID, Epoch: o.op.Epoch, Kind: s.Kind, Viewport: s.Viewport, Settings: set}}
	if o.op.Kind == session.Resume { // the record sets it at the commit, and the host hears it then
		order.Acquire.ExpiresAt = time.Now().UTC().Add(session.Remaining(s))
	}
	done, err := ask(o, "restore", o.op.To, func(ctx context.Context, c *hostlink.Client) (hostlink.Restored, error) {
		return c.Restore(ctx, s.ID, order)
	})
	o.timings.Acquire = time.Duration(done.AcquireMs) * time.Millisecond
	o.timings.Restore = time.Duration(done.RestoreMs) * time.Millisecond
	return err
}

// address is where the target finds the snapshot; empty when it is its own, or
// only the blob store has it.
func (o *operation) address(holder string) string {
	if holder == o.op.To {
		return ""
	}
	return o.listens(holder)
}

// listens is a host's host link address, empty of one that is not known.
func (o *operation) listens(host string) string {
	return o.s.host(host).Addr
}

// ask gives a host an order until it answers: one that cannot be reached may
// be restarting. The same order again does nothing twice.
func ask[T any](o *operation, step, host string, order func(context.Context, *hostlink.Client) (T, error)) (answer T, err error) {
	if err := o.s.step(step); err != nil {
		return answer, err
	}
	err = patiently(o.ctx, o.s.pace.host, func() error {
		c, err := o.s.hosts.Client(host)
		if err == nil {
			answer, err = order(o.ctx, c)
		}
		return err
	})
	if err == nil {
		err = o.s.step(step + "d")
	}
	return answer, err
}

// patiently does something again while it is unavailable and patience lasts.
func patiently(ctx context.Context, patience time.Duration, do func() error) error {
	const first, most = 20 * time.Millisecond, 500 * time.Millisecond
	deadline := time.Now().Add(patience)
	for wait := first; ; wait = min(2*wait, most) {
		err := do()
		if !apierr.Is(err, apierr.Unavailable) || time.Now().Add(wait).After(deadline) || ctx.Err() != nil {
			return err
		}
		if err := waitFor(ctx, wait); err != nil {
			return err
		}
	}
}

// errDied is a test's gateway that dies at a step: nothing of what would come
// after is done.
var errDied = errors.New("the gateway died")

// step is where tests let the gateway die.
func (s *Service) step(name string) error {
	if s.onStep == nil {
		return nil
	}
	return s.onStep(name)
}
