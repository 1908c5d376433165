package session

import (
	"context"
	"errors"
	"fmt"
	"io"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Peer is another host, which holds what a restore here needs, or restores what
// is captured here.
type Peer interface {
	Baggage(ctx context.Context, id, snapshotID string) (hostlink.Baggage, error)
	Events(ctx context.Context, id string, after uint64, types []event.Type, limit int) (hostlink.EventPage, error)
	Snapshot(ctx context.Context, id string, have ...string) (io.ReadCloser, error)
	Parts(ctx context.Context, id string) ([]string, error)
	Ahead(ctx context.Context, id, opID string, in io.Reader) error
	Template(ctx context.Context, hash string) (io.ReadCloser, error)
	TemplateOf(ctx context.Context, id string) (hostlink.TemplateOf, error)
	Close()
}

// Baggage gives what goes with a session to the host that restores one of its
// snapshots. That somebody restores a snapshot of a pause says that the record
// has committed the pause, so a machine that still waits for that verdict has
// it now: whatever it would add to the log comes before the log is read.
func (h *Host) Baggage(ctx context.Context, id, snapshotID string) (hostlink.Baggage, error) {
	bag, ok, err := h.baggageHere(ctx, id, snapshotID)
	if err == nil && !ok {
		err = apierr.New(apierr.NotFound, "snapshot %s of session %s is not known on this host", snapshotID, id)
	}
	return bag, err
}

// baggageHere looks at the source of a move, and at what a pause left.
func (h *Host) baggageHere(ctx context.Context, id, snapshotID string) (bag hostlink.Baggage, ok bool, err error) {
	if s := h.find(id); s != nil {
		a, err := s.ask(ctx, order{})
		if op := a.rec.Op; err == nil && op != nil && op.SnapshotID == snapshotID && op.Captured != nil && !op.Going {
			if op.Kind == session.Move {
				return s.baggage(a.rec), true, nil
			}
			_, err = s.ask(ctx, order{verdict: &hostlink.Verdict{OpID: op.ID, Committed: true}})
		}
		if err != nil && !errors.Is(err, errEnded) {
			return bag, false, err
		}
	}
	l, ok, err := h.book.Left(id)
	if err != nil || !ok || l.SnapshotID != snapshotID {
		return bag, false, err
	}
	l.Baggage.LastSeq = h.events.Last(id)
	return l.Baggage, true, nil
}

// fetch brings what a restore needs to this host: snapshot, template, log.
// fetched says that log and snapshot were not here before.
func (h *Host) fetch(ctx context.Context, id string, o hostlink.Restore) (bag hostlink.Baggage, fetched bool, err error) {
	if err := h.fits(o.Snapshot); err != nil {
		return bag, false, err
	}
	bag, here, err := h.baggageHere(ctx, id, o.Snapshot.ID)
	if err != nil || here {
		return bag, false, err
	}
	if h.find(id) != nil {
		return bag, false, apierr.New(apierr.OperationInProgress, "session %s is on this host, and not for this snapshot", id).After(time.Second)
	}
	if o.From == "" {
		return bag, true, h.fetchLost(id, o.Snapshot)
	}
	peer := h.peers(o.From)
	defer peer.Close()
	bag, err = peer.Baggage(ctx, id, o.Snapshot.ID)
	if err == nil {
		err = h.fetchLog(ctx, peer, id, bag)
	}
	if err == nil && o.Snapshot.Memory && !h.keeper.HasTemplate(o.Snapshot.Template) {
		err = h.fetchTemplate(ctx, peer, o.Snapshot.Template)
	}
	if err == nil && !h.snapshots.Has(o.Snapshot.ID) {
		err = h.fetchSnapshot(ctx, peer, id, o.Snapshot.ID)
		if err != nil && o.Snapshot.Durable && ctx.Err() == nil { // it is loaded from the blob store
			h.log.Warn("a snapshot's host does not give it as it should be", "session", id, "snapshot", o.Snapshot.ID, "error", err)
			err = nil
		}
	}
	return bag, true, err
}

// fits says whether this host can go on with a snapshot at all; it is no use to
// ask it again.
func (h *Host) fits(s session.Snapshot) error {
	switch {
	case !s.Memory:
		return nil
	case h.keeper == nil || h.keeper.Name() != s.Driver:
		return apierr.New(apierr.Internal, "this host's machines cannot go on with a memory of driver %s", s.Driver)
	case h.keeper.CPUClass() != s.CPUClass:
		return apierr.New(apierr.Internal, "this host's processors differ from those that the memory comes from")
	}
	return nil
}

// fetchLost restores what is left of a session whose host is lost: its snapshot
// in the blob store, from which it is loaded. Its log is gone; the numbers of a new one begin above any
// that the old one can have had.
func (h *Host) fetchLost(id string, s session.Snapshot) error {
	if s.Memory && !h.keeper.HasTemplate(s.Template) {
		return apierr.New(apierr.Internal, "the template of the session's memory is not on this host")
	}
	return h.events.Begin(id, 0, aboveAll())
}

// aboveAll is a seq that no log has reached: the milliseconds since 1970 pass
// faster than events come, and are exact in JavaScript.
func aboveAll() uint64 { return uint64(time.Now().UnixMilli()) }

// fetchLog takes a session's events over, under their numbers.
func (h *Host) fetchLog(ctx context.Context, from Peer, id string, bag hostlink.Baggage) error {
	used := uint64(0)
	if bag.LastSeq == 0 { // the source lost its log
		used = aboveAll()
	}
	if err := h.events.Begin(id, bag.Notice, used); err != nil {
		return err
	}
	for after := uint64(0); after < bag.LastSeq; {
		page, err := from.Events(ctx, id, after, nil, event.MaxPage)
		if err != nil {
			return fmt.Errorf("fetch the events: %w", err)
		}
		if page.NextAfter <= after {
			return fmt.Errorf("fetch the events: they end at %d, not %d", after, bag.LastSeq)
		}
		if err := h.events.Add(id, page.Data); err != nil {
			return err
		}
		after = page.NextAfter
	}
	return nil
}

func (h *Host) fetchTemplate(ctx context.Context, from Peer, hash string) error {
	r, err := from.Template(ctx, hash)
	if err != nil {
		return fmt.Errorf("fetch the template: %w", err)
	}
	return errors.Join(h.keeper.AddTemplate(ctx, hash, r), r.Close())
}

func (h *Host) fetchSnapshot(ctx context.Context, from Peer, sessionID, id string) error {
	r, err := from.Snapshot(ctx, id, h.snapshots.Parts(sessionID)...)
	if err != nil {
		return fmt.Errorf("fetch the snapshot: %w", err)
	}
	return errors.Join(h.snapshots.Import(ctx, sessionID, id, r), r.Close())
}
