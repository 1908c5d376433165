package sessions

import (
	"context"
	"strings"
	"time"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// abortOverdue aborts the operations whose time is over, and those that an
// earlier run of this gateway left: nobody drives them any more.
func (s *Service) abortOverdue(ctx context.Context, now time.Time) {
	for _, found := range s.record.View().Operations() {
		if now.Before(found.Op.Deadline) && !s.orphan(*found.Op) {
			continue
		}
		_, committed, err := s.record.AbortOperation(ctx, found.ID, found.Op.ID)
		if err != nil {
			s.log.Warn("an overdue operation is aborted later", "operation", found.Op.ID, "session", found.ID, "error", err)
			continue
		}
		if !committed {
			s.log.Warn("operation aborted: nobody brought it to an end", "operation", found.Op.ID, "kind", found.Op.Kind, "session", found.ID)
			s.background(func(ctx context.Context) { s.tellAborted(ctx, found.ID, *found.Op) })
		}
	}
}

func (s *Service) orphan(op session.Operation) bool {
	name, _, ok := strings.Cut(op.By, runMark)
	return ok && name == s.cfg.Name && op.By != s.run
}

// expirePaused ends the sessions that have been paused for too long.
func (s *Service) expirePaused(ctx context.Context, now time.Time) {
	for _, found := range s.record.View().PausedOver(now) {
		s.endPaused(ctx, found, found.ExpiresAt, session.PausedExpired, "")
	}
}

// losePaused ends a paused session whose only snapshot went with its host.
func (s *Service) losePaused(ctx context.Context, found session.Session, at time.Time) {
	s.endPaused(ctx, found, at, "", "The session was lost: the host that kept its snapshot is gone, before the snapshot was in the blob store.")
}

func (s *Service) endPaused(ctx context.Context, found session.Session, at time.Time, reason session.EndReason, text string) {
	ended, already, err := s.record.EndSession(ctx, found.ID, found.Epoch, at, reason, text)
	switch {
	case err != nil:
		s.log.Warn("a paused session is ended later", "session", found.ID, "error", err)
	case !already:
		s.closeLog(found, ended)
		s.background(func(ctx context.Context) { s.dropSnapshot(ctx, found.ID, *found.Snapshot) })
	}
}

// ofOperation looks at a machine in an inventory that an operation put there
// or holds, and has its host told the verdict if there is one. false: it is an
// ordinary machine.
func (s *Service) ofOperation(ctx context.Context, host string, c *hostlink.Client, st hostlink.Status, found session.Session) bool {
	if st.Held == nil {
		// About to be held: the record is newer than the inventory.
		return found.Op != nil && (found.Op.From == host || found.Op.To == host) ||
			found.Status == session.Paused && found.Host == host && found.Epoch == st.Epoch
	}
	if found.Op != nil && found.Op.ID == st.Held.OpID {
		return true
	}
	v := hostlink.Verdict{OpID: st.Held.OpID}
	if st.Held.Role == hostlink.Target {
		v.Committed = session.TargetVerdict(found, v.OpID)
	} else {
		v.Committed = session.SourceVerdict(found, host, st.Epoch)
	}
	s.tellSoon(ctx, host, c, found.ID, v)
	return true
}

// compareSnapshots deletes the snapshots that no session needs on this host,
// and notes those that have reached the blob store. An inventory is older than
// the view, so the operation of every snapshot in it is known to the view.
func (s *Service) compareSnapshots(ctx context.Context, host string, c *hostlink.Client, inv hostlink.Inventory, view *placement.View) {
	for _, id := range inv.Snapshots {
		if found, ok := view.SessionOfSnapshot(id); ok && needsSnapshot(found, host) {
			continue
		}
		s.log.Info("deleting a snapshot that nothing refers to", "snapshot", id, "host", host)
		_ = s.deleteSnapshot(ctx, host, c, id, "") // the next inventory has it again
	}
	for _, id := range inv.Durable {
		found, ok := view.SessionOfSnapshot(id)
		if !ok || found.Snapshot == nil || found.Snapshot.ID != id || found.Snapshot.Durable {
			continue
		}
		if err := s.record.SnapshotDurable(ctx, found.ID, id); err != nil {
			s.log.Warn("a durable snapshot is noted later", "snapshot", id, "error", err)
		}
	}
}

func (s *Service) deleteSnapshot(ctx context.Context, host string, c *hostlink.Client, id, sessionID string) error {
	ctx, cancel := context.WithTimeout(ctx, s.pace.tell)
	defer cancel()
	err := c.DeleteSnapshot(ctx, id, sessionID)
	if err != nil {
		s.log.Warn("a snapshot is deleted later", "snapshot", id, "host", host, "error", err)
	}
	return err
}

// needsSnapshot says whether a session needs its snapshot on a host: while it is
// paused or changing, wherever that is, for deleting one takes it from the
// blob store too; while it runs, only beside its machine, whose next capture
// holds only what has changed since.
func needsSnapshot(found session.Session, host string) bool {
	return found.Op != nil || found.Status == session.Paused || found.Host == host
}

// placedAt is when a session came to where it is.
func placedAt(found session.Session) time.Time {
	if found.PlacedAt.After(found.StartedAt) {
		return found.PlacedAt
	}
	return found.StartedAt
}

// UndoTime is what the cluster's leader usually has, past an operation's
// deadline, to undo it: a host takes the verdict, and its machine goes on.
const UndoTime = 30 * time.Second

// OutlastOperation waits for the next change of a session with an open
// operation. One that is open undo after its deadline has no leader to abort
// it: unavailable.
func OutlastOperation(ctx context.Context, now session.Session, changed <-chan struct{}, undo time.Duration) error {
	overdue := time.NewTimer(time.Until(now.Op.Deadline) + undo)
	defer overdue.Stop()
	select {
	case <-changed:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-overdue.C:
		return apierr.New(apierr.Unavailable, "the %s of session %s is overdue, and the cluster's record takes no verdict at the moment; try again soon",
			now.Op.Kind, now.ID).After(time.Second)
	}
}
