package session

import (
	"context"
	"errors"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
)

// End ends a session, or says how it had ended. A session this host never saw
// gets a tombstone too, so that an acquire still under way comes too late.
func (h *Host) End(ctx context.Context, t hostlink.Tombstone) (hostlink.Tombstone, error) {
	finish, err := h.claim(ctx, t.SessionID)
	if err != nil {
		return t, err
	}
	defer finish()
	if err := h.dropTarget(ctx, t); err != nil {
		return t, err
	}
	if s := h.find(t.SessionID); s != nil {
		if s.epoch > t.Epoch {
			return t, apierr.New(apierr.SessionNotRunning, "session %s runs here with a newer epoch", t.SessionID)
		}
		_, err := s.ask(ctx, order{end: &t})
		if err != nil && !errors.Is(err, errEnded) {
			return t, err
		}
		<-s.done
		if !s.tomb.EndedAt.IsZero() {
			return s.tomb, nil
		} // it went on from here that moment
	}
	return h.endGone(t)
}

// dropTarget ends a restore for a session that ends: one epoch further it has
// not begun.
func (h *Host) dropTarget(ctx context.Context, t hostlink.Tombstone) error {
	if _, err := h.callOff(ctx, t.SessionID, hostlink.Verdict{}); err != nil {
		return err
	}
	s := h.findTarget(t.SessionID)
	if s == nil || s.epoch > t.Epoch+1 {
		return nil
	}
	_, err := s.ask(ctx, order{drop: true})
	if errors.Is(err, errEnded) {
		err = nil
	}
	return err
}

// endGone ends a session that has no machine here: it ended before, is paused,
// or went on elsewhere, where its end is.
func (h *Host) endGone(t hostlink.Tombstone) (hostlink.Tombstone, error) {
	old, ok, err := h.tombstone(t.SessionID)
	if err != nil || ok && old.Epoch >= t.Epoch {
		return old, err
	}
	left, ok, err := h.book.Left(t.SessionID)
	if err != nil {
		return t, err
	}
	if ok && !left.paused() && left.Epoch >= t.Epoch {
		return t, apierr.New(apierr.SessionNotRunning, "session %s went to another host with a newer epoch", t.SessionID)
	}
	if err := h.book.End(t, ""); err != nil || !ok || !left.paused() {
		return t, err
	}
	h.finish(t)
	h.later("the snapshots of a session that has ended", t.SessionID, h.snapshots.DeleteSession)
	return t, nil
}

// gone is the error for a session that does not run here.
func (h *Host) gone(id string) error {
	if t, ok, err := h.tombstone(id); err != nil {
		return err
	} else if ok {
		return apierr.New(apierr.SessionNotRunning, "session %s has ended (%s%s)", id, t.Reason, t.Error)
	}
	if _, ok, err := h.book.Left(id); err != nil {
		return err
	} else if ok {
		return apierr.New(apierr.Unavailable, "session %s is paused or went to another host; ask the record", id)
	}
	return apierr.New(apierr.NotFound, "session %s is not on this host", id)
}
