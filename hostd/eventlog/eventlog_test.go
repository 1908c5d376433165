package eventlog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/store"
)

func open(t interface {
	Fatal(...any)
	Cleanup(func())
}, path string) *Log {
	db, err := store.Open(path, store.Options{NoSync: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return New(db)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestPagesFilterAndGoOn(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "e.db"))
	for i := range 10 {
		typ := event.Exec
		if i%2 == 0 {
			typ = event.Lifecycle
		}
		must(t, l.Append("s", event.Event{Type: typ, Text: fmt.Sprint(i)}))
	}
	must(t, l.Append("other", event.Event{Type: event.Exec}))
	p, err := l.Page("s", 0, nil, 4)
	must(t, err)
	if len(p.Data) != 4 || p.Data[0].Seq != 1 || p.NextAfter != 4 {
		t.Fatalf("first page %+v", p)
	}
	p, err = l.Page("s", p.NextAfter, []event.Type{event.Exec}, 100)
	must(t, err)
	if len(p.Data) != 3 || p.Data[0].Seq != 6 || p.NextAfter != 10 {
		t.Fatalf("filtered page %+v", p)
	}
	p, err = l.Page("nobody", 7, nil, 5)
	must(t, err)
	if len(p.Data) != 0 || p.NextAfter != 7 || p.Data == nil {
		t.Fatalf("empty page %+v", p)
	}
}

func TestNoticesAreStoredOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "e.db")
	rapid.Check(t, func(rt *rapid.T) {
		id := rapid.StringMatching("[a-z]{8}").Draw(rt, "session")
		l := open(t, path+id+fmt.Sprint(time.Now().UnixNano()))
		want := 0
		highest := uint64(0)
		for range rapid.IntRange(1, 20).Draw(rt, "notices") {
			n := rapid.Uint64Range(1, 12).Draw(rt, "n")
			if n > highest {
				highest = n
				want++
			}
			if err := l.AppendNotice(id, n, event.Event{Type: event.Exec}); err != nil {
				rt.Fatal(err)
			}
		}
		p, err := l.Page(id, 0, nil, 1000)
		if err != nil || len(p.Data) != want || l.LastNotice(id) != highest {
			rt.Fatalf("%d events, want %d; last notice %d, want %d; %v", len(p.Data), want, l.LastNotice(id), highest, err)
		}
	})
}

func TestOldestAreDroppedAndNumbersGoOn(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "e.db"))
	const extra, writers = 8, 139
	var all sync.WaitGroup
	for range writers { // at once, so that they share commits
		all.Go(func() {
			for range (event.MaxPerSession + extra) / writers {
				if err := l.Append("s", event.Event{Type: event.Exec}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	var kept []event.Event
	for after := uint64(0); ; {
		p, err := l.Page("s", after, nil, math.MaxInt)
		must(t, err)
		if len(p.Data) == 0 {
			break
		}
		if len(p.Data) > event.MaxPage {
			t.Fatalf("a page of %d events", len(p.Data))
		}
		kept, after = append(kept, p.Data...), p.NextAfter
	}
	if len(kept) != event.MaxPerSession || kept[0].Seq != extra+1 || kept[len(kept)-1].Seq != event.MaxPerSession+extra {
		t.Fatalf("%d events from %d to %d", len(kept), kept[0].Seq, kept[len(kept)-1].Seq)
	}
}

func TestLargeEventsAreCut(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "e.db"))
	big, err := json.Marshal(map[string]string{"x": strings.Repeat("é", event.MaxEventBytes)})
	must(t, err)
	must(t, l.Append("s", event.Event{Type: event.Exec, Text: strings.Repeat("\x01", event.MaxEventBytes),
		URL: strings.Repeat("ü", event.MaxEventBytes), Level: strings.Repeat("l", event.MaxEventBytes), TabID: strings.Repeat("<", event.MaxEventBytes), Data: big}))
	p, err := l.Page("s", 0, nil, 1)
	must(t, err)
	raw, err := json.Marshal(p.Data[0])
	must(t, err)
	if len(raw) > event.MaxEventBytes || !strings.Contains(string(p.Data[0].Data), "truncated") || strings.ContainsRune(p.Data[0].URL, '\uFFFD') {
		t.Fatalf("%d bytes: %.200s", len(raw), raw)
	}
}

func TestFollowSeesEverythingAndEnds(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "e.db"))
	must(t, l.Append("s", event.Event{Type: event.Lifecycle, Text: "old"}))
	const n = 200
	type seen struct {
		from uint64
		got  []event.Event
	}
	results := make(chan seen)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	for _, from := range []uint64{0, 1, hostlink.FromNow} {
		go func() {
			s := seen{from: from}
			for e, err := range l.Follow(ctx, "s", from, nil) {
				if err != nil {
					t.Error(err)
				}
				s.got = append(s.got, e)
			}
			results <- s
		}()
	}
	go func() {
		for i := range n {
			if err := l.Append("s", event.Event{Type: event.Exec, Text: fmt.Sprint(i)}); err != nil {
				t.Error(err)
			}
		}
		if err := l.Finish("s", event.Event{Type: event.Lifecycle, Text: "last"}); err != nil {
			t.Error(err)
		}
	}()
	for range 3 {
		s := <-results
		if ctx.Err() != nil {
			t.Fatal("the streams did not end with the session")
		}
		for i := 1; i < len(s.got); i++ {
			if s.got[i].Seq != s.got[i-1].Seq+1 {
				t.Fatalf("after %d comes %d", s.got[i-1].Seq, s.got[i].Seq)
			}
		}
		if s.from != hostlink.FromNow && len(s.got) != n+2-int(s.from) {
			t.Errorf("from %d: %d events", s.from, len(s.got))
		}
	}
}

