package session

import (
	"errors"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/apierr"
)

func placed() Session {
	s := running()
	s.Host, s.Epoch, s.RunningSince, s.Key = "h1", 1, t0, []byte("k")
	return s
}

func opOf(s Session, kind OpKind, id string) Operation {
	op := Operation{ID: id, Kind: kind, From: s.Host, To: "h2", Region: "us", Epoch: s.Epoch + 1, SnapshotID: "snap-" + id}
	switch kind {
	case Pause:
		op.To, op.Epoch = "", s.Epoch
	case Resume:
		op.From = ""
		if s.Snapshot != nil {
			op.SnapshotID = s.Snapshot.ID
		}
	}
	return op
}

func open(t *testing.T, s Session, kind OpKind, id string) Session {
	t.Helper()
	got, err := Open(s, opOf(s, kind, id), nil)
	if err != nil || got.Op == nil || got.Op.ID != id {
		t.Fatalf("open %s: %+v, %v", kind, got.Op, err)
	}
	return got
}

func commit(t *testing.T, s Session, at time.Time) Session {
	t.Helper()
	op := *s.Op
	var snap *Snapshot
	if op.Kind != Resume {
		snap = &Snapshot{ID: op.SnapshotID, Host: op.From}
	}
	got, verdict, err := Commit(s, op.ID, snap, at)
	if err != nil || !verdict || got.Op != nil {
		t.Fatalf("commit %s: %+v, %v, %v", op.Kind, got, verdict, err)
	}
	return got
}

func TestOpenRefusals(t *testing.T) {
	yes := placed()
	busy := open(t, yes, Move, "m")
	busy.Op.Deadline = t0.Add(-time.Hour) // only an abort ends it
	paused := commit(t, open(t, yes, Pause, "p"), t0)
	over, err := End(yes, t0, Released, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		name  string
		s     Session
		op    func(*Operation)
		kind  OpKind
		code  apierr.Code
		stale bool
	}{
		{"another is open", busy, nil, Pause, apierr.OperationInProgress, false},
		{"ended", over, nil, Pause, apierr.SessionNotRunning, false},
		{"pause of a paused one", paused, nil, Pause, apierr.SessionNotRunning, false},
		{"move of a paused one", paused, nil, Move, apierr.SessionNotRunning, false},
		{"resume of a running one", yes, nil, Resume, apierr.SessionNotRunning, false},
		{"made for an earlier epoch", yes, func(o *Operation) { o.Epoch-- }, Move, apierr.OperationInProgress, true},
		{"made for another host", yes, func(o *Operation) { o.From = "h9" }, Pause, apierr.OperationInProgress, true},
		{"of an earlier snapshot", paused, func(o *Operation) { o.SnapshotID = "old" }, Resume, apierr.OperationInProgress, true},
		{"no kind", yes, nil, "teleport", apierr.Internal, false},
	} {
		op := opOf(c.s, c.kind, "x")
		if c.op != nil {
			c.op(&op)
		}
		got, err := Open(c.s, op, nil)
		if !apierr.Is(err, c.code) || errors.Is(err, ErrStale) != c.stale || got.Op != c.s.Op {
			t.Errorf("%s: %+v, %v", c.name, got.Op, err)
		}
	}
}

func TestPauseFreezesTheRemainingLifetime(t *testing.T) {
	s := placed() // 300 s
	s = commit(t, open(t, s, Pause, "p"), t0.Add(100*time.Second+1500*time.Microsecond))
	if s.Status != Paused || s.Before != 100*time.Second+time.Millisecond || !s.ExpiresAt.Equal(s.PausedAt.Add(PausedMax)) || s.Epoch != 1 || s.Host != "h1" {
		t.Fatalf("paused: %+v", s)
	}
	at := t0.Add(48 * time.Hour)
	if got := Usage(s, at); got != s.Before {
		t.Errorf("billed while paused: %s", got)
	}
	s = commit(t, open(t, s, Resume, "r"), at)
	if s.Status != Running || s.Host != "h2" || s.Region != "us" || s.Epoch != 2 || s.Moves != 0 || s.PlacedBy != "r" ||
		!s.ExpiresAt.Equal(at.Add(200*time.Second-time.Millisecond)) || !s.PausedAt.IsZero() || s.SettingsVersion != 1 || s.Snapshot == nil {
		t.Fatalf("resumed: %+v", s)
	}
	s = commit(t, open(t, s, Move, "m"), at.Add(10*time.Second))
	if s.Moves != 1 || s.Epoch != 3 || !s.ExpiresAt.Equal(at.Add(200*time.Second-time.Millisecond)) || s.Snapshot.ID != "snap-m" {
		t.Fatalf("moved: %+v", s)
	}
	longer := 600
	s, err := Patch{Timeout: &longer}.Apply(s)
	if err != nil || !s.ExpiresAt.Equal(at.Add(500*time.Second-time.Millisecond)) {
		t.Errorf("a new total: %v, %v", s.ExpiresAt, err)
	}
	s, err = End(s, at.Add(20*time.Second), Released, "")
	if got := Usage(s, at.Add(time.Hour)); err != nil || got != 120*time.Second+time.Millisecond {
		t.Errorf("billed in all: %s, %v", got, err)
	}
	if s.Op != nil || s.Key != nil || s.Snapshot != nil {
		t.Errorf("left behind: %+v", s)
	}
}

func TestTimeoutOfAPausedSession(t *testing.T) {
	s := commit(t, open(t, placed(), Pause, "p"), t0.Add(100*time.Second))
	for timeout, left := range map[int]time.Duration{60: 0, 100: 0, 150: 50 * time.Second} {
		got, err := Patch{Timeout: &timeout}.Apply(s)
		if err != nil || Remaining(got) != left || !got.ExpiresAt.Equal(s.ExpiresAt) {
			t.Errorf("timeout %d leaves %s, %v", timeout, Remaining(got), err)
		}
	}
}

