package sessions

import (
	"context"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

func TestPauseAndResume(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	v, err := r.use.Pause(t.Context(), r.caller, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	p := v.Session
	if p.Status != session.Paused || p.Op != nil || p.Snapshot == nil || !p.Snapshot.Memory || p.Snapshot.Host != "h1" || p.Epoch != 1 ||
		!p.ExpiresAt.Equal(p.PausedAt.Add(session.PausedMax)) {
		t.Errorf("paused %+v", p)
	}
	if run, held := r.world.machines(s.ID); len(run)+held != 0 || r.record.View().Counted("p") != 0 {
		t.Errorf("runs at %v, %d held, %d counted", run, held, r.record.View().Counted("p"))
	}
	again, err := r.use.Pause(t.Context(), r.caller, s.ID)
	if err != nil || again.Session.Snapshot.ID != p.Snapshot.ID {
		t.Errorf("paused again: %+v, %v", again.Session, err)
	}
	if _, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{}); !apierr.Is(err, apierr.SessionNotRunning) {
		t.Errorf("moved while paused: %v", err)
	}
	if v, err = r.use.Resume(t.Context(), r.caller, s.ID); err != nil {
		t.Fatal(err)
	}
	got := v.Session
	if run, held := r.world.machines(s.ID); got.Status != session.Running || got.Epoch != 2 || got.Moves != 0 || held != 0 || !slices.Equal(run, []string{"h1/2"}) {
		t.Errorf("resumed %+v, runs at %v, %d held", got, run, held)
	}
	if v, err = r.use.Resume(t.Context(), r.caller, s.ID); err != nil || v.Session.Epoch != 2 {
		t.Errorf("resumed again: %+v, %v", v.Session, err)
	}
	until(t, "the host knows the new end", func() bool { return r.host.told(s.ID).ExpiresAt.Equal(got.ExpiresAt) })
	if left := got.ExpiresAt.Sub(got.RunningSince); left > 300*time.Second || left < 290*time.Second {
		t.Errorf("%s are left of 300 s", left)
	}
	second, err := r.use.Pause(t.Context(), r.caller, s.ID)
	if err != nil || second.Session.Snapshot.ID == p.Snapshot.ID {
		t.Fatalf("%+v, %v", second.Session, err)
	}
	r.run()
	until(t, "the first snapshot is gone", func() bool { return len(r.world.kept()) == 1 })
	ended, err := r.use.Release(t.Context(), r.caller, s.ID)
	if err != nil || ended.Session.EndReason != session.Released || ended.Used != second.Used || ended.Session.Key != nil {
		t.Errorf("released %+v, %v", ended, err)
	}
	until(t, "no snapshot is left", func() bool { return len(r.world.kept()) == 0 })
	_, err = r.use.Resume(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.SessionNotRunning)
	_, err = r.use.Pause(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.SessionNotRunning)
}

func TestMove(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	from := s.Host
	for i, c := range []struct {
		req  MoveRequest
		want string
	}{
		{MoveRequest{}, "h2"}, {MoveRequest{Region: "local"}, "h1"}, {MoveRequest{Host: "h1"}, "h1"}, {MoveRequest{Host: "h2", Region: "local"}, "h2"},
	} {
		v, took, err := r.use.Move(t.Context(), r.caller, s.ID, c.req)
		if err != nil {
			t.Fatal(err)
		}
		m := v.Session
		var gave string
		r.hosts.fake(from).with(func() { gave = r.hosts.fake(from).gaveTo })
		if want := map[bool]string{true: r.hosts.fake(c.want).server.Listener.Addr().String()}[from != c.want]; gave != want {
			t.Errorf("%+v: layers went ahead to %q, want %q", c.req, gave, want)
		}
		from = m.Host
		if m.Host != c.want || m.Moves != i+1 || m.Epoch != uint64(i+2) || m.Status != session.Running || m.Op != nil || !m.RunningSince.Equal(s.RunningSince) {
			t.Errorf("%+v: moved to %+v", c.req, m)
		}
		if took.Capture != 7*time.Millisecond || took.Acquire != 3*time.Millisecond || took.Restore != 5*time.Millisecond || took.Total <= 0 {
			t.Errorf("took %+v", took)
		}
		until(t, "one machine is left", func() bool {
			run, held := r.world.machines(s.ID)
			return held == 0 && len(run) == 1 && strings.HasPrefix(run[0], c.want+"/")
		})
	}
	r.run()
	until(t, "a snapshot stays beside the machine only", func() bool { return slices.Equal(r.world.kept(), []string{"h2"}) })
}

func TestMoveRefusedBeforeAnythingStops(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	r.setFault(r.host, func(step string) *fault { t.Errorf("%s was ordered", step); return nil })
	for _, c := range []struct {
		req   MoveRequest
		code  apierr.Code
		field string
	}{
		{MoveRequest{Host: "h9"}, apierr.InvalidRequest, "host: "},
		{MoveRequest{Region: "moon"}, apierr.InvalidRequest, "region: "},
		{MoveRequest{Host: "h2", Region: "moon"}, apierr.InvalidRequest, "region: "},
	} {
		_, _, err := r.use.Move(t.Context(), r.caller, s.ID, c.req)
		if !apierr.Is(err, c.code) || !strings.HasPrefix(apierr.From(err).Message, c.field) {
			t.Errorf("%+v: %v", c.req, err)
		}
	}
	r.hosts.setAway("h1", true)
	_, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{Host: "h2"})
	wantCode(t, err, apierr.Unavailable)
}

