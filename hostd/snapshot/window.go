package snapshot

// window runs work beside its owner, at most depth pieces at once, and gives the
// results back in the order in which the work was put in. One goroutine owns it
// and must drain it in the end.
type window[T any] struct {
	depth int
	queue []chan T
}

func (w *window[T]) full() bool  { return len(w.queue) >= w.depth }
func (w *window[T]) empty() bool { return len(w.queue) == 0 }

func (w *window[T]) push(work func() T) {
	done := make(chan T, 1)
	w.queue = append(w.queue, done)
	go func() { done <- work() }()
}

// pop waits for the oldest piece of work.
func (w *window[T]) pop() T {
	done := w.queue[0]
	w.queue = w.queue[1:]
	return <-done
}

// drain waits for all that is under way and drops the results.
func (w *window[T]) drain() {
	for !w.empty() {
		w.pop()
	}
}
