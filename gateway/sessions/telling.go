package sessions

import (
	"context"
	"fmt"
	"sync"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
)

// tellAtOnce is how many verdicts reconciling tells one host at the same time:
// each takes as long as a machine needs to go on.
const tellAtOnce = 4

// telling is what reconciling has to tell hosts, beside their watches: a machine
// that goes on slowly keeps neither its host's news waiting nor another host.
// The zero value has nothing to tell.
type telling struct {
	mu    sync.Mutex // guards what follows
	hosts map[string]*toTell
}

// toTell is one host's.
type toTell struct {
	known   map[string]bool // what waits or is under way
	waiting []func()
	workers int
}

// add has do done for a host, unless something of that name is still to be
// done there. start runs a worker.
func (t *telling) add(host, name string, do func(), start func(work func())) {
	t.mu.Lock()
	defer t.mu.Unlock()
	h := t.hosts[host]
	if h == nil {
		h = &toTell{known: map[string]bool{}}
		if t.hosts == nil {
			t.hosts = map[string]*toTell{}
		}
		t.hosts[host] = h
	}
	if h.known[name] {
		return
	}
	h.known[name] = true
	h.waiting = append(h.waiting, func() {
		do()
		t.mu.Lock()
		defer t.mu.Unlock()
		delete(h.known, name)
	})
	if h.workers < tellAtOnce {
		h.workers++
		start(func() { t.work(host, h) })
	}
}

// work does what waits for a host until there is no more of it.
func (t *telling) work(host string, h *toTell) {
	for {
		t.mu.Lock()
		if len(h.waiting) == 0 {
			if h.workers--; h.workers == 0 {
				delete(t.hosts, host)
			}
			t.mu.Unlock()
			return
		}
		do := h.waiting[0]
		h.waiting = h.waiting[1:]
		t.mu.Unlock()
		do()
	}
}

// tellSoon tells a host a verdict that it waits for, in the background. What
// goes wrong the next inventory shows again.
func (s *Service) tellSoon(ctx context.Context, host string, c *hostlink.Client, id string, v hostlink.Verdict) {
	s.telling.add(host, v.OpID, func() {
		s.log.Info("telling a host a verdict that it waits for", "session", id, "operation", v.OpID, "committed", v.Committed, "host", host)
		ctx, cancel := context.WithTimeout(ctx, s.pace.tell)
		defer cancel()
		if err := s.giveVerdict(ctx, host, c, id, v); err != nil && !apierr.Is(err, apierr.NotFound) {
			s.log.Warn("a host hears a verdict later", "session", id, "operation", v.OpID, "host", host, "error", err)
		}
	}, func(work func()) {
		done := s.after.begin()
		go func() { defer done(); work() }()
	})
}

// giveVerdict gives a host a verdict. Who gives it the same at the same time
// shares the answer.
func (s *Service) giveVerdict(ctx context.Context, host string, c *hostlink.Client, id string, v hostlink.Verdict) error {
	answer := s.verdicts.DoChan(fmt.Sprintf("%s %s %v", host, v.OpID, v.Committed), func() (any, error) {
		defer s.after.begin()()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.pace.tell)
		defer cancel()
		return nil, c.Verdict(ctx, id, v)
	})
	select {
	case r := <-answer:
		return r.Err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