func TestMoveToAFullHostGoesOnAtTheSource(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	r.second().setFull()
	_, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{Host: "h2"})
	wantCode(t, err, apierr.NoCapacity)
	if run, held := r.world.machines(s.ID); held != 0 || !slices.Equal(run, []string{"h1/1"}) {
		t.Errorf("runs at %v, %d held", run, held)
	}
	if kept := r.world.kept(); len(kept) != 0 {
		t.Errorf("the session was stopped and captured for a host without room: at %v", kept)
	}
	v, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{}) // passes the full one over
	if err != nil || v.Session.Host != "h1" || v.Session.Epoch != 2 {
		t.Errorf("%+v, %v", v.Session, err)
	}
}

func TestMemoryOrPortable(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	r.hosts.setClass("h2", "other")
	move := func(host string) session.Snapshot {
		t.Helper()
		v, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{Host: host})
		if err != nil {
			t.Fatal(err)
		}
		return *v.Session.Snapshot
	}
	if snap := move("h1"); !snap.Memory {
		t.Error("the same host lost memory")
	}
	if snap := move("h2"); snap.Memory {
		t.Error("memory went to another CPU class")
	}
	r.host.with(func() {
		if r.host.gaveTo != "" {
			t.Errorf("layers of a capture without memory went ahead to %s", r.host.gaveTo)
		}
	})
	r.hosts.setClass("h2", "")
	if snap := move("h2"); snap.Memory {
		t.Error("memory from a host that keeps none")
	}
	if _, err := r.record.SetSetup(t.Context(), s.ID, session.SetupRunning, ""); err != nil {
		t.Fatal(err)
	}
	_, err := r.use.Pause(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.OperationInProgress)
}

// Snapshots of many pauses do not wait for the next reconciling.
func TestAPauseDropsTheSnapshotBefore(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	for range 3 {
		v, err := r.use.Pause(t.Context(), r.caller, s.ID)
		if err != nil {
			t.Fatal(err)
		}
		until(t, "only the newest snapshot is there", func() bool {
			r.host.mu.Lock()
			defer r.host.mu.Unlock()
			return len(r.host.snapshots) == 1 && r.host.snapshots[v.Session.Snapshot.ID]
		})
		if _, err := r.use.Resume(t.Context(), r.caller, s.ID); err != nil {
			t.Fatal(err)
		}
	}
}

