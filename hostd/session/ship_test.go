package session

import (
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// While disk layers are stored and shipped the session runs on: its machine, its
// tunnels and its time. What takes long is done again for what was written
// meanwhile, and not for ever.
func TestLayersAreShippedWhileTheSessionRuns(t *testing.T) {
	for _, kind := range []session.OpKind{session.Move, session.Pause} {
		synctest.Test(t, func(t *testing.T) {
			all, o := prepare(t, kind, map[session.OpKind]string{session.Move: "b"}[kind], true, false, false)
			a, b := all[0], all[1]
			a.snaps.slow = 10 * time.Second
			if o.to != nil {
				if err := o.prepare(); err != nil {
					t.Fatal(err)
				}
			}
			source, answer := a.alive()[0], make(chan error, 1)
			go func() {
				err := o.capture()
				if err == nil && a.host.find("s").rec.Op.Captured.CaptureMs > 1000 {
					err = errors.New("all of it counts as the capture's time")
				}
				answer <- err
			}()
			for round := 1; round <= shipRounds; round++ {
				time.Sleep(9 * time.Second)
				synctest.Wait()
				source.mu.Lock()
				if source.still || source.frozen || source.layers != round {
					t.Errorf("%s, round %d: still %v, frozen %v, %d layers", kind, round, source.still, source.frozen, source.layers)
				}
				source.mu.Unlock()
				if !a.host.find("s").gate.isOpen() {
					t.Errorf("%s, round %d: no tunnel may begin", kind, round)
				}
				if n := len(b.snaps.Parts("s")); o.to != nil && n != round-1 {
					t.Errorf("round %d: %d layers came ahead", round, n)
				}
				time.Sleep(time.Second)
			}
			synctest.Wait()
			if err := <-answer; err != nil || !source.still {
				t.Errorf("%s: %v, still %v", kind, err, source.still)
			}
			if !slices.Equal(source.stay, []int{0, 1, 2}) {
				t.Errorf("%s: of the layers stayed %v", kind, source.stay)
			}
			o.holder = o.from
			o.tell(t, a) // aborted
			if o.to != nil {
				o.tell(t, b)
			}
			synctest.Wait()
			if stood := a.host.find("s").rec.Stood; stood != 0 {
				t.Errorf("%s: its time stood still for %s, and it did not", kind, stood)
			}
			o.settle(t, all)
			o.check(t, all)
			for _, w := range all {
				w.end()
			}
		})
	}
}

// An abort calls the shipping off, and the session has never stood still.
func TestShippingIsCalledOff(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Move, "b", true, false, false)
		o.holder = o.from
		a := all[0]
		a.snaps.slow = time.Hour
		if err := o.prepare(); err != nil {
			t.Fatal(err)
		}
		answer := make(chan error, 1)
		go func() { answer <- o.capture() }()
		time.Sleep(20 * time.Second)
		o.tell(t, a)
		o.tell(t, all[1])
		if err := <-answer; err == nil {
			t.Error("it was captured")
		}
		synctest.Wait()
		if stood := a.host.find("s").rec.Stood; stood != 0 {
			t.Errorf("its time stood still for %s", stood)
		}
		o.settle(t, all)
		o.check(t, all)
		for _, w := range all {
			w.end()
		}
	})
}

// Only what is expected comes ahead, and nothing of it outlives the operation's
// deadline or the hostd.
func TestLayersThatNobodyWaitsFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		all, o := prepare(t, session.Move, "b", true, false, false)
		b := all[1]
		ahead := func(id, op string) error {
			return b.host.Ahead(t.Context(), id, op, strings.NewReader("ll"))
		}
		if err := ahead("s", "op"); !apierr.Is(err, apierr.NotFound) {
			t.Errorf("before it is expected: %v", err)
		}
		for range 2 { // the same order again
			if err := o.prepare(); err != nil {
				t.Fatal(err)
			}
		}
		for name, op := range map[string]string{"s": "other", "other": "op"} {
			if err := ahead(name, op); !apierr.Is(err, apierr.NotFound) {
				t.Errorf("session %s, operation %s: %v", name, op, err)
			}
		}
		if err := ahead("s", "op"); err != nil || len(b.host.Parts("s")) != 2 {
			t.Errorf("%v, parts %v", err, b.host.Parts("s"))
		}
		in, out := io.Pipe()
		late := make(chan error, 1)
		go func() { late <- b.host.Ahead(t.Context(), "s", "op", in) }() // still on its way at the deadline
		time.Sleep(2 * time.Minute)
		out.Close()
		if err := <-late; !apierr.Is(err, apierr.NotFound) {
			t.Errorf("after the deadline: %v", err)
		}
		if n := b.snaps.begun(); n != 0 {
			t.Errorf("%d are left after the deadline", n)
		}
		o.id = "another"
		if err := o.prepare(); err != nil {
			t.Fatal(err)
		}
		if err := ahead("s", "another"); err != nil {
			t.Error(err)
		}
		for _, w := range all {
			w.end()
		}
		if n := b.snaps.begun(); n != 0 {
			t.Errorf("%d outlived their hostd", n)
		}
	})
}

// A target that refuses what comes ahead, or cannot be reached then, gets all of
// it after the stop.
func TestTargetThatTakesNothingAhead(t *testing.T) {
	for what, spoil := range map[string]func(o *operation){
		"full":    func(o *operation) { o.to.cut.arm(1, fail) }, // the next step there: taking layers in
		"forgets": func(o *operation) { o.to.host.letGo(o.id) },
	} {
		synctest.Test(t, func(t *testing.T) {
			all, o := prepare(t, session.Move, "b", true, false, false)
			o.holder = o.from
			err := o.prepare()
			if err == nil {
				spoil(o)
				err = o.capture()
			}
			if err == nil {
				err = o.restore()
			}
			if o.committed = err == nil; !o.committed {
				t.Errorf("%s: %v", what, err)
			}
			o.tell(t, o.to)
			o.tell(t, o.from)
			o.settle(t, all)
			o.check(t, all)
			for _, w := range all {
				w.end()
			}
		})
	}
}
