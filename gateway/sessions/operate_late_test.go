package sessions

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// An inventory may be older than the record: what an operation is about to
// change, or has just changed, is neither lost nor stray.
func TestReconcileLeavesOperationsAlone(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	r.use.cfg.CreateDeadline = -undoTime // nothing is too young
	compare := func(host string, sessions ...hostlink.Status) {
		t.Helper()
		c, err := r.hosts.Client(host)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		inv := hostlink.Inventory{Host: host, Sessions: sessions}
		for _, h := range r.world.hosts {
			inv.Snapshots = append(inv.Snapshots, h.inventory().Snapshots...)
		}
		r.use.compare(t.Context(), host, c, inv, time.Now())
	}
	begun, goOn := r.held(r.host, "capture")
	done := make(chan error)
	go func() { done <- r.operate(session.Move, s.ID, "h2") }()
	<-begun
	compare("h1")                                                                        // the source's machine is not to be seen
	compare("h1", hostlink.Status{SessionID: s.ID, Epoch: 1})                            // not held yet
	compare("h2", hostlink.Status{SessionID: s.ID, Epoch: 2})                            // the target is at work
	compare("h2", held(s.ID, 2, r.session(s.ID).Op.ID, hostlink.Target))                 // and done
	compare("h1", held(s.ID, 1, r.session(s.ID).Op.ID, hostlink.Source))                 // and the source waits
	compare("h2", hostlink.Status{SessionID: s.ID, Epoch: 2}, hostlink.Status{Epoch: 9}) // beside a stranger
	if now := r.session(s.ID); now.Status != session.Running || now.Op == nil || !r.host.has(s.ID) {
		t.Fatalf("%+v", now)
	}
	goOn()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if _, err := r.use.Pause(t.Context(), r.caller, s.ID); err != nil {
		t.Fatal(err)
	}
	compare("h2", hostlink.Status{SessionID: s.ID, Epoch: 2}) // as it was before the pause
	if now := r.session(s.ID); now.Status != session.Paused {
		t.Fatalf("%+v", now)
	}
	if len(r.second().inventory().Snapshots) == 0 {
		t.Error("the snapshot of a paused session was deleted")
	}
}

func held(id string, epoch uint64, op string, role hostlink.Role) hostlink.Status {
	return hostlink.Status{SessionID: id, Epoch: epoch, Held: &hostlink.Held{OpID: op, Role: role}}
}

// A machine that was resumed a moment ago may be missing in an inventory made
// before: the session's age does not tell.
func TestAResumedSessionIsYoungAgain(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.paused("s", time.Hour, false)
	asked := time.Now()
	before := r.host.inventory()
	v, err := r.use.Resume(t.Context(), r.caller, "s")
	if err != nil {
		t.Fatal(err)
	}
	c, err := r.hosts.Client("h1")
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r.use.compare(t.Context(), "h1", c, before, asked)
	if now := r.session("s"); now.Status != session.Running || !v.Session.PlacedAt.Equal(now.PlacedAt) {
		t.Errorf("%+v", now)
	}
}

// A host that failed to hear a verdict hears it before its next order.
func TestTheNextOrderBringsTheVerdictBefore(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	lose := func(host *fakeHost, steps ...string) {
		r.setFault(host, func(at string) *fault {
			for _, step := range steps {
				if step == at {
					return &fault{refuse: apierr.New(apierr.Internal, "broken")}
				}
			}
			return nil
		})
	}
	lose(r.second(), "restore")
	lose(r.host, "verdict")
	if err := r.operate(session.Move, s.ID, "h2"); err == nil {
		t.Fatal("moved to a broken host")
	}
	if _, held := r.world.machines(s.ID); held != 1 {
		t.Fatalf("%d machines wait for a verdict", held)
	}
	lose(r.host)
	lose(r.second())
	if err := r.operate(session.Move, s.ID, "h2"); err != nil {
		t.Error(err)
	}
}

// Events that are followed from now on go on at the host that a session moved to.
func TestEventStreamFollowsAMove(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	following, moved := make(chan struct{}), make(chan struct{})
	r.setEvents(r.host, func(w http.ResponseWriter, _ *http.Request) {
		w.(http.Flusher).Flush()
		close(following)
		<-moved
		panic(http.ErrAbortHandler)
	})
	r.setEvents(r.second(), func(w http.ResponseWriter, req *http.Request) {
		if req.FormValue("after") != fmt.Sprint(hostlink.FromNow) {
			t.Errorf("asked after %s", req.FormValue("after"))
		}
		fmt.Fprintln(w, `{"seq":9,"type":"lifecycle"}`)
	})
	events, err := r.use.FollowEvents(t.Context(), r.caller, s.ID, nil, nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(moved)
		<-following
		if err := r.operate(session.Move, s.ID, "h2"); err != nil {
			t.Error(err)
		}
	}()
	var got []uint64
	for e, err := range events {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, e.Seq)
	}
	if len(got) != 1 || got[0] != 9 {
		t.Errorf("events %v", got)
	}
}

