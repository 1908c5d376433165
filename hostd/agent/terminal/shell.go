package terminal

import (
	"fmt"
	"os"
	"os/exec"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/ws"
)

const (
	// replaySize is how much of the newest output a new client gets (decisions "Streams").
	replaySize = 64 << 10
	// queueSize is how much may wait for one client before the pty is no
	// longer read, which in turn blocks the program that writes.
	queueSize = 256 << 10
)

// shell is one bash on its pty.
type shell struct {
	cmd   *exec.Cmd
	tty   *os.File
	stall time.Duration
	eof   chan struct{} // closed when read has ended
	done  chan struct{} // closed when bash and all that served it is gone

	mu      sync.Mutex
	room    *sync.Cond // of mu: a client took output, or left
	screen  []byte     // guarded by mu: newest output, replaySize of it and some more
	clients []*client  // guarded by mu
	ended   *farewell  // guarded by mu: set once, then no client joins
}

// farewell is the close that every client gets.
type farewell struct {
	code   ws.StatusCode
	reason string
}

func newShell(cmd *exec.Cmd, tty *os.File, cfg Config) *shell {
	s := &shell{cmd: cmd, tty: tty, stall: cfg.Stall, eof: make(chan struct{}), done: make(chan struct{})}
	s.room = sync.NewCond(&s.mu)
	return s
}

// read passes output on until the pty ends (EIO, when its last program has
// closed it) or is closed.
func (s *shell) read() {
	defer close(s.eof)
	buf := make([]byte, 32<<10)
	for {
		n, err := s.tty.Read(buf)
		if n > 0 {
			s.output(buf[:n])
		}
		if err != nil {
			return
		}
	}
}

// output keeps p for the screen and queues it for all clients, after it has
// waited until each has room.
func (s *shell) output(p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.awaitRoom()
	s.screen = append(s.screen, p...)
	if len(s.screen) > 2*replaySize { // seldom, so that little output does not move much
		s.screen = append(s.screen[:0], s.newest()...)
	}
	for _, c := range s.clients {
		c.queue = append(c.queue, p...)
		c.wake()
	}
}

// newest is the part of the screen that is replayed. Callers hold mu.
func (s *shell) newest() []byte { return s.screen[max(0, len(s.screen)-replaySize):] }

// awaitRoom waits for slow clients: for ever when there is only one, whom
// nobody else waits for, else stall, and then sends the slow ones away.
func (s *shell) awaitRoom() {
	var alarm *time.Timer
	var deadline time.Time
	for slices.ContainsFunc(s.clients, (*client).full) {
		switch {
		case alarm == nil:
			deadline = time.Now().Add(s.stall)
			alarm = time.AfterFunc(s.stall, s.wakeReader)
			defer alarm.Stop()
		case len(s.clients) > 1 && !time.Now().Before(deadline):
			s.dropSlow()
		}
		if slices.ContainsFunc(s.clients, (*client).full) {
			s.room.Wait()
		}
	}
}

func (s *shell) wakeReader() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.room.Broadcast()
}

// dropSlow sends clients without room away. Callers hold mu.
func (s *shell) dropSlow() {
	s.clients = slices.DeleteFunc(s.clients, func(c *client) bool {
		if !c.full() {
			return false
		}
		c.dismiss(farewell{ws.StatusTryAgain, "too slow"})
		time.AfterFunc(time.Second, func() { c.conn.CloseNow() }) // its writer is stuck in a frame
		return true
	})
}

// wait sees bash exit, lets the rest of its output through and says farewell.
func (s *shell) wait() {
	code := exitCode(s.cmd.Wait())
	s.mu.Lock()
	if s.ended == nil {
		s.ended = &farewell{ws.StatusNormal, fmt.Sprintf("exit:%d", code)}
	}
	s.mu.Unlock()
	s.drain()
	s.tty.Close()
	s.wakeReader()
	<-s.eof
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.clients {
		c.dismiss(*s.ended)
	}
	s.clients = nil
}

// drainLimit is how long what bash left behind may go on writing to the pty.
const drainLimit = 200 * time.Millisecond

// drain waits for the pty's end. Background jobs that hold it would keep it
// from ever ending, so their output is cut after a moment.
func (s *shell) drain() {
	_ = s.tty.SetReadDeadline(time.Now().Add(drainLimit))
	select {
	case <-s.eof:
	case <-time.After(2 * drainLimit): // the reader waits for a slow client
		s.mu.Lock()
		s.dropSlow()
		s.mu.Unlock()
		s.wakeReader()
	}
}

// end kills bash; clients get the given close. Closing the pty hangs up on
// whatever runs in it.
func (s *shell) end(code ws.StatusCode, reason string) {
	s.mu.Lock()
	if s.ended == nil {
		s.ended = &farewell{code, reason}
	}
	s.mu.Unlock()
	_ = syscall.Kill(-s.cmd.Process.Pid, syscall.SIGHUP)
	_ = s.cmd.Process.Kill()
}

// attach adds a client, whose queue begins with the screen; false when bash
// has ended meanwhile.
func (s *shell) attach(c *client) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.ended != nil {
		return false
	}
	c.queue = append(c.queue, s.newest()...)
	c.wake()
	s.clients = append(s.clients, c)
	s.room.Broadcast() // somebody waits now for one who was alone in being slow
	return true
}

func (s *shell) detach(c *client) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.clients = slices.DeleteFunc(s.clients, func(o *client) bool { return o == c })
	s.room.Broadcast()
}

// resize sets the window; the last one wins for all clients.
func (s *shell) resize(cols, rows int) error {
	conn, err := s.tty.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	_ = conn.Control(func(fd uintptr) { // fails only when the pty is closed, and then size matters no more
		failed = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Col: uint16(cols), Row: uint16(rows)})
	})
	return failed
}
