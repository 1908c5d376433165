package sessions

import (
	"context"
	"slices"
	"sync"
)

// turns are the creates under way of each project.
type turns struct {
	mu  sync.Mutex
	now map[string][]*turn // in order; guarded by mu
}

// turn is one create under way, from before its machine is taken to its end.
type turn struct {
	of      *turns
	project string
	room    bool            // for all that were under way at its begin, and for itself
	before  []chan struct{} // of those with room: closed when the record has answered them
	said    chan struct{}   // this one's
	once    sync.Once
}

// enter begins a create; room says whether there is a place for it beside
// others that are under way.
func (t *turns) enter(project string, room func(others int) bool) *turn {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.now == nil {
		t.now = map[string][]*turn{}
	}
	own := &turn{of: t, project: project, room: room(len(t.now[project])), said: make(chan struct{})}
	for _, other := range t.now[project] {
		if !own.room && other.room {
			own.before = append(own.before, other.said)
		}
	}
	t.now[project] = append(t.now[project], own)
	return own
}

// wait lets the record answer those first that had room and did not count on
// this one: it would take the place for which one of them takes a machine.
func (t *turn) wait(ctx context.Context) error {
	for _, said := range t.before {
		select {
		case <-said:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// answered: the record has said what becomes of the create, or is not asked.
func (t *turn) answered() { t.once.Do(func() { close(t.said) }) }

// leave ends the create.
func (t *turn) leave() {
	t.answered()
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	rest := slices.DeleteFunc(t.of.now[t.project], func(other *turn) bool { return other == t })
	if t.of.now[t.project] = rest; len(rest) == 0 {
		delete(t.of.now, t.project)
	}
}