// A host that hangs holds its operation, and a request that waits for it, only
// until the deadline.
func TestDeadlineUndoesAnOperation(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	begun, goOn := r.held(r.second(), "restore")
	defer goOn()
	done := make(chan error)
	move := func() { done <- r.operate(session.Move, s.ID, "h2") }
	for deadline, hangs := 300*time.Millisecond, false; !hangs; deadline *= 2 { // a computer may be too busy to come to it
		r.use.cfg.OperationDeadline = deadline
		go move()
		select {
		case <-begun:
			hangs = true
		case err := <-done:
			wantCode(t, err, apierr.Timeout)
		}
	}
	now, err := r.use.Awake(t.Context(), s)
	if err != nil || now.Host != "h1" || now.Status != session.Running {
		t.Errorf("awake as %+v, %v", now, err)
	}
	wantCode(t, <-done, apierr.Timeout)
	if run, held := r.world.machines(s.ID); held != 0 || len(run) != 1 {
		t.Errorf("runs at %v, %d held", run, held)
	}
}

// A host that holds a machine for an operation of long ago is passed over; where
// there is no other, the request waits with patience and then fails.
func TestResumeBesideALeftover(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.use.cfg.OperationDeadline = 4 * time.Second
	s := r.paused("s", time.Minute, false)
	r.host.with(func() { r.host.targets["s"] = held("s", 2, "long ago", hostlink.Target) })
	r.second().setFull()
	var orders atomic.Int32
	r.setFault(r.host, func(string) *fault { orders.Add(1); return nil })
	if now, err := r.use.Awake(t.Context(), s); !apierr.Is(err, apierr.NoCapacity) || now.Status != session.Paused {
		t.Errorf("%s, %v", now.Status, err)
	}
	r.hosts.setAway("h2", true)
	begin := time.Now()
	_, err := r.use.Awake(t.Context(), s)
	wantCode(t, err, apierr.OperationInProgress)
	if n, took := orders.Load(), time.Since(begin); n > 60 || took < 400*time.Millisecond {
		t.Errorf("%d orders in %s", n, took)
	}
	r.run() // tells the host
	until(t, "the leftover is gone", func() bool { _, held := r.world.machines("s"); return held == 0 })
	if now, err := r.use.Awake(t.Context(), s); err != nil || now.Host != "h1" {
		t.Errorf("%+v, %v", now, err)
	}
}

// A request that waits for a move without memory goes on at the commit, before
// the target has heard of it: by then no kept stream to the old machine may be
// left for it to take.
func TestWaitingRequestsTakeNoStreamToLostMemory(t *testing.T) {
	t.Parallel()
	for name, class := range map[string]string{"portable": "", "memory": "c"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := twoHosts(t)
			r.hosts.setClass("h1", class)
			s := r.create()
			captures, capture := r.held(r.host, "capture")
			tells, tell := r.held(r.second(), "verdict")
			moved, awake := make(chan error), make(chan error)
			go func() {
				_, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{Host: "h2"})
				moved <- err
			}()
			<-captures
			go func() { _, err := r.use.Awake(t.Context(), s); awake <- err }()
			capture()
			<-tells
			if err := <-awake; err != nil {
				t.Error(err)
			}
			if got, want := r.hosts.timesForgotten(s.ID) > 0, class == ""; got != want {
				t.Errorf("kept streams dropped: %v, want %v", got, want)
			}
			tell()
			if err := <-moved; err != nil {
				t.Error(err)
			}
		})
	}
}

// Without a quorum the source's tombstone is no release while an operation is
// open: the commit may come first, and the session would live on.
func TestReleaseWithoutQuorumDuringAMove(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.use.cfg.OperationDeadline = 5 * time.Second // so long the move asks the record for a verdict
	s := r.create()
	begun, goOn := r.held(r.second(), "restore")
	moved := make(chan error)
	go func() {
		_, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{Host: "h2"})
		moved <- err
	}()
	<-begun
	if err := r.record.Close(); err != nil {
		t.Fatal(err)
	}
	_, err := r.use.Release(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.Unavailable)
	goOn()
	wantCode(t, <-moved, apierr.Unavailable)
}

// A host that is lost never tells of its snapshots: those that it brought to the
// blob store go by another.
func TestSnapshotOfALostHostLeavesTheBlobStore(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.paused("s", time.Minute, true)
	r.hosts.setAway("h1", true)
	if _, err := r.use.Release(t.Context(), r.caller, "s"); err != nil {
		t.Fatal(err)
	}
	until(t, "the other host is told", func() bool {
		h := r.second()
		h.mu.Lock()
		defer h.mu.Unlock()
		return slices.Equal(h.deleted, []string{"s/snap-s"})
	})
}

