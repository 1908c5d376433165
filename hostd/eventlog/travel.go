package eventlog

import (
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/store"
)

// A log goes with its session from host to host: the target takes the source's
// events in under the numbers they have (Begin, Add), and the source lets go of
// its copy once the record says that the session went (Leave).

// errGone answers readers of a log that left: they have to ask where it went.
var errGone = apierr.New(apierr.Unavailable, "the session went to another host; try again")

// Begin starts the log of a session that comes from another host, in place of
// whatever is here. notice is the highest of the agent's notices that are in
// the events to come; numbers up to used are never given again.
func (l *Log) Begin(sessionID string, notice, used uint64) error {
	return l.update(sessionID, func(tx *store.Tx) error {
		if err := tx.Drop(logs + "/" + sessionID); err != nil {
			return err
		}
		if err := tx.Skip(logs+"/"+sessionID, used); err != nil {
			return err
		}
		return tx.Put(heads, sessionID, head{Notice: notice})
	})
}

// Add appends events of another host's log, which keep their numbers. Those
// that are here already are passed over.
func (l *Log) Add(sessionID string, events []event.Event) error {
	return l.update(sessionID, func(tx *store.Tx) error {
		log := logs + "/" + sessionID
		for _, e := range events {
			if e.Seq <= tx.Last(log) {
				continue
			}
			if err := tx.Skip(log, e.Seq-1); err != nil {
				return err
			}
			if _, err := tx.Append(log, func(uint64) any { return e }); err != nil {
				return err
			}
		}
		_, err := tx.DropOldest(log, event.MaxPerSession)
		return err
	})
}

// SetNotice says that the session's machine is another one now, whose agent
// numbers its notices anew after n.
func (l *Log) SetNotice(sessionID string, n uint64) error {
	return l.update(sessionID, func(tx *store.Tx) error {
		var h head
		if _, err := tx.Get(heads, sessionID, &h); err != nil {
			return err
		}
		h.Notice = n
		return tx.Put(heads, sessionID, h)
	})
}

// Leave removes the events of a session that went to another host. Who follows
// them is cut, not told that the session has ended.
func (l *Log) Leave(sessionID string) error {
	return l.update(sessionID, func(tx *store.Tx) error {
		if err := tx.Drop(logs + "/" + sessionID); err != nil {
			return err
		}
		return tx.Put(heads, sessionID, head{Gone: time.Now().UTC()})
	})
}

func (l *Log) update(sessionID string, change func(*store.Tx) error) error {
	if err := l.db.Batch(change); err != nil {
		return err
	}
	l.wake(sessionID)
	return nil
}