func TestResumeElsewhere(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		durable bool
		prep    func(r *rig)
		host    string
		code    apierr.Code
	}{
		"at the holder":                         {false, func(*rig) {}, "h1", ""},
		"holder full: fetched from it":          {false, func(r *rig) { r.host.setFull() }, "h2", ""},
		"holder away":                           {false, func(r *rig) { r.hosts.setAway("h1", true) }, "", apierr.Unavailable},
		"holder away, in the blob store":        {true, func(r *rig) { r.hosts.setAway("h1", true) }, "h2", ""},
		"another class takes no memory":         {true, func(r *rig) { r.hosts.setClass("h2", "x"); r.hosts.setAway("h1", true) }, "", apierr.NoCapacity},
		"nobody has room":                       {false, func(r *rig) { r.host.setFull(); r.second().setFull() }, "", apierr.NoCapacity},
		"a holder that cannot be asked is next": {true, func(r *rig) { r.host.breakDown() }, "h2", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := twoHosts(t)
			r.use.cfg.PauseDurable = c.durable
			s := r.create()
			if _, err := r.use.Pause(t.Context(), r.caller, s.ID); err != nil {
				t.Fatal(err)
			}
			c.prep(r)
			v, err := r.use.Resume(t.Context(), r.caller, s.ID)
			if c.code != "" {
				wantCode(t, err, c.code)
				if now := r.session(s.ID); now.Status != session.Paused || now.Op != nil || r.record.View().Counted("p") != 0 {
					t.Errorf("left as %+v", now)
				}
				return
			}
			if err != nil || v.Session.Host != c.host || v.Session.Status != session.Running {
				t.Errorf("%+v, %v", v.Session, err)
			}
		})
	}
}

func TestResumeCountsAgainstTheLimit(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	if _, err := r.use.Pause(t.Context(), r.caller, s.ID); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		r.create()
	}
	_, err := r.use.Resume(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.ConcurrencyLimit)
	_, err = r.use.Awake(t.Context(), s)
	wantCode(t, err, apierr.ConcurrencyLimit)
	if apierr.From(err).RetryAfter <= 0 || r.session(s.ID).Status != session.Paused {
		t.Errorf("%v, %+v", err, r.session(s.ID))
	}
}

func TestManyRequestsResumeOnce(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	if _, err := r.use.Pause(t.Context(), r.caller, s.ID); err != nil {
		t.Fatal(err)
	}
	answers := make(chan error)
	for i := range 20 {
		go func() {
			var err error
			if i%5 == 0 {
				_, err = r.use.Resume(t.Context(), r.caller, s.ID)
			} else {
				var now session.Session
				if now, err = r.use.Awake(t.Context(), s); err == nil && (now.Status != session.Running || now.Epoch != 2) {
					t.Errorf("awake as %+v", now)
				}
			}
			answers <- err
		}()
	}
	for range 20 {
		if err := <-answers; err != nil {
			t.Error(err)
		}
	}
	if run, _ := r.world.machines(s.ID); !slices.Equal(run, []string{"h1/2"}) {
		t.Errorf("runs at %v", run)
	}
}

// held makes a host wait in one step and says when it has begun.
func (r *rig) held(h *fakeHost, step string) (begun chan struct{}, goOn func()) {
	begun, hang := make(chan struct{}, 10), make(chan struct{})
	r.setFault(h, func(at string) *fault {
		if at != step {
			return nil
		}
		begun <- struct{}{}
		return &fault{hang: hang}
	})
	return begun, func() { r.setFault(h, nil); close(hang) }
}

func TestOneOperationAtATime(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	begun, goOn := r.held(r.host, "capture")
	moved := make(chan error)
	go func() {
		_, _, err := r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{Host: "h2"})
		moved <- err
	}()
	<-begun
	_, err := r.use.Pause(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.OperationInProgress)
	_, _, err = r.use.Move(t.Context(), r.caller, s.ID, MoveRequest{})
	wantCode(t, err, apierr.OperationInProgress)
	_, err = r.use.Resume(t.Context(), r.caller, s.ID)
	wantCode(t, err, apierr.OperationInProgress)
	waits := make(chan session.Session)
	go func() {
		now, err := r.use.Awake(t.Context(), s)
		if err != nil {
			t.Error(err)
		}
		waits <- now
	}()
	ctx, leave := context.WithCancelCause(t.Context())
	leave(apierr.New(apierr.Canceled, "gone"))
	_, err = r.use.Awake(ctx, s)
	wantCode(t, err, apierr.Canceled)
	goOn()
	if err := <-moved; err != nil {
		t.Error(err)
	}
	if now := <-waits; now.Host != "h2" || now.Epoch != 2 {
		t.Errorf("the request that waited got %+v", now)
	}
}

