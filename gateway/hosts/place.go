package hosts

import (
	"context"
	"errors"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
)

// Record is what this package needs of the replicated record.
type Record interface {
	// WatchSession finds a session as this gateway knows it; changed closes when
	// it may be another.
	WatchSession(id string) (s session.Session, ok bool, changed <-chan struct{})
	// Fresh returns once WatchSession tells all that was answered anywhere before
	// the call; minIndex 0.
	Fresh(ctx context.Context, minIndex uint64) error
}

// place follows one session from host to host.
type place struct {
	record Record
	opened session.Session // as the caller has it: this gateway's record may be behind
}

// now is the session as it is placed at this moment.
func (p place) now() (session.Session, <-chan struct{}) {
	s, ok, changed := p.record.WatchSession(p.opened.ID)
	if !ok || s.Epoch < p.opened.Epoch {
		s = p.opened
	}
	return s, changed
}

var _ link.Place = place{}.still

// still says whether the session's machine stands still.
func (p place) still() (bool, <-chan struct{}) {
	s, changed := p.now()
	return still(s), changed
}

func still(s session.Session) bool {
	return !s.Status.Ended() && (s.Op != nil || s.Status == session.Paused)
}

// errPlace: the session is, or will be, somewhere else; the stream asks the
// record before it dials again.
var errPlace = errors.New("the session's place changed meanwhile")

// gone marks an error as final, so that the stream ends instead of dialling
// again.
type gone struct{ error }

func (gone) Permanent() bool { return true }
func (g gone) Unwrap() error { return g.error }

func ended(s session.Session) error {
	return gone{apierr.New(apierr.SessionNotRunning, "session %s has ended", s.ID)}
}

// while gives a context that ends when the session is no longer placed as in
// s, which was as it is until changed closes: a dial to the place it has left is
// not waited for.
func (p place) while(ctx context.Context, s session.Session, changed <-chan struct{}) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	go func() {
		for now := s; samePlace(now, s); {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			now, changed = p.now()
		}
		cancel(errPlace)
	}()
	return ctx, func() { cancel(nil) }
}

func samePlace(now, s session.Session) bool {
	return now.Host == s.Host && now.Epoch == s.Epoch && !now.Status.Ended() && !still(now)
}

// judge decides on a host's word that it does not have the session of s: it is
// final only when the record, freshly asked, still says that it has.
func (p place) judge(ctx context.Context, s session.Session, refusal error) error {
	if err := p.record.Fresh(ctx, 0); err != nil {
		return err
	}
	switch now, _ := p.now(); {
	case now.Status.Ended():
		return ended(now)
	case samePlace(now, s):
		return gone{refusal}
	}
	return errPlace
}
