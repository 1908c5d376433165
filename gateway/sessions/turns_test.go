package sessions

import (
	"context"
	"errors"
	"testing"
)

// One without room waits until those are answered that had room and did not
// count on it, and for nobody else.
func TestTurns(t *testing.T) {
	var all turns
	two := func(others int) bool { return others < 2 }
	first, second := all.enter("p", two), all.enter("p", two)
	elsewhere := all.enter("q", two)
	over, keyed := all.enter("p", two), all.enter("p", two)
	if !first.room || !second.room || !elsewhere.room || over.room || keyed.room {
		t.Errorf("room: %v %v %v, beyond %v %v", first.room, second.room, elsewhere.room, over.room, keyed.room)
	}
	for _, free := range []*turn{first, second, elsewhere} {
		if err := free.wait(t.Context()); err != nil {
			t.Error(err)
		}
	}
	done := make(chan error, 1)
	go func() { done <- over.wait(t.Context()) }()
	first.answered()
	select {
	case err := <-done:
		t.Fatalf("went before the second had its answer: %v", err)
	default:
	}
	left := errors.New("left")
	ctx, leave := context.WithCancelCause(t.Context())
	leave(left)
	if err := keyed.wait(ctx); !errors.Is(err, left) {
		t.Errorf("a client that left: %v", err)
	}
	second.leave() // without having been answered: it is as good
	if err := <-done; err != nil {
		t.Error(err)
	}
	for _, one := range []*turn{keyed, first, elsewhere, over} {
		one.leave()
	}
	if len(all.now) != 0 {
		t.Errorf("still under way: %v", all.now)
	}
}