func TestARequestCallsAPauseOff(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	begun, goOn := r.held(r.host, "capture")
	defer goOn()
	paused := make(chan error)
	go func() {
		_, err := r.use.Pause(t.Context(), r.caller, s.ID)
		paused <- err
	}()
	<-begun
	now, err := r.use.Awake(t.Context(), s)
	if err != nil || now.Status != session.Running || now.Epoch != 1 {
		t.Errorf("awake as %+v, %v", now, err)
	}
	err = <-paused
	wantCode(t, err, apierr.OperationInProgress)
	if !strings.Contains(err.Error(), "called off") {
		t.Error(err)
	}
}

func TestReleaseAlwaysWins(t *testing.T) {
	t.Parallel()
	for _, step := range []string{"capture", "restore"} {
		for _, kind := range []session.OpKind{session.Pause, session.Move, session.Resume} {
			if kind == session.Pause && step == "restore" || kind == session.Resume && step == "capture" {
				continue
			}
			t.Run(string(kind)+" "+step, func(t *testing.T) {
				t.Parallel()
				r := twoHosts(t)
				s := r.create()
				at := map[bool]*fakeHost{true: r.host, false: r.second()}[step == "capture" || kind == session.Resume]
				if kind == session.Resume {
					if _, err := r.use.Pause(t.Context(), r.caller, s.ID); err != nil {
						t.Fatal(err)
					}
				}
				begun, goOn := r.held(at, step)
				done := make(chan error)
				go func() { done <- r.operate(kind, s.ID, "h2") }()
				<-begun
				v, err := r.use.Release(t.Context(), r.caller, s.ID)
				if err != nil || v.Session.Status != session.Completed || v.Session.EndReason != session.Released {
					t.Errorf("%+v, %v", v.Session, err)
				}
				goOn()
				wantCode(t, <-done, apierr.SessionNotRunning)
				r.run()
				until(t, "nothing is left", func() bool {
					run, held := r.world.machines(s.ID)
					return len(run)+held+len(r.world.kept()) == 0
				})
			})
		}
	}
}

// operate runs an operation by its kind.
func (r *rig) operate(kind session.OpKind, id, to string) (err error) {
	switch kind {
	case session.Pause:
		_, err = r.use.Pause(r.t.Context(), r.caller, id)
	case session.Resume:
		_, err = r.use.Resume(r.t.Context(), r.caller, id)
	case session.Move:
		_, _, err = r.use.Move(r.t.Context(), r.caller, id, MoveRequest{Host: to})
	}
	return err
}

