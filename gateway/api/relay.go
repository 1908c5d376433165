package api

import (
	"bytes"
	"errors"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/wsframe"
)

// Close codes of the platform (decisions "CDP"); the others come with Ended.
const (
	closeRotated = wsframe.ClosePolicy
	closeLost    = wsframe.CloseInternalError
	closeMoved   = wsframe.CloseRestart
	closePaused  = 4001
)

// Times of a socket. Variables so that tests need not wait.
var (
	pingAfter   = 20 * time.Second // of silence
	deadAfter   = 60 * time.Second // a client without a byte for so long is gone
	closeTime   = 2 * time.Second  // for a close frame to go out, and for its answer
	verdictTime = 3 * time.Second  // for the record to say why the agent's stream broke
	sleepTime   = 10 * time.Minute // a client of a session paused with its memory is kept so long
)

// relay joins a client's WebSocket with the agent's. Two goroutines carry
// bytes, each in one direction with nothing between read and write but the
// frame headers; a third, run, decides when and how it ends, and what happens
// while the machine stands still.
type relay struct {
	machine       machine
	client, agent *end
	up, down      *wsframe.Pipe // client → agent, agent → client
	upDone        <-chan error  // each gives its Run's error, then is closed
	downDone      <-chan error
	clientClosed  latch // the client sent a close frame
	agentClosed   latch
	message       chan struct{} // holds one: the client sent data while the machine stood still
}

// latch is a fact that becomes true once.
type latch struct {
	once sync.Once
	set  chan struct{} // closed when it is true
	code uint16        // of the close frame; written before
}

func (l *latch) is() bool {
	select {
	case <-l.set:
		return true
	default:
		return false
	}
}

// end is one connection: early holds what was read before the relay began.
// heard and took are set by every read and write, and cleared by who looks;
// failed by a write that fails. While held, what was read waits at the gate;
// while still, it is sifted.
type end struct {
	net.Conn
	early       []byte
	cut         bool // early is the beginning of a control frame
	heard, took atomic.Bool
	failed      atomic.Bool
	held, still atomic.Bool
	gate        sync.Mutex
	sift        func([]byte) (kept, rest []byte) // of the client's end
}

func (e *end) hold() {
	e.gate.Lock()
	e.held.Store(true)
}

func (e *end) letGo() {
	e.held.Store(false)
	e.gate.Unlock()
}

// Read implements io.Reader.
func (e *end) Read(p []byte) (int, error) {
	n, err := copy(p, e.early), error(nil)
	e.early = e.early[n:]
	if n == 0 || e.cut && len(e.early) == 0 {
		var more int
		more, err = e.Conn.Read(p[n:])
		n += more
		e.cut = false
		e.heard.Store(true)
	}
	if e.still.Load() && err == nil {
		n = e.keep(p[:n])
	}
	if e.held.Load() {
		e.gate.Lock()
		defer e.gate.Unlock()
	}
	return n, err
}

// keep sifts what was read.
func (e *end) keep(b []byte) int {
	kept, rest := e.sift(b)
	if len(rest) > 0 {
		e.cut = len(e.early) == 0
		e.early = append(bytes.Clone(rest), e.early...)
	}
	return len(kept)
}

// Write implements io.Writer.
func (e *end) Write(p []byte) (int, error) {
	n, err := e.Conn.Write(p)
	e.took.Store(true)
	if err != nil {
		e.failed.Store(true)
	}
	return n, err
}

func newRelay(m machine, client net.Conn, early []byte, agent net.Conn, rest []byte) *relay {
	r := &relay{machine: m, client: &end{Conn: client, early: early}, agent: &end{Conn: agent, early: rest},
		clientClosed: latch{set: make(chan struct{})}, agentClosed: latch{set: make(chan struct{})},
		message: make(chan struct{}, 1)}
	r.up = wsframe.NewPipe(r.agent, r.client, closeSeen(&r.clientClosed))
	r.down = wsframe.NewPipe(r.client, r.agent, closeSeen(&r.agentClosed))
	r.client.sift = r.sift
	return r
}