func TestForgetKeepsWhatIsYoungOrRuns(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "e.db"))
	now := time.Now()
	for id, ended := range map[string]time.Time{"old": now.Add(-time.Hour), "young": now, "running": {}} {
		must(t, l.Append(id, event.Event{Type: event.Exec}))
		if !ended.IsZero() {
			must(t, l.Finish(id, event.Event{At: ended, Type: event.Lifecycle}))
		}
	}
	must(t, l.Forget(now.Add(-time.Minute)))
	for id, want := range map[string]int{"old": 0, "young": 2, "running": 1} {
		p, err := l.Page(id, 0, nil, 10)
		must(t, err)
		if len(p.Data) != want {
			t.Errorf("%s has %d events, want %d", id, len(p.Data), want)
		}
	}
}

func TestFinishedLogTakesNothingMore(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "e.db"))
	must(t, l.Append("s", event.Event{Type: event.Exec}))
	must(t, l.Append("open", event.Event{Type: event.Exec}))
	if ids, err := l.Unfinished(); err != nil || len(ids) != 2 {
		t.Errorf("unfinished %v %v", ids, err)
	}
	for range 2 {
		must(t, l.Finish("s", event.Event{Type: event.Lifecycle, Text: "end"}))
	}
	must(t, l.AppendNotice("s", 99, event.Event{Type: event.Exec, Text: "late"}))
	p, err := l.Page("s", 0, nil, 10)
	must(t, err)
	if len(p.Data) != 2 || p.Data[1].Text != "end" {
		t.Errorf("%+v", p.Data)
	}
	if ids, err := l.Unfinished(); err != nil || len(ids) != 1 || ids[0] != "open" {
		t.Errorf("unfinished %v %v", ids, err)
	}
}

func TestFollowEndsOrSaysWhyNot(t *testing.T) {
	l := open(t, filepath.Join(t.TempDir(), "e.db"))
	must(t, l.Append("s", event.Event{Type: event.Exec}))
	for range l.Follow(t.Context(), "nobody", 0, nil) {
		t.Error("a session without a log has an event")
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	stop := errors.New("stop")
	defer cancel(nil)
	var last error
	for e, err := range l.Follow(ctx, "s", 0, nil) {
		if last = err; e.Seq == 1 {
			cancel(stop)
		}
	}
	if !errors.Is(last, stop) {
		t.Errorf("a stream that was cut ends with %v, as if the session had", last)
	}
	// One that was never reached is as good as the last.
	must(t, l.Finish("s", event.Event{Type: event.Lifecycle}))
	for range l.Follow(t.Context(), "s", 1000, nil) {
		t.Error("an event came twice")
	}
	if len(l.waiting) != 0 {
		t.Errorf("%d logs are still waited for", len(l.waiting))
	}
}
