package pool

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// Slots makes slots, and keeps one that was made ahead for a machine that
// somebody waits for: a resume would stand still for the 20 ms that one takes.
// A spare that a hostd leaves at its death is like any slot without a machine:
// the next one's sweep removes it. Safe for concurrent use.
type Slots struct {
	one   func(context.Context) (Slot, error)
	calm  time.Duration
	log   *slog.Logger
	taken chan struct{} // capacity 1: there may be no spare any more

	mu    sync.Mutex
	spare Slot // guarded by mu; nil: none
}

// NewSlots makes slots by one. The spare that was taken is replaced when none
// was taken for calm: whoever took it wants the processors until then.
func NewSlots(one func(context.Context) (Slot, error), calm time.Duration, log *slog.Logger) *Slots {
	return &Slots{one: one, calm: calm, log: log, taken: make(chan struct{}, 1)}
}

// Make makes a slot; where that fails, as for want of a free one, it gives the
// spare.
func (s *Slots) Make(ctx context.Context) (Slot, error) {
	made, err := s.one(ctx)
	if err == nil {
		return made, nil
	}
	if spare := s.swap(nil); spare != nil {
		s.kick()
		return spare, nil
	}
	return nil, err
}

// Take gives the spare, or makes a slot where there is none.
func (s *Slots) Take(ctx context.Context) (Slot, error) {
	defer s.kick()
	if spare := s.swap(nil); spare != nil {
		return spare, nil
	}
	return s.one(ctx)
}

// Run keeps the spare until ctx ends, and closes it then: no next hostd would
// adopt it.
func (s *Slots) Run(ctx context.Context) error {
	defer func() {
		if err := s.drop(); err != nil {
			s.log.Warn("the spare slot could not be removed; the next start sweeps it", "error", err)
		}
	}()
	calm := time.NewTimer(s.calm)
	defer calm.Stop()
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-s.taken:
			calm.Reset(s.calm)
		case <-calm.C:
			if err := s.fill(ctx); err != nil && ctx.Err() == nil {
				s.log.Warn("no slot could be made ahead; it is tried again when one was needed", "error", err)
			}
		}
	}
}

// fill makes the spare if there is none. Run is the only one to call it.
func (s *Slots) fill(ctx context.Context) error {
	s.mu.Lock()
	there := s.spare != nil
	s.mu.Unlock()
	if there {
		return nil
	}
	made, err := s.one(ctx)
	if err == nil {
		s.swap(made)
	}
	return err
}

func (s *Slots) drop() error {
	spare := s.swap(nil)
	if spare == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), destroyTime)
	defer cancel()
	return spare.Close(ctx)
}

func (s *Slots) swap(to Slot) (was Slot) {
	s.mu.Lock()
	defer s.mu.Unlock()
	was, s.spare = s.spare, to
	return was
}

func (s *Slots) kick() {
	select {
	case s.taken <- struct{}{}:
	default:
	}
}
