package link

import (
	"sync"
	"time"
)

// waiters is a condition with a deadline, for readers or for writers. The
// Conn's lock guards it.
type waiters struct {
	cond     sync.Cond
	n        int // waiting now
	deadline time.Time
	timer    *time.Timer
}

// wait returns after a Broadcast or at the deadline; the caller looks again.
func (w *waiters) wait() {
	w.arm()
	w.n++
	w.cond.Wait()
	w.n--
}

// arm makes sure that waiters wake at the deadline.
func (w *waiters) arm() {
	if w.deadline.IsZero() {
		return
	}
	d := max(time.Until(w.deadline), 0)
	if w.timer == nil {
		w.timer = time.AfterFunc(d, func() {
			w.cond.L.Lock()
			defer w.cond.L.Unlock()
			w.cond.Broadcast()
		})
		return
	}
	w.timer.Reset(d)
}

// set changes the deadline.
func (w *waiters) set(t time.Time) {
	w.deadline = t
	if w.n > 0 {
		w.arm()
		w.cond.Broadcast()
	}
}

// expired says whether the deadline has passed.
func (w *waiters) expired() bool {
	return !w.deadline.IsZero() && !time.Now().Before(w.deadline)
}

// stop is called when the stream is over.
func (w *waiters) stop() {
	if w.timer != nil {
		w.timer.Stop()
	}
	w.cond.Broadcast()
}
