package api

import (
	"context"
	"time"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// standings tell how the machines of sessions stand, and make them go on.
type standings interface {
	// Watch gives a session and a channel that closes when it may have changed;
	// false when the record here does not know it.
	Watch(id string) (s session.Session, ok bool, changed <-chan struct{})
	// Awake gives the session as it runs now: a paused one is resumed first, an
	// open operation waited for.
	Awake(ctx context.Context, s session.Session) (session.Session, error)
}

// standing is how a session's machine stands, by the record.
type standing int

const (
	runs   standing = iota
	held            // an operation is open: it stops, is stopped, or is about to go on
	asleep          // paused with its memory
	gone            // paused without: what its processes knew is lost
)

func stands(s session.Session) standing {
	switch {
	case s.Status.Ended():
		return runs // it stands no more; how it ended is told elsewhere
	case s.Op != nil:
		return held
	case s.Status != session.Paused:
		return runs
	case s.Snapshot != nil && s.Snapshot.Memory:
		return asleep
	}
	return gone
}

// machine is what a relay knows of the machine behind its socket.
type machine struct {
	standings standings
	session   session.Session
	looks     bool // the client only looks on: its messages resume nothing
}

func (m machine) now() (standing, <-chan struct{}) {
	s, ok, changed := m.standings.Watch(m.session.ID)
	if !ok {
		return runs, changed
	}
	return stands(s), changed
}

// pause is how a relay's machine stands and what is done about it. The relay's
// run owns it.
type pause struct {
	r        *relay
	standing standing
	changed  <-chan struct{}
	message  bool             // the client sent one that the machine has not got
	timer    *time.Timer      // since it fell asleep
	over     <-chan time.Time // the timer's
	woken    chan error       // the answer of Awake, nil: not asked
	stop     context.CancelFunc
	shut     string // not empty: the socket has to close, and this is why
}

func newPause(r *relay) *pause {
	p := &pause{r: r}
	p.look()
	return p
}

// look asks the record.
func (p *pause) look() {
	before := p.standing
	p.standing, p.changed = p.r.machine.now()
	p.r.client.still.Store(p.standing != runs)
	switch p.standing {
	case runs:
		p.message = false
		p.endSleep()
	case held: // if it slept, it is being resumed
		p.endSleep()
	case asleep:
		if p.timer == nil {
			p.timer = time.NewTimer(sleepTime)
			p.over = p.timer.C
		}
		if before != asleep && p.r.unread() {
			p.message = true // it came a moment too late for the machine
		}
		p.wake()
	case gone:
		p.shut = "paused without memory"
	}
}

// unread says whether the agent has not read all that the client sent.
func (r *relay) unread() bool {
	c, ok := r.agent.Conn.(interface{ Unread() int })
	return ok && c.Unread() > 0
}

// messaged: the client sent a message while the machine stood still.
func (p *pause) messaged() {
	p.message = p.standing != runs
	p.wake()
}

// wake resumes the session, if a message waits for that.
func (p *pause) wake() {
	if p.standing != asleep || !p.message || p.woken != nil || p.r.machine.looks {
		return
	}
	var ctx context.Context
	ctx, p.stop = context.WithCancel(context.Background())
	answer := make(chan error, 1)
	p.woken = answer
	go func() {
		_, err := p.r.machine.standings.Awake(ctx, p.r.machine.session)
		answer <- err
	}()
}

// awake takes the answer of Awake in. A session that cannot be resumed now, for
// want of room say, lets its client go: it learns why when it comes back.
func (p *pause) awake(err error) {
	p.stop()
	p.woken = nil
	if err != nil && !apierr.Is(err, apierr.SessionNotRunning) { // that comes with its own close
		p.shut = "cannot be resumed: " + err.Error()
		return
	}
	p.look()
}

// clientClosed fires when the client closes and the machine cannot answer.
func (p *pause) clientClosed() <-chan struct{} {
	if p.standing == runs {
		return nil
	}
	return p.r.clientClosed.set
}

func (p *pause) endSleep() {
	if p.timer != nil {
		p.timer.Stop()
		p.timer, p.over = nil, nil
	}
}

// end gives back what the pause holds.
func (p *pause) end() {
	p.endSleep()
	if p.woken != nil {
		p.stop()
		<-p.woken
	}
}

// looking gives a session whose machine can be looked at: an operation is
// waited for, until ctx ends or it is overdue, a paused session is not resumed.
func (c *call) looking(ctx context.Context, s session.Session) (session.Session, error) {
	for {
		now, ok, changed := c.srv.cfg.Service.Watch(s.ID)
		if !ok {
			return s, nil // the record here is behind
		}
		switch stands(now) {
		case runs:
			return now, nil
		case asleep, gone:
			return now, apierr.New(apierr.SessionNotRunning, "session %s is paused, and looking does not resume it", s.ID)
		}
		if err := sessions.OutlastOperation(ctx, now, changed, sessions.UndoTime); err != nil {
			return now, err
		}
	}
}

// watchPause cancels work on a machine that was paused without its memory, or
// has been paused for long.
func (c *call) watchPause(s session.Session) {
	ctx, stop := context.WithCancel(c.ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := c.outlast(ctx, s); err != nil {
			c.cancel(err)
		}
	}()
	c.later(func() { stop(); <-done })
}

// outlast returns when ctx ends (nil), or says why the work will not go on.
func (c *call) outlast(ctx context.Context, s session.Session) error {
	m := machine{standings: c.srv.cfg.Service, session: s}
	var slept <-chan time.Time // a timer since it fell asleep; collected when dropped
	for {
		now, changed := m.now()
		switch {
		case now == gone:
			return apierr.New(apierr.SessionNotRunning, "the session was paused meanwhile, without its memory: what this waited for is gone; try again, which resumes it")
		case now == runs || now == held: // if it slept, it is being resumed
			slept = nil
		case now == asleep && slept == nil:
			slept = time.After(sleepTime)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-slept:
			return apierr.New(apierr.SessionNotRunning, "the session has been paused for %s; try again, which resumes it", sleepTime)
		case <-changed:
		}
	}
}