func TestTheFirstVerdictStays(t *testing.T) {
	s := open(t, placed(), Move, "m")
	aborted, committed, err := Abort(s, "m")
	if err != nil || committed || aborted.Op != nil || aborted.Host != "h1" || aborted.Epoch != 1 {
		t.Fatalf("%+v, %v, %v", aborted, committed, err)
	}
	if got, verdict, err := Commit(aborted, "m", &Snapshot{ID: "snap-m"}, t0); err != nil || verdict || got.Epoch != 1 || got.Snapshot != nil {
		t.Errorf("committed after an abort: %+v, %v, %v", got, verdict, err)
	}
	done := commit(t, s, t0)
	if got, committed, err := Abort(done, "m"); err != nil || !committed || got.Epoch != 2 {
		t.Errorf("aborted after a commit: %+v, %v, %v", got, committed, err)
	}
	later, _, err := Abort(open(t, done, Pause, "p"), "p")
	if err != nil {
		t.Fatal(err)
	}
	if _, committed, err := Commit(later, "m", nil, t0); err != nil || !committed { // PlacedBy remembers
		t.Errorf("%v, %v", committed, err)
	}
	if _, _, err := Commit(later, "older", nil, t0); !errors.Is(err, ErrStale) {
		t.Errorf("an operation of long ago: %v", err)
	}
	if _, _, err := Commit(open(t, placed(), Pause, "p"), "p", nil, t0); !apierr.Is(err, apierr.Internal) {
		t.Errorf("a pause without its snapshot: %v", err)
	}
}

func TestVerdictsForHostsThatAskLate(t *testing.T) {
	s := placed()
	opened := open(t, s, Move, "m")
	aborted, _, _ := Abort(opened, "m")
	moved := commit(t, opened, t0)
	paused := commit(t, open(t, s, Pause, "p"), t0)
	back := commit(t, open(t, moved, Pause, "p"), t0)
	for name, c := range map[string]struct {
		got, want bool
	}{
		"source of an abort":                      {SourceVerdict(aborted, "h1", 1), false},
		"source of a move":                        {SourceVerdict(moved, "h1", 1), true},
		"source of a pause":                       {SourceVerdict(paused, "h1", 1), true},
		"source of an old operation on this host": {SourceVerdict(moved, "h2", 1), true},
		"target of an abort":                      {TargetVerdict(aborted, "m"), false},
		"target of a move":                        {TargetVerdict(moved, "m"), true},
		"target of another move to the same host": {TargetVerdict(moved, "m0"), false},
		"target of a session that has paused":     {TargetVerdict(back, "m"), false},
	} {
		if c.got != c.want {
			t.Errorf("%s: committed %v", name, c.got)
		}
	}
}

func TestRecordsOlderThanSpans(t *testing.T) {
	s := running() // no RunningSince
	if got := Usage(s, t0.Add(time.Minute)); got != time.Minute {
		t.Errorf("running: %s", got)
	}
	s.Host, s.Epoch = "h1", 1
	opened, err := Open(s, opOf(s, Pause, "p"), []byte("new"))
	if err != nil || string(opened.Key) != "new" {
		t.Fatalf("%+v, %v", opened, err)
	}
	s = commit(t, opened, t0.Add(time.Minute))
	if s.Before != time.Minute || Remaining(s) != 4*time.Minute {
		t.Errorf("%+v", s)
	}
	s, _ = End(s, t0.Add(time.Hour), PausedExpired, "")
	if got := Usage(s, t0.Add(2*time.Hour)); got != time.Minute {
		t.Errorf("ended paused: %s", got)
	}
}

// TestBillAndLifetimeAddUp plays random pauses, resumes, moves and patches, and
// counts the running milliseconds beside them.
func TestBillAndLifetimeAddUp(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		s, now := placed(), t0
		var ran time.Duration
		for i := range rapid.IntRange(1, 30).Draw(rt, "steps") {
			step := time.Duration(rapid.Int64Range(0, 50_000).Draw(rt, "ms")) * time.Millisecond
			now = now.Add(step)
			if s.Status == Running {
				ran += step
			}
			kinds := map[Status][]OpKind{Running: {Pause, Move}, Paused: {Resume}}[s.Status]
			op := opOf(s, rapid.SampledFrom(kinds).Draw(rt, "kind"), string(rune('a'+i)))
			var err error
			if s, err = Open(s, op, nil); err != nil {
				rt.Fatal(err)
			}
			if rapid.Bool().Draw(rt, "abort") {
				s, _, err = Abort(s, op.ID)
			} else {
				s, _, err = Commit(s, op.ID, map[bool]*Snapshot{true: {ID: op.SnapshotID}}[op.Kind != Resume], now)
			}
			if err != nil {
				rt.Fatal(err)
			}
			if rapid.Bool().Draw(rt, "patch") {
				n := rapid.IntRange(MinTimeout, 9000).Draw(rt, "timeout")
				s, _ = Patch{Timeout: &n}.Apply(s)
			}
			if got := Usage(s, now); got != ran {
				rt.Fatalf("%s billed, %s ran", got, ran)
			}
			end := s.ExpiresAt
			if s.Status == Paused {
				if !end.Equal(s.PausedAt.Add(PausedMax)) {
					rt.Fatalf("paused until %v", end)
				}
				continue
			}
			left := time.Duration(s.Timeout)*time.Second - ran
			if !end.Equal(now.Add(left)) && !(left < 0 && end.Before(now.Add(time.Nanosecond))) {
				rt.Fatalf("expires %v, %s are left at %v", end, left, now)
			}
		}
	})
}
