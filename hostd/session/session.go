// Package session runs the sessions of one host: one goroutine owns one
// session, from the machine it was given to the tombstone it leaves.
package session

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"slices"
	"time"

	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// live is a session that runs here. Its run goroutine owns the fields from rec
// on; others send it orders or ask for its status. Those above never change.
type live struct {
	host  *Host
	guest *pool.Guest
	log   *slog.Logger
	id    string
	epoch uint64

	orders chan order              // patch, end, status
	heard  chan agentlink.Notice   // what the agent told
	done   chan struct{}           // closed when the tombstone is written
	cancel context.CancelCauseFunc // ends the listener
	ctx    context.Context

	rec        Record
	clients    int
	hadClients bool
	notice     uint64             // number of the last notice taken
	tomb       hostlink.Tombstone // valid after done
}

// order is one request to the owner: exactly one of settings and end is set,
// or neither to ask for the status. reply has room for one.
type order struct {
	settings *hostlink.Settings
	end      *hostlink.Tombstone
	reply    chan answer
}

type answer struct {
	status hostlink.Status
	err    error
}

var errEnded = errors.New("the session has ended")

func newLive(h *Host, g *pool.Guest, rec Record, st agentlink.State) *live {
	ctx, cancel := context.WithCancelCause(h.ctx)
	return &live{host: h, guest: g, rec: rec, id: rec.Acquire.SessionID, epoch: rec.Acquire.Epoch, clients: st.Clients, hadClients: st.HadClients,
		log:    h.log.With("session", rec.Acquire.SessionID, "machine", g.Machine.ID()),
		orders: make(chan order), heard: make(chan agentlink.Notice), done: make(chan struct{}), ctx: ctx, cancel: cancel}
}

// run owns the session until it ends here.
func (s *live) run() {
	defer s.cancel(errEnded)
	s.host.owners.Go(s.listen)
	deadline := time.NewTimer(time.Until(s.rec.Acquire.ExpiresAt))
	defer deadline.Stop()
	left := time.NewTimer(time.Hour) // fires when the last client has been away long enough
	left.Stop()
	defer left.Stop()
	s.notice = s.host.events.LastNotice(s.id)
	s.watchClients(left)
	for {
		select {
		case <-s.ctx.Done(): // hostd stops; the session goes on without it
			return
		case <-s.guest.Machine.Done():
			s.end(hostlink.Tombstone{EndedAt: time.Now(), Error: "The session's machine ended unexpectedly."})
			return
		case <-deadline.C:
			s.end(hostlink.Tombstone{EndedAt: s.rec.expired(), Reason: session.TimedOut})
			return
		case <-left.C:
			s.end(hostlink.Tombstone{EndedAt: time.Now(), Reason: session.Disconnected})
			return
		case n := <-s.heard:
			s.take(n, left)
		case o := <-s.orders:
			if o.end != nil {
				s.drain(left)
				s.end(*o.end)
				o.reply <- answer{}
				return
			}
			if o.settings != nil {
				o.reply <- answer{err: s.patch(*o.settings)}
				deadline.Reset(time.Until(s.rec.Acquire.ExpiresAt))
				s.watchClients(left)
				continue
			}
			o.reply <- answer{status: s.status()}
		}
	}
}

func (s *live) status() hostlink.Status {
	return hostlink.Status{SessionID: s.id, Epoch: s.epoch, Since: s.rec.Since,
		Warm: s.rec.Warm, Clients: s.clients, Setup: s.rec.Setup, SetupErr: s.rec.SetupErr, Version: s.rec.Acquire.Version}
}

// watchClients starts or stops the clock of "last client left" (spec lifetime
// rules 2 and 3).
func (s *live) watchClients(left *time.Timer) {
	counts := s.rec.Acquire.Kind == session.Browser && !s.rec.Acquire.KeepAlive
	if counts && s.hadClients && s.clients == 0 {
		left.Reset(session.DisconnectGrace)
	} else {
		left.Stop()
	}
}

