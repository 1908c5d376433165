package placement

import (
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// machineEnded is a host's word that a machine is gone. It ends the session
// only where that machine is the session: not while it is paused, nor for
// another epoch. While an operation is open that may yet decide it, the word is
// refused with operation_in_progress and has to come again.
func (c *change) machineEnded(d endSessionData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	switch {
	case s.Status.Ended():
		return Result{Session: s, Already: true}, nil
	case s.Op != nil && (d.Epoch == s.Op.Epoch && s.Op.To != "" || d.Epoch == s.Epoch && d.Error != ""):
		return Result{}, apierr.New(apierr.OperationInProgress, "the %s of session %s decides whether its machine was needed", s.Op.Kind, s.ID)
	case d.Epoch != s.Epoch || s.Status == session.Paused:
		return Result{}, apierr.Wrap(ErrStaleEpoch, apierr.SessionNotRunning, "the machine of epoch %d is not session %s any more", d.Epoch, s.ID)
	}
	return c.update(session.End(*s, d.At, d.Reason, d.Error))
}

func (c *change) openOperation(d openOperationData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	next, err := session.Open(*s, d.Operation, d.Key)
	if err == nil && d.Operation.Kind == session.Resume {
		err = c.roomForOne(s.ProjectID)
	}
	return c.update(next, err)
}

func (c *change) commitOperation(d commitOperationData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	next, verdict, err := session.Commit(*s, d.OpID, d.Snapshot, time.UnixMilli(c.cmd.At))
	return c.decide(next, verdict, err)
}

func (c *change) abortOperation(d abortOperationData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	next, verdict, err := session.Abort(*s, d.OpID)
	return c.decide(next, verdict, err)
}

func (c *change) decide(next session.Session, verdict bool, err error) (Result, error) {
	res, err := c.update(next, err)
	res.Verdict = verdict
	return res, err
}

func (c *change) snapshotDurable(d snapshotDurableData) (Result, error) {
	s, err := c.session(d.ID)
	if err != nil {
		return Result{}, err
	}
	if s.Snapshot == nil || s.Snapshot.ID != d.SnapshotID {
		return Result{Session: s, Already: true}, nil // another capture has come since
	}
	next, kept := *s, *s.Snapshot
	kept.Durable = true
	next.Snapshot = &kept
	return c.update(next, nil)
}
