// Package loop moves bytes between sockets on threads of its own, as HAProxy
// and Envoy do.
//
// A Loop is one thread that waits for its sockets by epoll and does for each
// what can be done at once. Nothing of it waits for anything else, and the Go
// scheduler, which has no thread that looks at the network first, is told of
// the wait alone. Loops come in pairs: connections and small messages are
// quick's, and a relay that comes in bulk goes to bulk until it is small again.
// So the kernel shares the processors between the two, and quick, which mostly
// sleeps, gets one as soon as something arrives. Within a loop each relay moves
// a quota at most, and then the others have their turn.
//
// What a Loop runs must not block: what has to wait for a name, for a disk or for a
// lock that is held long belongs into a goroutine, which comes back by Call.
package loop

import (
	"fmt"
	"runtime"
	"sync"
	"syscall"
)

const (
	maxEvents = 128 // of one look
	linger    = 100 // ms that a loop without sockets waits for the next one
)

// Waiter is told of its sockets' events: syscall.EPOLLIN and so on. What an
// event said holds until a call on the socket gives EAGAIN: it is told once.
type Waiter interface {
	Ready(fd int, events uint32)
}

// Loop is one thread with its sockets. Its goroutine runs while it has any.
type Loop struct {
	ep, bell int   // epoll, and an eventfd that interrupts its wait
	bulk     *Loop // where bulk goes; nil: here
	quick    *Loop // where it comes from; nil: from elsewhere
	quota    int   // bytes one way of a relay may move in a turn

	// The rest but for mu's is the goroutine's own.
	scratch [copySize]byte // what is read and written at once, whose ever it is
	events  [maxEvents]syscall.EpollEvent
	slots   []slot // by descriptor
	open    int    // sockets
	again   []*Relay
	turned  []*Relay // again of the turn before, to be used again
	pipes   []*pipe  // empty ones

	mu      sync.Mutex
	calls   []func()
	running bool
	asleep  bool // or about to be
}

// slot is what a descriptor stands for. Events of an earlier use of its number
// have another turn.
type slot struct {
	w   Waiter
	use int32
}

func newLoop(quota int) (*Loop, error) {
	ep, err := syscall.EpollCreate1(syscall.EPOLL_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("epoll: %w", err)
	}
	bell, err := newBell()
	if err == nil {
		err = syscall.EpollCtl(ep, syscall.EPOLL_CTL_ADD, bell, &syscall.EpollEvent{Events: syscall.EPOLLIN | edge, Fd: int32(bell)})
	}
	if err != nil {
		syscall.Close(ep)
		return nil, fmt.Errorf("eventfd: %w", err)
	}
	return &Loop{ep: ep, bell: bell, quota: quota}, nil
}

// Call has the loop run f soon. From any goroutine.
func (l *Loop) Call(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.calls = append(l.calls, f)
	switch {
	case !l.running:
		l.running = true
		go l.run()
	case l.asleep:
		l.asleep = false
		ring(l.bell)
	}
}

// run turns until there is nothing to wait for.
func (l *Loop) run() {
	// The kernel's accounts are by thread. It is given back, not ended: children
	// that it started before may be told to end with it (PR_SET_PDEATHSIG).
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	askSlice(slice)
	defer askSlice(0)
	for {
		calls := l.called()
		for _, f := range calls {
			f()
		}
		wait := 0
		switch {
		case len(calls) > 0 || len(l.again) > 0:
		case l.open > 0:
			wait = -1
		default:
			wait = linger
		}
		if l.turn(wait) == 0 && wait == linger && l.end() {
			return
		}
	}
}

// called takes the calls. Where there is nothing to do, from here on Call rings.
func (l *Loop) called() []func() {
	l.mu.Lock()
	defer l.mu.Unlock()
	calls := l.calls
	l.calls = nil
	l.asleep = len(calls) == 0 && len(l.again) == 0
	return calls
}

// end says whether the goroutine is to end.
func (l *Loop) end() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.calls) > 0 {
		return false
	}
	l.running, l.asleep = false, false
	l.closePipes()
	return true
}

// turn looks at the sockets once and has each relay that was not done the turn before
// move a quota. wait is in ms, -1 for ever; it gives the number of events.
func (l *Loop) turn(wait int) int {
	n := poll(l.ep, l.events[:], wait)
	work := l.again
	l.again = l.turned[:0]
	for i := range l.events[:n] {
		l.deliver(&l.events[i])
	}
	for i, r := range work {
		work[i] = nil
		r.queued = false
		r.run()
	}
	l.turned = work[:0]
	return n
}

// deliver tells of an event, unless its socket was closed since it came.
func (l *Loop) deliver(e *syscall.EpollEvent) {
	if fd := int(e.Fd); fd < len(l.slots) && l.slots[fd].use == e.Pad && l.slots[fd].w != nil {
		l.slots[fd].w.Ready(fd, e.Events)
	}
}

// later gives r a quota in the next turn.
func (l *Loop) later(r *Relay) {
	r.queued = true
	l.again = append(l.again, r)
}

// Scratch is memory for what is read and used at once. Loop's goroutine only.
func (l *Loop) Scratch() []byte { return l.scratch[:] }

// Add tells w of fd's events from now on, of those that are there already too;
// out says whether of EPOLLOUT. Loop's goroutine only.
func (l *Loop) Add(fd int, w Waiter, out bool) error {
	events := uint32(syscall.EPOLLIN | syscall.EPOLLRDHUP | edge)
	if out {
		events |= syscall.EPOLLOUT
	}
	return l.add(fd, w, events)
}

func (l *Loop) add(fd int, w Waiter, events uint32) error {
	for fd >= len(l.slots) {
		l.slots = append(l.slots, slot{})
	}
	s := &l.slots[fd]
	s.use++
	if err := control(l.ep, syscall.EPOLL_CTL_ADD, fd, events, s.use); err != nil {
		return fmt.Errorf("wait for a socket: %w", err)
	}
	s.w = w
	l.open++
	return nil
}

// Hand gives fd's further events to another waiter.
func (l *Loop) Hand(fd int, w Waiter) { l.slots[fd].w = w }

// writes adds EPOLLOUT to fd's events.
func (l *Loop) writes(fd int) error {
	return control(l.ep, syscall.EPOLL_CTL_MOD, fd, syscall.EPOLLIN|syscall.EPOLLOUT|syscall.EPOLLRDHUP|edge, l.slots[fd].use)
}

// Remove ends the waiting for fd, which stays open. Loop's goroutine only.
func (l *Loop) Remove(fd int) {
	if l.drop(fd) {
		_ = control(l.ep, syscall.EPOLL_CTL_DEL, fd, 0, 0)
	}
}

// Close closes fd, which may have been added. Loop's goroutine only.
func (l *Loop) Close(fd int) {
	l.drop(fd)
	closeFD(fd) // the kernel forgets a closed socket by itself
}

func (l *Loop) drop(fd int) bool {
	if fd >= len(l.slots) || l.slots[fd].w == nil {
		return false
	}
	l.slots[fd].w = nil
	l.open--
	return true
}
