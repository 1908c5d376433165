package session

import (
	"time"

	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// buryAgain is how long a tombstone that the book refused waits.
const buryAgain = 2 * time.Second

// bury makes a session's end durable. When the book takes nothing (a full
// disk), the tombstone is kept in memory and tried again: the machine's end
// must not wait for it, for that may be what frees the disk. Only owners call
// it.
func (h *Host) bury(t hostlink.Tombstone, machineID string) {
	err := h.book.End(t, machineID)
	if err == nil {
		return
	}
	h.log.Error("a tombstone could not be written; trying again", "session", t.SessionID, "error", err)
	h.mu.Lock()
	h.unwritten[t.SessionID] = t
	h.mu.Unlock()
	h.owners.Go(func() {
		for h.book.End(t, machineID) != nil {
			select {
			case <-h.ctx.Done(): // the next hostd finds a session without a machine
				return
			case <-time.After(buryAgain):
			}
		}
		h.mu.Lock()
		delete(h.unwritten, t.SessionID)
		h.mu.Unlock()
	})
}

// tombstone finds how a session ended here.
func (h *Host) tombstone(id string) (hostlink.Tombstone, bool, error) {
	h.mu.Lock()
	t, ok := h.unwritten[id]
	h.mu.Unlock()
	if ok {
		return t, true, nil
	}
	return h.book.Tombstone(id)
}

// tombstones are those not yet acknowledged.
func (h *Host) tombstones() ([]hostlink.Tombstone, error) {
	h.mu.Lock() // before the book: one that moves there meanwhile shows twice, which does no harm
	all := make([]hostlink.Tombstone, 0, len(h.unwritten))
	for _, t := range h.unwritten {
		all = append(all, t)
	}
	h.mu.Unlock()
	written, err := h.book.Tombstones()
	return append(all, written...), err
}

// finish writes the last event of a session and closes its log.
func (h *Host) finish(t hostlink.Tombstone) {
	state, level, text := session.Completed, "", "Session ended: "+string(t.Reason)
	if t.Error != "" {
		state, level, text = session.Error, "error", t.Error
	}
	err := h.events.Finish(t.SessionID, event.Event{At: t.EndedAt, Type: event.Lifecycle, Level: level, Text: text,
		Data: mustJSON(map[string]any{"state": state, "reason": t.Reason})})
	if err != nil {
		h.log.Warn("the event log could not be closed; the next start closes it", "session", t.SessionID, "error", err)
	}
}