func closeSeen(l *latch) func(byte, []byte) {
	return func(op byte, payload []byte) {
		if op == wsframe.OpClose {
			l.once.Do(func() {
				l.code, _ = wsframe.ParseClose(payload)
				close(l.set)
			})
		}
	}
}

// run relays until one side is done, the session ends or the gateway leaves;
// why is for the log. Both connections are closed and no goroutine is left.
func (r *relay) run(ends <-chan sessions.Ended, leaving <-chan struct{}) (why string) {
	r.upDone, r.downDone = running(r.up), running(r.down)
	defer func() {
		_ = r.client.Close()
		_ = r.agent.Close()
		for range r.upDone {
		}
		for range r.downDone {
		}
	}()
	return r.watch(ends, leaving)
}

func running(p *wsframe.Pipe) <-chan error {
	done := make(chan error, 1)
	go func() {
		defer close(done)
		done <- p.Run()
	}()
	return done
}

func (r *relay) watch(ends <-chan sessions.Ended, leaving <-chan struct{}) string {
	look := time.NewTicker(pingAfter / 4)
	defer look.Stop()
	life := life{heard: time.Now(), looked: time.Now()}
	pause := newPause(r)
	defer pause.end()
	for {
		select {
		case err := <-r.upDone:
			if r.agent.failed.Load() {
				return r.agentLeft(r.lastWord(err), ends)
			}
			return r.clientLeft(err)
		case err := <-r.downDone:
			return r.agentLeft(err, ends)
		case e := <-ends:
			r.platformClose(e.CloseCode, e.Reason)
			return "session: " + e.Reason
		case <-leaving:
			r.platformClose(wsframe.CloseGoingAway, "restart")
			return "gateway leaves"
		case now := <-look.C:
			if !r.alive(&life, now, pause.standing) {
				r.tellAgent(wsframe.CloseGoingAway, "client silent")
				return "client silent"
			}
		case <-pause.changed:
			pause.look()
		case <-r.message:
			pause.messaged()
		case err := <-pause.woken:
			pause.awake(err)
		case <-pause.over:
			pause.shut = "paused for long"
		case <-pause.clientClosed():
			r.closeClient(r.clientClosed.answer(), "")
			return "client closed while the machine stood still"
		}
		if pause.shut != "" {
			r.platformClose(closePaused, "paused")
			return pause.shut
		}
	}
}

// answer is the code that answers a close frame (RFC 6455 section 5.5.1).
func (l *latch) answer() int {
	if l.code == wsframe.CloseNoStatus {
		return wsframe.CloseNormal
	}
	return int(l.code)
}

// life is what is known of a client's being there.
type life struct {
	heard  time.Time // when it last gave a sign, or a little before
	looked time.Time // when that was last looked for
	pings  int       // sent since
}

// alive pings a silent client and says whether it is still taken for present.
// While a long frame keeps pings out, that it takes bytes is its sign of life;
// and while the rest of that frame has to wait for the machine, nothing can be.
func (r *relay) alive(l *life, now time.Time, machine standing) bool {
	heard, took := r.client.heard.Swap(false), r.client.took.Swap(false)
	excused := machine != runs || took && l.pings == 0
	ping, dead := l.due(now, heard || excused && !r.down.AtBoundary())
	if ping && r.ping() == nil {
		l.pings++
	}
	return !dead
}

// due decides at a look. A sign counts from the look before: it came some time
// between the two, and a ping must never be later than pingAfter.
func (l *life) due(now time.Time, sign bool) (ping, dead bool) {
	if sign {
		l.heard, l.pings = l.looked, 0
	}
	l.looked = now
	silent := now.Sub(l.heard)
	return silent >= pingAfter*time.Duration(l.pings+1), silent >= deadAfter
}

func (r *relay) ping() error {
	return r.down.Inject(wsframe.AppendPing(nil, []byte("berth"), false), closeTime/4)
}

