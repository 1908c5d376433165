package session

import (
	"context"
	"slices"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// reach is somebody who waits until the agent's notices up to n were taken.
type reach struct {
	n     uint64
	reply chan answer
}

// take handles what the agent told. Whoever has the machine may have the
// agent: nothing it says is believed beyond its own session, nor without bound.
func (s *live) take(n agentlink.Notice) {
	s.notice = n.N
	if n.Clients != nil && max(0, *n.Clients) != s.clients {
		s.count(agentlink.State{Clients: *n.Clients, HadClients: *n.Clients > 0})
		s.watchClients(session.DisconnectGrace)
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
	s.reached()
}

// reached answers those whose notices were taken.
func (s *live) reached() {
	s.reach = slices.DeleteFunc(s.reach, func(r reach) bool {
		if s.notice < r.n {
			return false
		}
		r.reply <- answer{}
		return true
	})
}

// drainTime bounds the wait for what the agent had to tell before its end.
const drainTime = 250 * time.Millisecond

// drain takes in what the agent told until now, so that the last command of a
// session that is released at once has its event too.
func (s *live) drain() {
	if s.guest == nil || s.phase == held {
		return // nobody there, or nobody who could answer
	}
	ctx, cancel := context.WithTimeout(s.ctx, drainTime)
	defer cancel()
	st, err := s.guest.Agent.State(ctx)
	for err == nil && s.notice < st.LastNotice {
		select {
		case n := <-s.heard:
			s.take(n)
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
	rec := s.rec
	rec.Setup = said.Status
	if said.Status == session.SetupFailed {
		rec.SetupErr = event.Cut(said.Error, maxSetupError)
	}
	if err := s.write(rec); err != nil {
		s.log.Warn("the end of setup is not in the book", "error", err)
		s.rec = rec
	}
	st := s.status()
	s.host.tell(hostlink.Notice{Status: &st})
}

// hear begins to listen to the agent; deaf ends it.
func (s *live) hear() {
	s.deaf()
	ctx, cancel := context.WithCancel(s.ctx)
	s.deaf = cancel
	s.host.owners.Go(func() { s.listen(ctx) })
}

// listen follows the agent's notices, from the last one stored, across broken
// connections, until ctx ends.
func (s *live) listen(ctx context.Context) {
	after := s.host.events.LastNotice(s.id)
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		for n, err := range s.guest.Agent.Notices(ctx, after) {
			if err != nil {
				if ctx.Err() == nil {
					s.log.Debug("the agent's notices broke off", "error", err)
				}
				break
			}
			wait, after = 50*time.Millisecond, n.N
			select {
			case s.heard <- n:
			case <-ctx.Done():
				return
			}
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}
