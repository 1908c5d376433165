package sessions

import (
	"context"
	"iter"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
)

// Events reads a page of a session's log from the host that keeps it, also
// after the session's end.
func (s *Service) Events(ctx context.Context, caller accounts.Caller, id string, after uint64, types []event.Type, limit int) (hostlink.EventPage, error) {
	c, err := s.logOf(ctx, caller, id)
	if err != nil {
		return hostlink.EventPage{}, err
	}
	return c.Events(ctx, id, after, types, limit)
}

// FollowEvents yields events as they come; after nil means from now on. A host
// that is away for a moment, as when hostd restarts, is a pause: the stream
// goes on after the last event it gave.
func (s *Service) FollowEvents(ctx context.Context, caller accounts.Caller, id string, after *uint64, types []event.Type) (iter.Seq2[event.Event, error], error) {
	if _, err := s.logOf(ctx, caller, id); err != nil {
		return nil, err
	}
	from := hostlink.FromNow
	if after != nil {
		from = *after
	}
	return func(yield func(event.Event, error) bool) {
		var broken time.Time // since when; zero while it goes well
		for {
			var failed error
			at, _, _ := s.Watch(id)
			for e, err := range s.followOnce(ctx, caller, id, from, types) {
				if failed = err; err != nil {
					break
				}
				from, broken = e.Seq, time.Time{}
				if !yield(e, nil) {
					return
				}
			}
			if failed == nil {
				return
			}
			if broken.IsZero() {
				broken = time.Now()
			}
			code := apierr.From(failed).Code // a cut stream has none of its own: Internal
			passing := code == apierr.Internal || code == apierr.Unavailable
			// Without an event there is no place to go on from, but for a session that
			// went elsewhere: its new host has none yet that came after.
			now, _, _ := s.Watch(id)
			lost := from == hostlink.FromNow && now.Epoch == at.Epoch
			if now.Epoch != at.Epoch && code == apierr.NotFound { // the host that it left says so
				passing = true
			}
			if !passing || ctx.Err() != nil || lost || time.Since(broken) > s.cfg.HostLostAfter {
				yield(event.Event{}, failed)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(followAgain):
			}
		}
	}, nil
}

// followAgain is the pause before a broken stream of events is asked for again.
const followAgain = 250 * time.Millisecond

func (s *Service) followOnce(ctx context.Context, caller accounts.Caller, id string, from uint64, types []event.Type) iter.Seq2[event.Event, error] {
	c, err := s.logOf(ctx, caller, id)
	if err != nil {
		return func(yield func(event.Event, error) bool) { yield(event.Event{}, err) }
	}
	return c.FollowEvents(ctx, id, from, types)
}

func (s *Service) logOf(ctx context.Context, caller accounts.Caller, id string) (*hostlink.Client, error) {
	found, err := s.find(ctx, caller, id)
	if err != nil {
		return nil, err
	}
	return s.hosts.Client(found.Host)
}
