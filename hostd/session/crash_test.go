package session

import (
	"context"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// restart lets a new hostd take the machines over.
func (r *rig) restart() {
	r.t.Helper()
	r.host.Close()
	r.pool = pool.New(pool.Config{MaxTotal: 8, Parallel: 1}, r.boot, quiet())
	r.host = r.newHost()
	err := r.host.Adopt(r.t.Context(), func(_ context.Context, h machine.Handle) (*pool.Guest, error) {
		var i int
		if _, err := fmt.Sscanf(h.Spec.ID, "m%d", &i); err != nil {
			return nil, err
		}
		f := r.guest(i)
		select {
		case <-f.done:
			return nil, machine.ErrGone
		default:
			return f.guest(), nil
		}
	}, func(s machine.Spec) bool { return s.Template != "old" })
	if err != nil {
		r.t.Fatal(err)
	}
}

// A machine that served a session must not be taken for a waiting one by the
// next hostd, whenever this one dies and whatever the agent claims: from the
// end on the book does not know it, and the sweep ends it.
func TestUsedMachineLeavesTheBookWithItsSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		r.acquire("s", session.Shell, time.Minute)
		r.guest(0).slow = make(chan struct{}) // the machine is still ending when hostd dies
		if _, err := r.host.End(t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1, Reason: session.Released}); err != nil {
			t.Fatal(err)
		}
		if left, _ := r.book.Machines(); len(left) != 0 {
			t.Errorf("the book still offers %v", left)
		}
		close(r.guest(0).slow)
		r.close()
	})
}

func TestWhatFailsToBeginIsReplacedOnceAndForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		bad, good := newFakeGuest("bad", session.Shell), newFakeGuest("good", session.Shell)
		bad.refuse = true
		r.guests = []*fakeGuest{bad, good}
		for _, f := range r.guests {
			if err := r.book.PutMachine(f.Handle()); err != nil {
				t.Fatal(err)
			}
			r.pool.Offer(f.guest())
		}
		st := r.acquire("s", session.Shell, time.Minute)
		if !st.Warm || good.started.SessionID != "s" {
			t.Errorf("%+v, started %+v", st, good.started)
		}
		if left, _ := r.book.Machines(); len(left) != 1 || left[0].Spec.ID != "good" {
			t.Errorf("the book has %v", left)
		}
		synctest.Wait()
		if bad.ended() != 1 {
			t.Errorf("the bad machine was stopped %d times", bad.ended())
		}
		r.fail = fmt.Errorf("no image")
		if _, _, err := r.host.Acquire(t.Context(), order1("t", session.Both, time.Minute)); !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("a host that cannot boot answers %v", err) // so that the gateway asks another
		}
		r.close()
	})
}

func TestRestartWithHungAndHalfBegunMachines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 8)
		for _, id := range []string{"hung", "half", "fine"} {
			r.acquire(id, session.Shell, time.Hour)
		}
		r.guest(0).set(func(f *fakeGuest) { f.hang = true })
		r.guest(1).set(func(f *fakeGuest) { f.started = agentlink.Start{} }) // hostd died before the agent heard of the session
		begin := time.Now()
		r.restart()
		if took := time.Since(begin); took > stateTime {
			t.Errorf("the start took %s", took)
		}
		inv, err := r.host.Inventory(t.Context())
		if err != nil || len(inv.Sessions) != 1 || inv.Sessions[0].SessionID != "fine" || len(inv.Tombstones) != 2 {
			t.Errorf("%+v, %v", inv, err)
		}
		synctest.Wait()
		if n := r.pool.Ready()[session.Shell]; n != 0 || r.guest(0).ended() != 1 || r.guest(1).ended() != 1 {
			t.Errorf("%d wait, stopped %d and %d times", n, r.guest(0).ended(), r.guest(1).ended())
		}
		r.close()
	})
}

func TestSetupEndsOnceAndStaysEnded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		a := order1("s", session.Shell, time.Hour)
		a.Setup = []string{"true"}
		if _, _, err := r.host.Acquire(t.Context(), a); err != nil {
			t.Fatal(err)
		}
		r.acquire("plain", session.Shell, time.Hour)
		notices, stop := r.host.Watch()
		say := func(i int, st session.SetupStatus, text string) {
			r.guest(i).tell(agentlink.Notice{Setup: &agentlink.Setup{Status: st, Error: text}})
			synctest.Wait()
		}
		say(0, session.SetupRunning, "")
		say(0, "what?", "")
		say(0, session.SetupFailed, strings.Repeat("é", maxSetupError))
		say(0, session.SetupDone, "") // once is enough
		say(1, session.SetupDone, "") // never asked for
		r.guest(0).tell(agentlink.Notice{Event: &event.Event{Type: event.Exec}})
		synctest.Wait()
		if n := len(notices); n != 1 {
			t.Errorf("%d notices for the gateway", n)
		}
		stop()
		r.restart()
		st, err := r.host.Get(t.Context(), "s")
		if err != nil || st.Setup != session.SetupFailed || len(st.SetupErr) > maxSetupError+8 || st.SetupErr == "" {
			t.Errorf("after a restart: %q %d bytes, %v", st.Setup, len(st.SetupErr), err)
		}
		if st, err := r.host.Get(t.Context(), "plain"); err != nil || st.Setup != "" {
			t.Errorf("a session without setup: %+v %v", st, err)
		}
		r.close()
	})
}