// clientLeft ends the agent's side as the client ended its own.
func (r *relay) clientLeft(err error) string {
	switch {
	case errors.Is(err, wsframe.ErrFrame):
		r.closeClient(wsframe.CloseProtocolError, "bad frame")
		r.tellAgent(wsframe.CloseProtocolError, "bad frame")
		return "client sent no frame"
	case r.clientClosed.is(): // the agent's answer is on its way
		await(r.downDone, nil)
		return "client closed"
	}
	r.tellAgent(wsframe.CloseGoingAway, "client left")
	return "client left"
}

// agentLeft ends the client's side. A stream that just breaks usually means
// that the session ended; the record knows in a moment. One that leads to lost
// memory means that the session goes on without it.
func (r *relay) agentLeft(err error, ends <-chan sessions.Ended) string {
	if r.agentClosed.is() {
		await(r.upDone, r.clientClosed.set)
		return "agent closed"
	}
	moved := errors.Is(err, link.ErrLineage) || errors.Is(err, link.ErrUnknownStream)
	e, uerr, left := r.verdict(ends, moved)
	if left {
		return r.clientLeft(uerr)
	}
	r.closeClient(e.CloseCode, e.Reason)
	if err == nil {
		return "agent left: " + e.Reason
	}
	return "agent left: " + e.Reason + ": " + err.Error()
}

// lastWord waits a little for what the agent's stream, which takes nothing more,
// still gives, and for the error it ends with.
func (r *relay) lastWord(err error) error {
	timer := time.NewTimer(closeTime)
	defer timer.Stop()
	select {
	case last := <-r.downDone:
		if last != nil {
			err = last
		}
	case <-timer.C:
	}
	return err
}

// verdict says how to close the client's side of a stream that broke; left
// says that the client was faster.
func (r *relay) verdict(ends <-chan sessions.Ended, moved bool) (e sessions.Ended, uerr error, left bool) {
	e, wait, up := sessions.Ended{CloseCode: closeLost, Reason: "machine lost"}, verdictTime, r.upDone
	if moved {
		e, wait = sessions.Ended{CloseCode: closeMoved, Reason: "moved"}, 0
	}
	if r.agent.failed.Load() {
		up = nil // it ended because the agent's stream did
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case e = <-ends:
	case <-timer.C:
	case uerr = <-up:
		return e, uerr, true
	}
	return e, nil, false
}

// platformClose ends both sides. The client first, so that the agent's answer
// to its private code has no way left to the client; and what the client says
// meanwhile waits, so that its answer does not come before that code.
func (r *relay) platformClose(code int, reason string) {
	r.client.hold()
	ok := r.sendClose(code, reason)
	told := r.up.AtBoundary()
	if told {
		r.tellAgent(agentlink.PlatformClose, reason)
	}
	r.client.letGo()
	if !told { // the client is inside a frame: behind it
		r.tellAgent(agentlink.PlatformClose, reason)
	}
	r.dropClient(ok)
}

// closeClient ends the client's side.
func (r *relay) closeClient(code int, reason string) { r.dropClient(r.sendClose(code, reason)) }

// sendClose sends the client a close frame at a frame boundary; inside a frame
// it cannot, since nothing may follow half a frame.
func (r *relay) sendClose(code int, reason string) bool {
	_ = r.client.SetWriteDeadline(time.Now().Add(closeTime))
	return r.down.Inject(wsframe.AppendClose(nil, uint16(code), reason, false), closeTime) == nil
}

// dropClient closes the connection; after a close frame it waits a little for
// the client's, so that no reset overtakes ours.
func (r *relay) dropClient(answers bool) {
	if answers {
		await(r.upDone, r.clientClosed.set)
	}
	_ = r.client.Close()
}

// tellAgent sends a close frame to the agent if it can.
func (r *relay) tellAgent(code int, reason string) {
	_ = r.agent.SetWriteDeadline(time.Now().Add(closeTime))
	_ = r.up.Inject(wsframe.AppendClose(nil, uint16(code), reason, true), closeTime/4)
}

// await waits for a direction's end or for a close frame, not for long.
func await(done <-chan error, closed <-chan struct{}) {
	timer := time.NewTimer(closeTime)
	defer timer.Stop()
	select {
	case <-done:
	case <-closed:
	case <-timer.C:
	}
}
