package sessions

import (
	"sync"
	"time"
)

// tasks are pieces of work that go on behind answers. Unlike a WaitGroup it may
// be waited for while more come.
type tasks struct {
	mu   sync.Mutex
	n    int           // guarded by mu
	none chan struct{} // closed when n falls to 0; nil while nobody waits; guarded by mu
}

// begin counts one more until done is called.
func (t *tasks) begin() (done func()) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.n++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if t.n--; t.n == 0 && t.none != nil {
			close(t.none)
			t.none = nil
		}
	}
}

// wait waits for a moment without work, but not for longer than limit.
func (t *tasks) wait(limit time.Duration) {
	t.mu.Lock()
	if t.n == 0 {
		t.mu.Unlock()
		return
	}
	if t.none == nil {
		t.none = make(chan struct{})
	}
	none := t.none
	t.mu.Unlock()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-none:
	case <-timer.C:
	}
}
