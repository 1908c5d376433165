package sessions

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

const (
	rewatchMax = 2 * time.Second
	// leaveTime is for work behind answers when the gateway leaves; what is not
	// done then, the next leader does.
	leaveTime = 5 * time.Second
)

// Run keeps record and hosts in step until ctx ends: it follows every living
// host's notices, compares inventories from time to time, and gives sessions
// of lost hosts up. Only the leader orders anything.
func (s *Service) Run(ctx context.Context) error {
	var following sync.WaitGroup
	defer s.after.wait(leaveTime)
	defer following.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	hosts := map[string]*watched{}
	tick := time.NewTicker(s.pace.look)
	defer tick.Stop()
	for {
		changed := s.hosts.Changed()
		now := time.Now()
		for _, h := range s.hosts.List() {
			w := hosts[h.Name]
			if w == nil {
				w = &watched{}
				hosts[h.Name] = w
			}
			w.seen = now
			if w.stop == nil {
				hctx, stop := context.WithCancel(ctx)
				w.stop = stop
				following.Go(func() { s.follow(hctx, h.Name) })
			}
		}
		if s.record.Leader() {
			s.abortOverdue(ctx, now)
			s.expirePaused(ctx, now)
			s.giveUp(ctx, hosts, now)
		}
		s.forgetHosts(hosts, now)
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-changed:
		case <-tick.C:
		}
	}
}

// watched is a host that this gateway has heard of. Run's goroutine owns it.
type watched struct {
	seen time.Time          // when gossip last had it
	stop context.CancelFunc // ends its follower; nil while it has none
}

// giveUp ends the running sessions of hosts that have been away too long, as of
// when they were last seen. The paused ones have longer: their snapshots are on the
// host's disk, and come back with it after a reboot or a repair. A host this gateway has not seen yet counts from
// the first look.
func (s *Service) giveUp(ctx context.Context, hosts map[string]*watched, now time.Time) {
	view := s.record.View()
	for _, name := range view.HostNames() {
		w := hosts[name]
		if w == nil {
			w = &watched{seen: now}
			hosts[name] = w
		}
		away := now.Sub(w.seen) >= s.cfg.HostLostAfter
		gone := now.Sub(w.seen) >= max(s.cfg.HostLostAfter, s.cfg.PausedLostAfter)
		for _, found := range view.SessionsOnHost(name) {
			switch {
			case found.Op != nil && away:
				// Its operation ends at its deadline at the latest; then it is clear
				// where the session is.
			case gone && found.Status == session.Paused && !found.Snapshot.Durable:
				s.losePaused(ctx, found, w.seen)
			case away && found.Status == session.Running:
				s.finish(ctx, hostlink.Tombstone{SessionID: found.ID, Epoch: found.Epoch, EndedAt: w.seen,
					Error: "The session's host was lost."})
			case found.Status == session.Running && now.Sub(found.ExpiresAt) >= s.cfg.HostLostAfter:
				// Its host lives and should have ended it: one that hangs must not
				// make a session eternal.
				s.finish(ctx, hostlink.Tombstone{SessionID: found.ID, Epoch: found.Epoch, EndedAt: found.ExpiresAt,
					Reason: session.TimedOut})
			}
		}
	}
}

// forgetHosts drops hosts that have been away too long and have no sessions:
// in a cluster that grows and shrinks their names would gather.
func (s *Service) forgetHosts(hosts map[string]*watched, now time.Time) {
	for name, w := range hosts {
		if now.Sub(w.seen) < s.cfg.HostLostAfter {
			continue
		}
		if w.stop != nil {
			w.stop()
			w.stop = nil
		}
		if len(s.record.View().SessionsOnHost(name)) == 0 {
			delete(hosts, name)
		}
	}
}

// follow listens to one host until ctx ends; between connections it waits,
// twice as long each time.
func (s *Service) follow(ctx context.Context, host string) {
	const first = 50 * time.Millisecond
	for wait := first; ctx.Err() == nil; wait = min(2*wait, rewatchMax) {
		if c, err := s.hosts.Client(host); err == nil {
			err = s.listen(ctx, host, c, func() { wait = first })
			if ctx.Err() == nil {
				s.log.Debug("the watch of a host broke off", "host", host, "error", err)
			}
		}
		select {
		case <-ctx.Done():
		case <-time.After(wait):
		}
	}
}

// listen handles one connection's notices.
func (s *Service) listen(ctx context.Context, host string, c *hostlink.Client, alive func()) error {
	dialled := time.Now()
	next := dialled.Add(s.pace.reconcile)
	for n, err := range c.Watch(ctx) {
		if err != nil {
			return err
		}
		alive()
		switch {
		case n.Ended != nil:
			s.bury(ctx, c, []hostlink.Tombstone{*n.Ended})
		case n.Status != nil:
			s.learn(ctx, *n.Status)
		case n.Inventory != nil:
			s.compare(ctx, host, c, *n.Inventory, dialled)
		case n.Ping && time.Now().After(next):
			asked := time.Now()
			next = asked.Add(s.pace.reconcile)
			inv, err := c.Inventory(ctx)
			if err != nil {
				return err
			}
			s.compare(ctx, host, c, inv, asked)
		}
	}
	return errors.New("the host ended the watch")
}

