package session

import (
	"errors"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
)

// ErrStale is in the chain of the error that refuses an operation made for an
// earlier state of the session: look again, and make another.
var ErrStale = errors.New("session: it has changed since")

// Open begins an operation. Another one that is open refuses it with
// operation_in_progress, whatever its deadline: only an abort ends it. A session
// that is not in the state the kind needs, or has ended, is session_not_running;
// one that has moved since the operation was made for it is ErrStale. A session
// of a time before keys gets the one given.
func Open(s Session, op Operation, key []byte) (Session, error) {
	if s.Status.Ended() {
		return s, ended(s)
	}
	if s.Op != nil {
		return s, apierr.New(apierr.OperationInProgress, "session %s is in the middle of a %s; try again when it is done", s.ID, s.Op.Kind).After(time.Second)
	}
	want, epoch := Running, s.Epoch+1
	switch op.Kind {
	case Pause:
		epoch = s.Epoch
	case Resume:
		want = Paused
	case Move:
	default:
		return s, apierr.New(apierr.Internal, "%q is no operation", op.Kind)
	}
	if s.Status != want {
		return s, apierr.New(apierr.SessionNotRunning, "session %s is %s: a %s needs it %s", s.ID, s.Status, op.Kind, want)
	}
	if op.Epoch != epoch || op.Kind != Resume && op.From != s.Host || op.Kind == Resume && (s.Snapshot == nil || op.SnapshotID != s.Snapshot.ID) {
		return s, apierr.Wrap(ErrStale, apierr.OperationInProgress, "session %s has moved meanwhile; try again", s.ID)
	}
	if len(s.Key) == 0 {
		s.Key = key
	}
	s.Op = &op
	return s, nil
}

// Commit makes what an operation did the session's state. snap is the capture
// of a pause or a move. verdict false: it was aborted before; then, as for one
// committed before, nothing changes. An operation that the session does not
// remember is ErrStale.
func Commit(s Session, opID string, snap *Snapshot, now time.Time) (_ Session, verdict bool, _ error) {
	if s.Status.Ended() {
		return s, false, ended(s)
	}
	if s.Op == nil || s.Op.ID != opID {
		return decided(s, opID)
	}
	op := *s.Op
	if snap != nil {
		s.Snapshot = snap
	}
	if s.Snapshot == nil || s.Snapshot.ID != op.SnapshotID {
		return s, false, apierr.New(apierr.Internal, "the %s of session %s ends without its snapshot", op.Kind, s.ID)
	}
	s.Op, s.LastOp = nil, &Verdict{op.ID, true}
	now = stamp(now)
	switch op.Kind {
	case Pause:
		s = pause(s, now)
	case Resume:
		s = resume(place(s, op, now), now)
	case Move:
		s = place(s, op, now)
		s.Moves++
	}
	return s, true, nil
}

// Abort ends an operation as if it had never been. committed true: it was
// committed before, and stays so.
func Abort(s Session, opID string) (_ Session, committed bool, _ error) {
	if s.Status.Ended() {
		return s, false, ended(s)
	}
	if s.Op == nil || s.Op.ID != opID {
		return decided(s, opID)
	}
	s.Op, s.LastOp = nil, &Verdict{opID, false}
	return s, false, nil
}

// decided gives the verdict of an operation that is over.
func decided(s Session, opID string) (_ Session, committed bool, _ error) {
	switch {
	case s.LastOp != nil && s.LastOp.OpID == opID:
		return s, s.LastOp.Committed, nil
	case s.PlacedBy == opID:
		return s, true, nil
	}
	return s, false, apierr.Wrap(ErrStale, apierr.OperationInProgress, "session %s has gone on since the operation", s.ID)
}

func pause(s Session, now time.Time) Session {
	if since, ok := span(s); ok {
		s.Spans = addSpan(s.Spans, since, now)
	}
	s.Before = Usage(s, now)
	s.Status, s.PausedAt, s.RunningSince = Paused, now, time.Time{}
	s.ExpiresAt = now.Add(PausedMax)
	return s
}

func resume(s Session, now time.Time) Session {
	s.ExpiresAt = now.Add(Remaining(s))
	s.Status, s.PausedAt, s.RunningSince = Running, time.Time{}, now
	s.SettingsVersion++ // the host has an earlier ExpiresAt
	return s
}

func place(s Session, op Operation, now time.Time) Session {
	s.Host, s.Epoch, s.PlacedBy, s.PlacedAt = op.To, op.Epoch, op.ID, now
	if op.Region != "" {
		s.Region = op.Region
	}
	return s
}

// SourceVerdict is what a host is to hear that holds the machine of an earlier
// epoch stopped, as the source of an operation that is no longer open. The
// placement tells, however long ago that was: where nothing was committed the
// session still runs there in that epoch.
func SourceVerdict(s Session, host string, epoch uint64) (committed bool) {
	return s.Status != Running || s.Host != host || s.Epoch != epoch
}

// TargetVerdict is the same for a target: its machine is the session's only if
// that very operation put the session there.
func TargetVerdict(s Session, opID string) (committed bool) {
	return s.Status == Running && s.PlacedBy == opID
}