// Without a leader nobody aborts an operation: who waits for it is let go.
func TestWaitingEndsWithoutALeader(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.use.pace = hasty
	s := r.create()
	op := session.Operation{ID: "op", Kind: session.Move, From: "h1", To: "h2", Epoch: 2, SnapshotID: "op", Deadline: time.Now().Add(50 * time.Millisecond)}
	if _, err := r.record.OpenOperation(t.Context(), s.ID, op, nil); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	_, err := r.use.Awake(ctx, s)
	wantCode(t, err, apierr.Unavailable)
}

// A session created with strictRegion is not resumed in another region, however
// full its own is.
func TestStrictRegionOutlivesAPause(t *testing.T) {
	t.Parallel()
	for strict, want := range map[bool]string{true: "", false: "h2"} {
		r := twoHosts(t)
		req := request()
		req.Region, req.StrictRegion = "local", strict
		v, _, err := r.use.Create(t.Context(), r.caller, req)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := r.use.Pause(t.Context(), r.caller, v.Session.ID); err != nil {
			t.Fatal(err)
		}
		r.hosts.setRegion("h2", "far")
		r.host.setFull()
		v, err = r.use.Resume(t.Context(), r.caller, v.Session.ID)
		if strict {
			wantCode(t, err, apierr.NoCapacity)
		}
		if v.Session.Host != want {
			t.Errorf("strict %v: resumed at %q, %v", strict, v.Session.Host, err)
		}
	}
}

// A paused session's snapshot comes back with its host: it waits for that far
// longer than a running one, and a resume says meanwhile whom for.
func TestPausedSessionWaitsForItsHost(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.use.cfg.HostLostAfter, r.use.cfg.PausedLostAfter = 2*time.Minute, 24*time.Hour
	r.paused("asleep", time.Minute, false)
	awake := r.create()
	seen := time.Now()
	away := map[string]*watched{"h1": {seen: seen}}
	r.hosts.setAway("h1", true)
	r.use.giveUp(t.Context(), away, seen.Add(24*time.Hour-time.Second))
	if s := r.session(awake.ID); s.Host != "h1" || s.Status != session.Error {
		t.Errorf("the running session is %s on %s", s.Status, s.Host)
	}
	if s := r.session("asleep"); s.Status != session.Paused {
		t.Fatalf("the paused session is %s", s.Status)
	}
	_, err := r.use.Resume(t.Context(), r.caller, "asleep")
	if !apierr.Is(err, apierr.Unavailable) || !strings.Contains(err.Error(), `"h1"`) {
		t.Errorf("resumed without its host: %v", err)
	}
	r.use.giveUp(t.Context(), away, seen.Add(24*time.Hour))
	if s := r.session("asleep"); s.Status != session.Error || s.Error == "" {
		t.Errorf("after a day the paused session is %s", s.Status)
	}
}

// A resume that the host of the snapshot refuses leaves the session paused and
// says so; another host may have the blob store's copy.
func TestResumeOfADamagedSnapshot(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	damaged := apierr.New(apierr.Internal, "the session's snapshot cannot be restored: it is damaged")
	r.setFault(r.host, func(step string) *fault {
		if step == "restore" {
			return &fault{refuse: damaged}
		}
		return nil
	})
	r.paused("only here", time.Minute, false)
	_, err := r.use.Resume(t.Context(), r.caller, "only here")
	if e := apierr.From(err); e.Code != apierr.Internal || e.Message != damaged.Message+"; the session stays paused" {
		t.Errorf("%v", err)
	}
	if s := r.session("only here"); s.Status != session.Paused || s.Op != nil || s.Host != "h1" {
		t.Errorf("%+v", s)
	}
	r.paused("durable", time.Minute, true)
	if v, err := r.use.Resume(t.Context(), r.caller, "durable"); err != nil || v.Session.Host != "h2" {
		t.Errorf("on %q, %v", v.Session.Host, err)
	}
	r.setFault(r.host, nil)
	if v, err := r.use.Resume(t.Context(), r.caller, "only here"); err != nil || v.Session.Host != "h1" {
		t.Errorf("mended: on %q, %v", v.Session.Host, err)
	}
}

// One that is nowhere is no session that is nowhere.
func TestResumeWithoutASnapshotIsNotUnknown(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.setFault(r.host, func(step string) *fault { return &fault{refuse: apierr.New(apierr.NotFound, "no such snapshot")} })
	r.paused("s", time.Minute, false)
	if _, err := r.use.Resume(t.Context(), r.caller, "s"); !apierr.Is(err, apierr.Internal) {
		t.Error(err)
	}
}