// bury takes tombstones into the record, and then lets the host forget them.
func (s *Service) bury(ctx context.Context, c *hostlink.Client, tombs []hostlink.Tombstone) {
	if !s.record.Leader() {
		return
	}
	young := s.young(time.Now())
	var done []string
	for _, t := range tombs {
		if _, ok := s.record.View().Session(t.SessionID); !ok && t.EndedAt.After(young) {
			continue // its create may be about to reach the record: the next inventory brings it again
		}
		if s.finish(ctx, t) {
			done = append(done, t.SessionID)
		}
	}
	if len(done) == 0 {
		return
	}
	if err := c.Ack(ctx, done); err != nil {
		s.log.Debug("tombstones are acknowledged later", "error", err)
	}
}

// finish brings the record to the end of a session whose machine is gone, and
// says whether that is settled.
func (s *Service) finish(ctx context.Context, t hostlink.Tombstone) bool {
	_, _, err := s.record.MachineEnded(ctx, t.SessionID, t.Epoch, t.EndedAt, t.Reason, t.Error)
	if err == nil || errors.Is(err, placement.ErrStaleEpoch) || apierr.Is(err, apierr.NotFound) {
		s.hosts.Forget(t.SessionID)
		return true
	}
	if apierr.Is(err, apierr.OperationInProgress) {
		return false
	}
	s.log.Warn("a session's end is not in the record yet", "session", t.SessionID, "error", err)
	return false
}

// learn takes over what a host says of a running session.
func (s *Service) learn(ctx context.Context, st hostlink.Status) {
	found, ok := s.record.View().Session(st.SessionID)
	if !ok || !s.record.Leader() || found.Status.Ended() || found.SetupStatus != session.SetupRunning ||
		st.Setup != session.SetupDone && st.Setup != session.SetupFailed {
		return // setup ends once: late news must not undo it
	}
	if _, err := s.record.SetSetup(ctx, st.SessionID, st.Setup, st.SetupErr); err != nil {
		s.log.Warn("progress of setup is not in the record yet", "session", st.SessionID, "error", err)
	}
}

// young is since when a session or machine may be half a create under way.
func (s *Service) young(asOf time.Time) time.Time { return asOf.Add(-s.cfg.CreateDeadline - undoTime) }

// compare brings the record and a host's inventory, no older than asOf,
// together. The barrier comes before the look at the record, and what is
// younger than a create may take is left alone: its other half may be under way.
func (s *Service) compare(ctx context.Context, host string, c *hostlink.Client, inv hostlink.Inventory, asOf time.Time) {
	s.bury(ctx, c, inv.Tombstones)
	if !s.record.Leader() {
		return
	}
	if err := s.record.Fresh(ctx, 0); err != nil {
		s.log.Debug("no comparison without the record", "host", host, "error", err)
		return
	}
	young := s.young(asOf)
	view := s.record.View()
	running := make(map[string]bool, len(inv.Sessions))
	for _, st := range inv.Sessions {
		running[st.SessionID] = true
		found, ok := view.Session(st.SessionID)
		if ok && !found.Status.Ended() && s.ofOperation(ctx, host, c, st, found) {
			continue
		}
		if !ok || found.Status.Ended() || found.Host != host || found.Epoch > st.Epoch {
			if ok || st.Since.Before(young) {
				s.endStray(ctx, host, st, found)
			}
			continue
		}
		s.learn(ctx, st)
		if st.Version < found.SettingsVersion || passDue(st.PassExpires, time.Now()) {
			s.spread(ctx, found)
		}
	}
	for _, found := range view.SessionsOnHost(host) {
		if !running[found.ID] && found.Status == session.Running && found.Op == nil && placedAt(found).Before(young) {
			s.finish(ctx, hostlink.Tombstone{SessionID: found.ID, Epoch: found.Epoch, EndedAt: asOf,
				Error: "The session's machine was lost: its host does not know it."})
		}
	}
	s.compareSnapshots(ctx, host, c, inv, view)
}

// endStray ends a machine that the record does not want there.
func (s *Service) endStray(ctx context.Context, host string, st hostlink.Status, found session.Session) {
	s.log.Info("ending a machine that the record does not know there", "session", st.SessionID, "host", host, "status", found.Status)
	_, err := s.hosts.End(ctx, host, hostlink.Tombstone{SessionID: st.SessionID, Epoch: st.Epoch, Reason: session.Released})
	if err != nil {
		s.log.Warn("a stray machine is ended later", "session", st.SessionID, "host", host, "error", err)
	}
}