// A timeout that is patched to a moment in the past ends the session now, and
// what it ran until now is billed.
func TestTimeoutPatchedIntoThePast(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		begin := time.Now()
		r.acquire("s", session.Shell, time.Hour)
		time.Sleep(30 * time.Minute) // the bubble's clock
		_, err := r.host.Patch(t.Context(), "s", hostlink.Settings{Version: 2, ExpiresAt: begin.Add(time.Minute)})
		if err != nil && !apierr.Is(err, apierr.SessionNotRunning) {
			t.Error(err)
		}
		synctest.Wait()
		tomb, ok, _ := r.book.Tombstone("s")
		if !ok || tomb.Reason != session.TimedOut || tomb.EndedAt.Sub(begin) != 30*time.Minute {
			t.Errorf("ended %v: %s after its begin", ok, tomb.EndedAt.Sub(begin))
		}
		r.close()
	})
}

func TestTombstoneOutlivesAFullDisk(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		r.acquire("s", session.Shell, time.Minute)
		r.book.mu.Lock()
		r.book.full = true
		r.book.mu.Unlock()
		time.Sleep(2 * time.Minute)
		if r.guest(0).ended() != 1 {
			t.Error("the machine waits for the disk")
		}
		inv, err := r.host.Inventory(t.Context())
		if err != nil || len(inv.Tombstones) != 1 || inv.Tombstones[0].Reason != session.TimedOut {
			t.Errorf("%+v %v", inv, err)
		}
		if _, _, err := r.host.Acquire(t.Context(), order1("s", session.Shell, time.Minute)); !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("it began again: %v", err)
		}
		r.book.mu.Lock()
		r.book.full = false
		r.book.mu.Unlock()
		time.Sleep(2 * buryAgain)
		if _, ok, _ := r.book.Tombstone("s"); !ok {
			t.Error("the tombstone was never written")
		}
		r.close()
	})
}

func TestRestartFinishesLogs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		r.acquire("runs", session.Shell, time.Hour)
		for _, id := range []string{"died", "unknown"} {
			_ = r.events.Append(id, event.Event{Type: event.Exec})
		}
		if err := r.book.End(hostlink.Tombstone{SessionID: "died", Epoch: 1, Reason: session.Released}, ""); err != nil {
			t.Fatal(err)
		}
		r.restart()
		for id, want := range map[string]string{"runs": "", "died": "Session ended: released", "unknown": "The session is not on this host any more."} {
			if e, _, ended := r.events.last(id); ended != (want != "") || ended && e.Text != want {
				t.Errorf("log of %s: %q, ended %v", id, e.Text, ended)
			}
		}
		r.close()
	})
}

func TestHostileNotices(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		r.acquire("s", session.Browser, time.Hour)
		minus := -3
		r.guest(0).tell(agentlink.Notice{Clients: &minus})
		r.guest(0).tell(agentlink.Notice{Event: &event.Event{Type: "no such type"}})
		r.guest(0).tell(agentlink.Notice{Event: &event.Event{Type: event.Exec, At: time.Now().Add(24 * time.Hour)}})
		synctest.Wait()
		if st, err := r.host.Get(t.Context(), "s"); err != nil || st.Clients != 0 {
			t.Errorf("%+v %v", st, err)
		}
		e, n, _ := r.events.last("s")
		if n != 2 || e.Type != event.Exec || e.At.After(time.Now()) {
			t.Errorf("%d events, the last %+v", n, e)
		}
		r.close()
	})
}

func TestClosedHostTakesNoOrders(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(t, 4)
		r.acquire("s", session.Shell, time.Hour)
		r.host.Close()
		if _, _, err := r.host.Acquire(t.Context(), order1("t", session.Shell, time.Hour)); !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("Acquire: %v", err)
		}
		if _, err := r.host.End(t.Context(), hostlink.Tombstone{SessionID: "s", Epoch: 1}); !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("End: %v", err)
		}
		if _, err := r.host.Get(t.Context(), "s"); !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("Get: %v", err)
		}
		r.close()
	})
}