// take handles what the agent told. Whoever has the machine may have the
// agent: nothing it says is believed beyond its own session, nor without bound.
func (s *live) take(n agentlink.Notice, left *time.Timer) {
	s.notice = n.N
	if n.Clients != nil && max(0, *n.Clients) != s.clients {
		s.clients = max(0, *n.Clients)
		s.hadClients = s.hadClients || s.clients > 0
		s.watchClients(left)
	}
	if n.Setup != nil {
		s.setupEnded(*n.Setup)
	}
	if n.Event != nil && slices.Contains(event.AllTypes, n.Event.Type) {
		e := *n.Event
		if now := time.Now(); e.At.Before(s.rec.Since) || e.At.After(now.Add(time.Minute)) {
			e.At = now
		}
		if err := s.host.events.AppendNotice(s.id, n.N, e); err != nil {
			s.log.Warn("an event was lost", "error", err)
		}
	}
}

// drainTime bounds the wait for what the agent had to tell before an end.
const drainTime = 250 * time.Millisecond

// drain takes in what the agent told until now, so that the last command of a
// session that is released at once has its event too.
func (s *live) drain(left *time.Timer) {
	ctx, cancel := context.WithTimeout(s.ctx, drainTime)
	defer cancel()
	st, err := s.guest.Agent.State(ctx)
	for err == nil && s.notice < st.LastNotice {
		select {
		case n := <-s.heard:
			s.take(n, left)
		case <-ctx.Done():
			return
		}
	}
}

// maxSetupError bounds the setup error that goes into the record, in bytes.
const maxSetupError = 4 << 10

// setupEnded takes over how setup ended: once, and only where it was asked for.
func (s *live) setupEnded(said agentlink.Setup) {
	if s.rec.Setup != session.SetupRunning || said.Status != session.SetupDone && said.Status != session.SetupFailed {
		return
	}
	s.rec.Setup = said.Status
	if said.Status == session.SetupFailed {
		s.rec.SetupErr = event.Cut(said.Error, maxSetupError)
	}
	if err := s.host.book.PutSession(s.rec); err != nil {
		s.log.Warn("the end of setup is not in the book", "error", err)
	}
	st := s.status()
	s.host.tell(hostlink.Notice{Status: &st})
}

// listen follows the agent's notices, from the last one stored, across broken
// connections, until the session ends.
func (s *live) listen() {
	after := s.host.events.LastNotice(s.id)
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		for n, err := range s.guest.Agent.Notices(s.ctx, after) {
			if err != nil {
				if s.ctx.Err() == nil {
					s.log.Debug("the agent's notices broke off", "error", err)
				}
				break
			}
			wait, after = 50*time.Millisecond, n.N
			select {
			case s.heard <- n:
			case <-s.ctx.Done():
				return
			}
		}
		select {
		case <-s.ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (s *live) patch(set hostlink.Settings) error {
	if set.Version <= s.rec.Acquire.Version {
		return nil // an older order that came late
	}
	rec := s.rec
	rec.Acquire.Settings, rec.Patched = set, time.Now().UTC()
	if err := s.host.book.PutSession(rec); err != nil {
		return err
	}
	s.rec = rec
	return nil
}

// end writes the tombstone, tells the watchers and takes the machine down. The
// tombstone is durable first: whatever dies after it, the session is over.
func (s *live) end(t hostlink.Tombstone) {
	t.SessionID, t.Epoch = s.id, s.epoch
	s.host.bury(t, s.rec.MachineID)
	s.tomb = t
	s.host.finish(t)
	close(s.done)
	s.host.forget(s)
	s.host.tell(hostlink.Notice{Ended: &t})
	s.log.Info("session ended", "reason", t.Reason, "error", t.Error)
	s.host.discard(s.guest)
}

// ask sends an order to the owner and waits for its answer.
func (s *live) ask(ctx context.Context, o order) (hostlink.Status, error) {
	o.reply = make(chan answer, 1)
	select {
	case s.orders <- o:
	case <-s.done:
		return hostlink.Status{}, errEnded
	case <-s.ctx.Done():
		select {
		case <-s.done: // the owner's end also ends its context
			return hostlink.Status{}, errEnded
		default:
			return hostlink.Status{}, stopping()
		}
	case <-ctx.Done():
		return hostlink.Status{}, context.Cause(ctx)
	}
	a := <-o.reply // the owner answers every order it took
	return a.status, a.err
}

func mustJSON(v any) json.RawMessage {
	b, err := json.Marshal(v)
	if err != nil {
		panic(err) // plain maps of strings and numbers cannot fail
	}
	return b
}
