package sessions

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// Each machine that is taken and given back is a warm one less for everybody.
func TestCreatesBeyondTheLimitTakeNoMachines(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	var all sync.WaitGroup
	for range 20 {
		all.Go(func() {
			if _, _, err := r.use.Create(t.Context(), r.caller, request()); err != nil && !apierr.Is(err, apierr.ConcurrencyLimit) {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if n := r.host.acquired(); n != 3 || r.record.View().Running("p") != 3 {
		t.Errorf("%d machines taken, %d sessions", n, r.record.View().Running("p"))
	}
	if _, _, err := r.use.Create(t.Context(), r.caller, request()); !apierr.Is(err, apierr.ConcurrencyLimit) {
		t.Errorf("beyond the limit: %v", err)
	}
	if n := r.host.acquired(); n != 3 {
		t.Errorf("%d machines taken", n)
	}
	if len(r.use.creating.now) != 0 {
		t.Errorf("still counted: %v", r.use.creating.now)
	}
}

func TestRecordThatFailsIsAskedOnceAndTakesNoMachine(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	second := newFakeHost(t, "h2")
	r.hosts.add(second)
	if err := r.record.Close(); err != nil {
		t.Fatal(err)
	}
	if _, _, err := r.use.Create(t.Context(), r.caller, request()); !apierr.Is(err, apierr.Unavailable) {
		t.Errorf("without a record: %v", err)
	}
	if n := r.host.acquired() + second.acquired(); n != 0 {
		t.Errorf("%d machines taken", n)
	}
}

func (r *rig) client() *hostlink.Client {
	r.t.Helper()
	c, err := r.hosts.Client("h1")
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(c.Close)
	return c
}

func (r *rig) status(id string) session.Status {
	s, _ := r.record.View().Session(id)
	return s.Status
}

// A machine may die before the record has its session.
func TestTombstoneThatOvertakesItsCreate(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	early := hostlink.Tombstone{SessionID: "fast", Epoch: 1, EndedAt: time.Now(), Error: "It died."}
	r.host.bury(early)
	c := r.client()
	r.use.bury(t.Context(), c, []hostlink.Tombstone{early})
	if len(r.host.inventory().Tombstones) != 1 {
		t.Fatal("a tombstone was acknowledged that the record does not have")
	}
	now := time.Now()
	s := session.Session{ID: "fast", ProjectID: "p", Kind: session.Shell, Status: session.Running, Host: "h1", Epoch: 1,
		CreatedAt: now, StartedAt: now, ExpiresAt: now.Add(time.Hour)}
	if _, _, err := r.record.CreateSession(t.Context(), s, ""); err != nil {
		t.Fatal(err)
	}
	r.use.compare(t.Context(), "h1", c, r.host.inventory(), now)
	if st := r.status("fast"); st != session.Error || len(r.host.inventory().Tombstones) != 0 {
		t.Errorf("the session is %s", st)
	}
	old := hostlink.Tombstone{SessionID: "undone", Epoch: 1, EndedAt: now.Add(-time.Hour), Reason: session.Released}
	r.host.bury(old)
	r.use.bury(t.Context(), c, []hostlink.Tombstone{old})
	if len(r.host.inventory().Tombstones) != 0 {
		t.Error("a tombstone of a create that was undone stays for ever")
	}
}

// An inventory says nothing of what came after it was asked for.
func TestStaleInventoryEndsNothing(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	asked := time.Now().Add(-time.Second)
	stale := r.host.inventory()
	s := r.create()
	r.use.cfg.CreateDeadline = -undoTime // nothing is exempt for its youth
	r.use.compare(t.Context(), "h1", r.client(), stale, asked)
	if st := r.status(s.ID); st != session.Running {
		t.Errorf("a session younger than the inventory is %s", st)
	}
}

func TestSetupNewsNeverGoesBack(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	req := request()
	req.Kind, req.Setup = session.Shell, []string{"true"}
	v, _, err := r.use.Create(t.Context(), r.caller, req)
	if err != nil {
		t.Fatal(err)
	}
	for _, st := range []hostlink.Status{{Setup: "what?"}, {Setup: session.SetupDone}, {Setup: session.SetupRunning}, {Setup: session.SetupFailed}} {
		st.SessionID = v.Session.ID
		r.use.learn(t.Context(), st)
	}
	if s, _ := r.record.View().Session(v.Session.ID); s.SetupStatus != session.SetupDone {
		t.Errorf("setup is %q", s.SetupStatus)
	}
}

// A host whose hostd hangs is alive to gossip and ends nothing.
func TestNoSessionOutlivesItsTimeoutOnAHostThatHangs(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	begin := time.Now().Add(-2 * time.Hour).UTC().Truncate(time.Millisecond)
	s := session.Session{ID: "over", ProjectID: "p", Kind: session.Shell, Status: session.Running, Host: "h1", Epoch: 1,
		CreatedAt: begin, StartedAt: begin, ExpiresAt: begin.Add(30 * time.Minute)}
	if _, _, err := r.record.CreateSession(t.Context(), s, ""); err != nil {
		t.Fatal(err)
	}
	r.host.breakDown()
	r.run()
	until(t, "the session times out", func() bool { return r.status("over") == session.Completed })
	if s, _ := r.record.View().Session("over"); s.EndReason != session.TimedOut || !s.EndedAt.Equal(s.ExpiresAt) {
		t.Errorf("%+v", s)
	}
}

func TestLostSessionsAreNotBilledForTheSearch(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := r.create()
	now := time.Now()
	r.use.giveUp(t.Context(), map[string]*watched{"h1": {seen: now.Add(30 * time.Minute)}}, now.Add(2*time.Hour))
	got, _ := r.record.View().Session(s.ID)
	if got.Status != session.Error && got.Status != session.Completed {
		t.Fatalf("%+v", got)
	}
	if late := got.EndedAt.Sub(now); late > 31*time.Minute {
		t.Errorf("billed until %s later", late)
	}
}

func TestHostsThatNeverReturnAreForgotten(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := r.create()
	r.use.cfg.HostLostAfter = time.Minute
	now := time.Now()
	stopped := 0
	stop := func() { stopped++ }
	hosts := map[string]*watched{"h1": {now.Add(-time.Hour), stop}, "gone": {now.Add(-time.Hour), stop}, "here": {now, stop}}
	r.use.forgetHosts(hosts, now)
	if stopped != 2 || len(hosts) != 2 || hosts["h1"] == nil || hosts["h1"].stop != nil || hosts["here"].stop == nil {
		t.Errorf("%d stopped, left %v", stopped, hosts)
	}
	if _, _, err := r.record.EndSession(t.Context(), s.ID, 1, now, session.Released, ""); err != nil {
		t.Fatal(err)
	}
	r.use.forgetHosts(hosts, now)
	if hosts["h1"] != nil {
		t.Error("a host without sessions stays known")
	}
}

func TestReleaseAllDoesNotQueueBehindASlowHost(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	for range 3 {
		r.create()
	}
	begun, goOn := make(chan struct{}, 3), make(chan struct{})
	r.host.with(func() { r.host.atEnd = func() { begun <- struct{}{}; <-goOn } })
	released := make(chan int)
	go func() {
		views, err := r.use.ReleaseAll(t.Context(), r.caller)
		if err != nil {
			t.Error(err)
		}
		released <- len(views)
	}()
	until(t, "the host ends all three at once", func() bool { return len(begun) == 3 })
	close(goOn)
	if n := <-released; n != 3 {
		t.Errorf("%d released", n)
	}
}

func TestRunEndsWithItsFollowers(t *testing.T) {
	r := newRig(t)
	before := goleak.IgnoreCurrent()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = r.use.Run(ctx) }()
	until(t, "the gateway watches", r.host.watched)
	cancel()
	<-done
	r.host.server.CloseClientConnections()
	var left error
	defer func() {
		if left != nil {
			t.Error(left)
		}
	}()
	until(t, "nobody is left", func() bool {
		left = goleak.Find(before, goleak.IgnoreAnyFunction("net/http.(*conn).serve"))
		return left == nil
	})
}

// A stream of events goes on after a break with the event that follows.
func TestEventStreamOutlivesItsHostd(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	s := r.create()
	var mu sync.Mutex
	var asked []string // guarded by mu
	ask := func(after string) int {
		mu.Lock()
		defer mu.Unlock()
		asked = append(asked, after)
		return len(asked)
	}
	r.setEvents(r.host, func(w http.ResponseWriter, req *http.Request) {
		switch ask(req.FormValue("after")) {
		case 1:
			fmt.Fprintln(w, `{"seq":5,"type":"exec"}`)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		case 2:
			w.WriteHeader(http.StatusBadGateway)
		case 3:
			fmt.Fprintln(w, `{"seq":6,"type":"lifecycle"}`)
		}
	})
	after := uint64(4)
	events, err := r.use.FollowEvents(t.Context(), r.caller, s.ID, &after, nil)
	if err != nil {
		t.Fatal(err)
	}
	var got []uint64
	for e, err := range events {
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, e.Seq)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(got, []uint64{5, 6}) || !slices.Equal(asked, []string{"4", "5", "5"}) {
		t.Errorf("events %v, asked after %v", got, asked)
	}
	r.use.cfg.HostLostAfter = 600 * time.Millisecond
	r.setEvents(r.host, func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) })
	for _, err := range events {
		if err == nil {
			t.Error("an event of a host that is lost")
		}
	}
}
