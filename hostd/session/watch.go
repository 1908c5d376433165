package session

import "github.com/berth-dev/berth/shared/hostlink"

// Watch gives every notice from now on. The channel is closed when the watcher
// is too slow or stop is called; the inventory is the caller's to ask after.
func (h *Host) Watch() (notices <-chan hostlink.Notice, stop func()) {
	ch := make(chan hostlink.Notice, 1024)
	h.mu.Lock()
	h.watchers[ch] = true
	h.mu.Unlock()
	return ch, func() { h.unwatch(ch) }
}

func (h *Host) unwatch(ch chan hostlink.Notice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.watchers[ch] {
		delete(h.watchers, ch)
		close(ch)
	}
}

// tell never blocks on a watcher: one that is 1024 notices behind is cut and
// begins again with the inventory.
func (h *Host) tell(n hostlink.Notice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch := range h.watchers {
		select {
		case ch <- n:
		default:
			delete(h.watchers, ch)
			close(ch)
		}
	}
}
