package session

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
)

// Way is a session's way to proxyd, shut until Show. Safe for concurrent use.
type Way interface {
	// Dial opens a connection on which the newest pass has been shown.
	Dial(ctx context.Context) (net.Conn, error)
	// Show makes connections that begin from now on show this pass.
	Show(pass []byte)
	// Shut lets none begin until the next Show; those that wait for a proxyd fail.
	// Open ones stay.
	Shut()
}

// wayOf opens a machine's way out.
func (h *Host) wayOf(g *pool.Guest, a hostlink.Acquire) Way {
	w := h.egress(a.SessionID, a.Epoch)
	w.Show(a.Pass)
	g.Slot.SetEgress(w.Dial)
	return w
}

// openWay lets the machine out, by the newest pass.
func (s *live) openWay() {
	if s.way == nil {
		s.way = s.host.wayOf(s.guest, s.rec.Acquire)
	} else {
		s.way.Show(s.rec.Acquire.Pass)
	}
}

func (s *live) shutWay() {
	if s.way != nil {
		s.way.Shut()
	}
}

// newer gives the settings that hold after an order; fresh says that they are
// more than another pass for the same. ok is false for an order that came late.
func newer(was, set hostlink.Settings, epoch uint64) (now hostlink.Settings, fresh, ok bool) {
	switch {
	case set.PassEpoch != 0 && set.PassEpoch != epoch: // across a move; it comes again
	case set.Version > was.Version:
		return set, true, true
	case set.Version == was.Version && set.PassExpires.After(was.PassExpires):
		was.Pass, was.PassExpires = set.Pass, set.PassExpires
		return was, false, true
	}
	return was, false, false
}

// shellProxy is what the agent shall know of the proxy.
func shellProxy(a hostlink.Acquire) agentlink.Proxy {
	return agentlink.Proxy{Shell: a.ShellProxy, Version: a.Version}
}

const (
	// tellTime bounds the agent's answer to one order about the shell's proxy;
	// tellAgain is how long one that did not obey is left alone at first, and
	// tellSeldom at last.
	tellTime   = 5 * time.Second
	tellAgain  = time.Second
	tellSeldom = time.Minute
	// tellWait is what a change of settings waits for the agent to obey.
	tellWait = 3 * time.Second
)

// telling is an order about the shell's proxy under way, or its end.
type telling struct {
	proxy agentlink.Proxy
	err   error
}

// tellShell makes the agent know of the shell's proxy, unless it does.
func (s *live) tellShell() {
	s.answerTold()
	if s.phase != running || s.telling || s.shellKnows() {
		return
	}
	want, again := shellProxy(s.rec.Acquire), min(tellAgain<<s.untold, tellSeldom)
	s.telling = true
	s.host.owners.Go(func() {
		ctx, cancel := context.WithTimeoutCause(s.ctx, tellTime, fmt.Errorf("no answer within %s", tellTime))
		err := s.guest.Agent.Proxy(ctx, want)
		cancel()
		if err != nil {
			s.log.Debug("the agent was not told of the shell's proxy", "error", err)
			select {
			case <-s.ctx.Done():
			case <-time.After(again):
			}
		}
		_, _ = s.ask(s.ctx, order{told: &telling{want, err}}) // fails where nobody wants to know any more
	})
}

// shellKnows says whether the agent knows what it shall of the shell's proxy.
func (s *live) shellKnows() bool {
	return !s.rec.Acquire.Kind.HasShell() || s.knows != nil && s.knows.Shell == s.rec.Acquire.ShellProxy
}

// toldShell takes in how an order about the shell's proxy ended.
func (s *live) toldShell(t telling) {
	s.telling = false
	if t.err == nil {
		s.knows, s.untold = &t.proxy, 0
	} else {
		s.untold = min(s.untold+1, 10)
	}
	s.tellShell()
}

// answerTold answers those who wait until the agent knows. A machine that
// stands still learns it before anything in it runs.
func (s *live) answerTold() {
	if !s.shellKnows() && s.phase == running {
		return
	}
	for _, reply := range s.awaitTold {
		reply <- answer{}
	}
	s.awaitTold = nil
}

// awaitTold waits a while until the agent obeys the settings in force: shells
// that start after the answer to a PATCH are told of its proxy. A mere renewal of
// the pass does not wait for an agent that failed to answer before, as one does
// that is older than this order: all of a host's sessions are renewed in a row.
func (h *Host) awaitTold(ctx context.Context, s *live) {
	tctx, cancel := context.WithTimeout(ctx, tellWait)
	defer cancel()
	if _, err := s.ask(tctx, order{awaitTold: true}); err != nil && ctx.Err() == nil && !errors.Is(err, errEnded) {
		s.log.Warn("the agent does not take in a change of the shell's proxy yet; it is told again", "error", err)
	}
}

// Record adds an event to the log of a session that is here in this epoch; false
// when it is not, or stands still: what is written then might miss its journey.
func (h *Host) Record(ctx context.Context, id string, epoch uint64, e event.Event) bool {
	s := h.find(id)
	if s == nil || s.epoch != epoch {
		return false
	}
	_, err := s.ask(ctx, order{event: &e})
	return err == nil
}

var errHeld = errors.New("the session stands still")

func (s *live) recordEvent(e event.Event) error {
	if s.phase == held {
		return errHeld
	}
	if now := time.Now(); e.At.Before(s.rec.Since) || e.At.After(now.Add(time.Minute)) {
		e.At = now
	}
	s.host.record(s.id, e)
	return nil
}
