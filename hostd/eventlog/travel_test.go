package eventlog

import (
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
)

// move takes the log of "s" over, page by page, as a target does.
func move(t *testing.T, from, to *Log, notice uint64, page int) {
	t.Helper()
	must(t, to.Begin("s", notice, 0))
	for after := uint64(0); after < from.Last("s"); {
		p, err := from.Page("s", after, nil, page)
		must(t, err)
		must(t, to.Add("s", p.Data))
		must(t, to.Add("s", p.Data)) // a page twice is there once
		after = p.NextAfter
	}
}

func TestNumbersGoOnWhereverTheLogGoes(t *testing.T) {
	a, b := open(t, filepath.Join(t.TempDir(), "a.db")), open(t, filepath.Join(t.TempDir(), "b.db"))
	for i := range 7 {
		must(t, a.AppendNotice("s", uint64(i+1), event.Event{Type: event.Exec, Text: fmt.Sprint(i)}))
	}
	move(t, a, b, a.LastNotice("s"), 3)
	must(t, a.Leave("s"))
	must(t, b.AppendNotice("s", 7, event.Event{Type: event.Exec, Text: "told before"}))
	must(t, b.AppendNotice("s", 8, event.Event{Type: event.Exec, Text: "7"}))
	move(t, b, a, 0, 100) // and back, to another agent
	must(t, b.Leave("s"))
	must(t, a.AppendNotice("s", 1, event.Event{Type: event.Exec, Text: "8"}))
	p, err := a.Page("s", 0, nil, 100)
	must(t, err)
	if len(p.Data) != 9 || p.NextAfter != 9 {
		t.Fatalf("%+v", p)
	}
	for i, e := range p.Data {
		if e.Seq != uint64(i+1) || e.Text != fmt.Sprint(i) {
			t.Errorf("event %d: %+v", i, e)
		}
	}
}

func TestOldestDroppedBeforeAMoveStayDropped(t *testing.T) {
	a, b := open(t, filepath.Join(t.TempDir(), "a.db")), open(t, filepath.Join(t.TempDir(), "b.db"))
	must(t, a.Begin("s", 0, 41))
	must(t, a.Append("s", event.Event{Type: event.Exec}))
	move(t, a, b, 0, 100)
	must(t, b.Append("s", event.Event{Type: event.Exec}))
	p, err := b.Page("s", 0, nil, 100)
	must(t, err)
	if len(p.Data) != 2 || p.Data[0].Seq != 42 || p.Data[1].Seq != 43 {
		t.Errorf("%+v", p)
	}
}

// Whoever follows a log that leaves must not take that for the session's end.
func TestFollowersOfALogThatLeavesAreCut(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "e.db"))
	must(t, l.Append("s", event.Event{Type: event.Exec}))
	end := make(chan error, 1)
	seen := make(chan bool, 1)
	go func() {
		var last error
		for _, err := range l.Follow(t.Context(), "s", 0, nil) {
			if last = err; err == nil {
				seen <- true
			}
		}
		end <- last
	}()
	<-seen
	must(t, l.Leave("s"))
	if err := <-end; !apierr.Is(err, apierr.Unavailable) {
		t.Errorf("a follower was told %v", err)
	}
	if _, err := l.Page("s", 0, nil, 10); !errors.Is(err, errGone) {
		t.Errorf("a page: %v", err)
	}
	for _, err := range l.Follow(t.Context(), "s", 0, nil) {
		if err == nil {
			t.Error("an event of a log that left")
		}
	}
	if ids, err := l.Unfinished(); err != nil || len(ids) != 0 {
		t.Errorf("unfinished: %v %v", ids, err)
	}
	must(t, l.Append("s", event.Event{Type: event.Exec})) // too late
	must(t, l.Finish("s", event.Event{Type: event.Lifecycle}))
	if n := l.Last("s"); n != 0 {
		t.Errorf("%d events", n)
	}
	must(t, l.Forget(time.Now().Add(time.Hour)))
	if _, found := l.head("s"); found {
		t.Error("the mark of a log that left long ago stays")
	}
}