func TestPatchWhilePaused(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	v, err := r.use.Pause(t.Context(), r.caller, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	longer := 600
	if v, err = r.use.Patch(t.Context(), r.caller, s.ID, PatchRequest{Timeout: &longer}); err != nil || !v.Session.ExpiresAt.Equal(v.Session.PausedAt.Add(session.PausedMax)) {
		t.Fatalf("%+v, %v", v.Session, err)
	}
	if v, err = r.use.Resume(t.Context(), r.caller, s.ID); err != nil {
		t.Fatal(err)
	}
	if left := v.Session.ExpiresAt.Sub(v.Session.RunningSince); left > 600*time.Second || left < 590*time.Second {
		t.Errorf("%s are left of 600 s", left)
	}
	all, err := r.use.ReleaseAll(t.Context(), r.caller)
	if err != nil || len(all) != 1 {
		t.Errorf("%d released, %v", len(all), err)
	}
}

func TestReleaseAllTakesPausedOnesAlong(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	r.create()
	if _, err := r.use.Pause(t.Context(), r.caller, s.ID); err != nil {
		t.Fatal(err)
	}
	all, err := r.use.ReleaseAll(t.Context(), r.caller)
	if err != nil || len(all) != 2 || r.session(s.ID).Status != session.Completed {
		t.Errorf("%d released, %v", len(all), err)
	}
}

// paused puts a paused session of another time straight into the record.
func (r *rig) paused(id string, ago time.Duration, durable bool) session.Session {
	r.t.Helper()
	begin := time.Now().Add(-ago).UTC().Truncate(time.Millisecond)
	s := session.Session{ID: id, ProjectID: "p", Region: "local", Kind: session.Shell, Status: session.Running, Host: "h1", Epoch: 1,
		Timeout: 300, CreatedAt: begin, StartedAt: begin, RunningSince: begin, ExpiresAt: begin.Add(5 * time.Minute)}
	op := session.Operation{ID: "op-" + id, Kind: session.Pause, From: "h1", Epoch: 1, SnapshotID: "snap-" + id, Deadline: time.Now().Add(time.Minute)}
	snap := session.Snapshot{ID: op.SnapshotID, Host: "h1", Memory: true, Driver: "fake", CPUClass: "c", Durable: durable}
	_, _, err := r.record.CreateSession(r.t.Context(), s, "")
	if err == nil {
		_, err = r.record.OpenOperation(r.t.Context(), id, op, newKey())
	}
	if err == nil {
		s, _, err = r.record.CommitOperation(r.t.Context(), id, op.ID, &snap)
	}
	if err != nil {
		r.t.Fatal(err)
	}
	r.host.with(func() { r.host.snapshots[snap.ID] = true })
	return s
}

func TestPausedForTooLong(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.paused("old", time.Hour, false)
	r.use.expirePaused(t.Context(), s.ExpiresAt.Add(-time.Millisecond))
	if now := r.session("old"); now.Status != session.Paused {
		t.Fatalf("%+v", now)
	}
	r.use.expirePaused(t.Context(), s.ExpiresAt)
	now := r.session("old")
	if now.Status != session.Completed || now.EndReason != session.PausedExpired || !now.EndedAt.Equal(s.ExpiresAt) {
		t.Errorf("%+v", now)
	}
	if used := session.Usage(now, time.Now()); used != s.Before || used < time.Hour || used > time.Hour+time.Minute {
		t.Errorf("billed %s", used)
	}
	until(t, "its snapshot is gone", func() bool { return len(r.world.kept()) == 0 })
}

func TestPausedSessionOfALostHost(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.use.cfg.HostLostAfter = 50 * time.Millisecond
	r.paused("local", time.Minute, false)
	r.paused("durable", time.Minute, true)
	r.paused("uploaded", time.Minute, false)
	if err := r.record.SnapshotDurable(t.Context(), "uploaded", "snap-uploaded"); err != nil {
		t.Fatal(err)
	}
	r.hosts.setAway("h1", true)
	r.run()
	until(t, "it is lost", func() bool { s := r.session("local"); return s.Status == session.Error && s.Error != "" })
	for _, id := range []string{"durable", "uploaded"} {
		if s := r.session(id); s.Status != session.Paused {
			t.Errorf("%s is %s", id, s.Status)
		}
	}
}

func TestReconcileLearnsThatASnapshotIsDurable(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	r.paused("s", time.Minute, false)
	r.host.with(func() { r.host.durable, r.host.snapshots["stray"] = true, true })
	r.run()
	until(t, "the record knows", func() bool { return r.session("s").Snapshot.Durable })
	until(t, "the stray is gone", func() bool { return slices.Equal(r.world.kept(), []string{"h1"}) })
	if s := r.session("s"); s.Status != session.Paused {
		t.Errorf("%+v", s)
	}
}

func TestAMachineThatDiesWhileItsOperationIsOpen(t *testing.T) {
	t.Parallel()
	r := twoHosts(t)
	s := r.create()
	begun, goOn := r.held(r.second(), "restore")
	done := make(chan error)
	go func() { done <- r.operate(session.Move, s.ID, "h2") }()
	<-begun
	tomb := hostlink.Tombstone{SessionID: s.ID, Epoch: 1, EndedAt: time.Now(), Error: "The machine broke."}
	if r.use.finish(t.Context(), tomb) {
		t.Error("the source's end was taken before the verdict")
	}
	goOn()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if !r.use.finish(t.Context(), tomb) || r.session(s.ID).Status != session.Running {
		t.Errorf("after the move: %+v", r.session(s.ID))
	}
}
