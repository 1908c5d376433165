package placement

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// operation is one that fits the session as it is.
func (l *ledger) operation(id string, k session.OpKind, opID string) session.Operation {
	s, _ := l.View().Session(id)
	op := session.Operation{ID: opID, Kind: k, From: s.Host, To: "h2", SnapshotID: "snap-" + opID, Epoch: s.Epoch + 1, StartedAt: l.now, Deadline: l.now.Add(time.Minute)}
	switch k {
	case session.Pause:
		op.To, op.Epoch = "", s.Epoch
	case session.Resume:
		op.From = ""
		if s.Snapshot != nil {
			op.SnapshotID = s.Snapshot.ID
		}
	}
	return op
}

func (l *ledger) open(id string, k session.OpKind, opID string) Result {
	return l.do(openOperation, openOperationData{id, l.operation(id, k, opID), []byte("key")})
}

func (l *ledger) commit(id, opID string) Result { return l.do(commitOperation, l.commitData(id, opID)) }

func (l *ledger) commitData(id, opID string) commitOperationData {
	d := commitOperationData{ID: id, OpID: opID}
	if s, _ := l.View().Session(id); s.Op != nil && s.Op.Kind != session.Resume {
		d.Snapshot = &session.Snapshot{ID: s.Op.SnapshotID, Host: s.Op.From}
	}
	return d
}

func (l *ledger) abort(id, opID string) Result {
	return l.do(abortOperation, abortOperationData{id, opID})
}

func TestResumesCountAgainstTheLimit(t *testing.T) {
	l := newLedger(t) // a plan of two
	for _, id := range []string{"a", "b"} {
		l.must(l.create(id, ""))
		l.must(l.open(id, session.Pause, "p"+id))
		l.must(l.commit(id, "p"+id))
	}
	l.must(l.create("c", ""))
	l.must(l.open("a", session.Resume, "ra"))
	if v := l.View(); v.Running("p") != 1 || v.Counted("p") != 2 {
		t.Errorf("%d running, %d counted", v.Running("p"), v.Counted("p"))
	}
	for name, err := range map[string]error{"create": l.create("d", "").Err(), "resume": l.open("b", session.Resume, "rb").Err()} {
		if !apierr.Is(err, apierr.ConcurrencyLimit) {
			t.Errorf("%s beside a resume: %v", name, err)
		}
	}
	l.must(l.abort("a", "ra"))
	l.must(l.open("b", session.Resume, "rb2"))
	l.must(l.commit("b", "rb2"))
	if v := l.View(); v.Running("p") != 2 || v.Counted("p") != 2 {
		t.Errorf("%d running, %d counted", v.Running("p"), v.Counted("p"))
	}
}

func TestMachineEnded(t *testing.T) {
	ended := func(epoch uint64, reason session.EndReason, text string) endSessionData {
		return endSessionData{ID: "a", Epoch: epoch, At: epoch2, Reason: reason, Error: text}
	}
	for _, c := range []struct {
		name string
		prep func(l *ledger)
		data endSessionData
		want session.Status
		code apierr.Code
	}{
		{"running", nil, ended(1, "", "Broke."), session.Error, ""},
		{"of an earlier epoch", func(l *ledger) { l.must(l.open("a", session.Move, "m")); l.must(l.commit("a", "m")) }, ended(1, "", "Broke."), session.Running, apierr.SessionNotRunning},
		{"of a target that lost", nil, ended(2, session.Released, ""), session.Running, apierr.SessionNotRunning},
		{"source broke, operation open", func(l *ledger) { l.must(l.open("a", session.Move, "m")) }, ended(1, "", "Broke."), session.Running, apierr.OperationInProgress},
		{"target broke, operation open", func(l *ledger) { l.must(l.open("a", session.Move, "m")) }, ended(2, "", "Broke."), session.Running, apierr.OperationInProgress},
		{"timeout wins", func(l *ledger) { l.must(l.open("a", session.Move, "m")) }, ended(1, session.TimedOut, ""), session.Completed, ""},
		{"released wins", func(l *ledger) { l.must(l.open("a", session.Pause, "p")) }, ended(1, session.Released, ""), session.Completed, ""},
		{"paused", func(l *ledger) { l.must(l.open("a", session.Pause, "p")); l.must(l.commit("a", "p")) }, ended(1, "", "Broke."), session.Paused, apierr.SessionNotRunning},
	} {
		l := newLedger(t)
		l.must(l.create("a", ""))
		if c.prep != nil {
			c.prep(l)
		}
		err := l.do(machineEnded, c.data).Err()
		s, _ := l.View().Session("a")
		if s.Status != c.want || (err != nil) != (c.code != "") || err != nil && (!apierr.Is(err, c.code) || isStale(err) != (c.code == apierr.SessionNotRunning)) {
			t.Errorf("%s: %s, %v", c.name, s.Status, err)
		}
		if s.Status.Ended() && s.Op != nil {
			t.Errorf("%s: its operation is open", c.name)
		}
	}
}

var epoch2 = epoch.Add(time.Minute)

func TestPausedExpiredLosesToAResume(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	expire := func() Result {
		return l.do(endSession, endSessionData{ID: "a", Epoch: 1, At: epoch.Add(session.PausedMax), Reason: session.PausedExpired})
	}
	if r := l.must(expire()); !r.Already || r.Session.Status != session.Running {
		t.Errorf("a running session expired: %+v", r.Session)
	}
	l.must(l.open("a", session.Pause, "p"))
	l.must(l.commit("a", "p"))
	l.must(l.open("a", session.Resume, "r"))
	if r := l.must(expire()); !r.Already {
		t.Errorf("a session expired while it is resumed: %+v", r.Session)
	}
	if over := l.View().PausedOver(epoch.Add(2 * session.PausedMax)); len(over) != 0 {
		t.Errorf("over while it is resumed: %v", over)
	}
	l.must(l.abort("a", "r"))
	if over := l.View().PausedOver(epoch.Add(session.PausedMax)); len(over) != 1 || over[0].ID != "a" {
		t.Errorf("over: %v", over)
	}
	if over := l.View().PausedOver(epoch.Add(session.PausedMax - time.Second)); len(over) != 0 {
		t.Errorf("over too soon: %v", over)
	}
	if r := l.must(expire()); r.Already || r.Session.EndReason != session.PausedExpired {
		t.Errorf("%+v", r.Session)
	}
}

func TestSnapshotsAreFound(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	of := func(id string) string { s, _ := l.View().SessionOfSnapshot(id); return s.ID }
	l.must(l.open("a", session.Pause, "p"))
	if of("snap-p") != "a" || of("snap") != "" {
		t.Error("the snapshot of an open operation is unknown")
	}
	l.must(l.commit("a", "p"))
	if of("snap-p") != "a" {
		t.Error("the snapshot of a paused session is unknown")
	}
	l.must(l.do(snapshotDurable, snapshotDurableData{"a", "snap-other"}))
	before, _ := l.View().Session("a")
	l.must(l.do(snapshotDurable, snapshotDurableData{"a", "snap-p"}))
	if after, _ := l.View().Session("a"); before.Snapshot.Durable || !after.Snapshot.Durable {
		t.Errorf("durable %v, then %v", before.Snapshot.Durable, after.Snapshot.Durable)
	}
	l.must(l.do(endSession, endSessionData{ID: "a", At: l.now, Reason: session.Released}))
	if of("snap-p") != "" {
		t.Error("an ended session still refers to its snapshot")
	}
}

// TestOldLogsAreRead: what a gateway wrote before operations existed.
func TestOldLogsAreRead(t *testing.T) {
	l := newLedger(t)
	old := `{"v":1,"id":"x","at":1788264000000,"kind":"create_session","data":{"session":{"id":"a","projectId":"p","region":"local","kind":"both",` +
		`"keepAlive":false,"timeout":300,"viewport":{"width":1,"height":1},"userMetadata":{},"captcha":"ask","status":"RUNNING","createdAt":"2026-09-01T12:00:00Z",` +
		`"startedAt":"2026-09-01T12:00:00Z","endedAt":"0001-01-01T00:00:00Z","expiresAt":"2026-09-01T12:05:00Z","host":"h1","epoch":1,"moves":0,"urlKeyVersion":1,"urlIndex":0,"cutBelow":0,"settingsVersion":1}}}`
	c, err := decodeCommand([]byte(old))
	if err != nil {
		t.Fatal(err)
	}
	l.index++
	l.must(l.Apply(l.index, c))
	l.now = epoch.Add(time.Minute)
	l.must(l.open("a", session.Pause, "p"))
	s := l.must(l.commit("a", "p")).Session
	if s.Status != session.Paused || s.Before != time.Minute || string(s.Key) != "key" {
		t.Errorf("%+v", s)
	}
}

// modelled is a session of the naive model.
type modelled struct {
	status session.Status
	op     string // open, empty for none
	kind   session.OpKind
	moves  int
	epoch  uint64
	told   map[string]bool // verdicts so far
	last   string          // the operation before
	placed string          // the last that was committed and placed it
}

// TestOperationsAgainstAModel plays random operations, some commands twice,
// beside a naive copy of the rules.
func TestOperationsAgainstAModel(t *testing.T) {
	const limit = 2
	names := []string{"a", "b", "c"}
	rapid.Check(t, func(rt *rapid.T) {
		l, model, sent, n := newLedger(t), map[string]*modelled{}, []Command(nil), 0
		count := func() (n int) {
			for _, m := range model {
				if m.status == session.Running || m.op != "" && m.kind == session.Resume {
					n++
				}
			}
			return n
		}
		send := func(k kind, data any) Result {
			c := l.command(k, data)
			sent = append(sent, c)
			return l.run(c)
		}
		// some operation of a session: the open one, or an earlier one.
		someOp := func(rt *rapid.T, m *modelled) string {
			ids := []string{"never"}
			if m != nil {
				for id := range m.told {
					ids = append(ids, id)
				}
				if m.op != "" {
					ids = append(ids, m.op)
				}
			}
			slices.Sort(ids)
			return rapid.SampledFrom(ids).Draw(rt, "op")
		}
		decide := func(rt *rapid.T, k kind) {
			id := rapid.SampledFrom(names).Draw(rt, "id")
			m, commits := model[id], k == commitOperation
			op := someOp(rt, m)
			var data any = abortOperationData{id, op}
			if commits {
				data = l.commitData(id, op)
			}
			r := send(k, data)
			switch {
			case m == nil:
				wantRefusal(rt, r, apierr.NotFound)
			case m.status.Ended():
				wantRefusal(rt, r, apierr.SessionNotRunning)
			case m.op == op:
				if r.Err() != nil || r.Verdict != commits {
					rt.Fatalf("%s of the open operation: %+v", k, r)
				}
				m.told[op], m.op, m.last = commits, "", op
				if commits {
					m.commit(op)
				}
			case op == m.last || op == m.placed:
				if r.Err() != nil || r.Verdict != m.told[op] {
					rt.Fatalf("%s says %v, the first verdict was %v: %v", k, r.Verdict, m.told[op], r.Err())
				}
			default:
				wantRefusal(rt, r, apierr.OperationInProgress)
			}
		}
		rt.Repeat(map[string]func(*rapid.T){
			"create": func(rt *rapid.T) {
				id := rapid.SampledFrom(names).Draw(rt, "id")
				if _, ok := model[id]; ok {
					return
				}
				if r := send(createSession, createSessionData{draft(id, "p", l.now), ""}); count() >= limit {
					wantRefusal(rt, r, apierr.ConcurrencyLimit)
				} else if l.must(r); true {
					model[id] = &modelled{status: session.Running, epoch: 1, told: map[string]bool{}}
				}
			},
			"open": func(rt *rapid.T) {
				id := rapid.SampledFrom(names).Draw(rt, "id")
				k := rapid.SampledFrom([]session.OpKind{session.Pause, session.Resume, session.Move}).Draw(rt, "kind")
				n++
				opID := fmt.Sprint("op", n)
				r, m := send(openOperation, openOperationData{ID: id, Operation: l.operation(id, k, opID)}), model[id]
				switch {
				case m == nil:
					wantRefusal(rt, r, apierr.NotFound)
				case m.status.Ended():
					wantRefusal(rt, r, apierr.SessionNotRunning)
				case m.op != "":
					wantRefusal(rt, r, apierr.OperationInProgress)
				case (m.status == session.Paused) != (k == session.Resume):
					wantRefusal(rt, r, apierr.SessionNotRunning)
				case k == session.Resume && count() >= limit:
					wantRefusal(rt, r, apierr.ConcurrencyLimit)
				default:
					if r.Err() != nil {
						rt.Fatal(r.Err())
					}
					m.op, m.kind = opID, k
				}
			},
			"commit": func(rt *rapid.T) { decide(rt, commitOperation) },
			"abort":  func(rt *rapid.T) { decide(rt, abortOperation) },
			"end": func(rt *rapid.T) {
				id := rapid.SampledFrom(names).Draw(rt, "id")
				r := send(endSession, endSessionData{ID: id, At: l.now, Reason: session.Released})
				if m := model[id]; m != nil {
					if r.Err() != nil || r.Already != m.status.Ended() {
						rt.Fatalf("%+v", r)
					}
					m.status, m.op = session.Completed, ""
				}
			},
			"retry": func(rt *rapid.T) {
				if len(sent) > 0 {
					before := sessionsOf(l)
					if l.run(rapid.SampledFrom(sent).Draw(rt, "command")); sessionsOf(l) != before {
						rt.Fatal("a retry changed the record")
					}
				}
			},
			"restart": func(rt *rapid.T) {
				fresh := NewState()
				if err := fresh.Restore(bytes.NewReader(dump(t, l.State))); err != nil {
					rt.Fatal(err)
				}
				l.State = fresh
			},
			"wait": func(*rapid.T) { l.now = l.now.Add(time.Second) },
			"": func(rt *rapid.T) {
				open := 0
				for id, m := range model {
					s, _ := l.View().Session(id)
					if s.Status != m.status || s.Moves != m.moves || s.Epoch != m.epoch || (s.Op == nil) != (m.op == "") || s.Op != nil && s.Op.ID != m.op {
						rt.Fatalf("%s is %+v, the model %+v", id, s, m)
					}
					if m.op != "" {
						open++
					}
				}
				if v := l.View(); v.Counted("p") != count() || v.Counted("p") > limit || len(v.Operations()) != open {
					rt.Fatalf("%d counted, %d in the model; %d operations listed, %d in the model", v.Counted("p"), count(), len(v.Operations()), open)
				}
			},
		})
	})
}

func (m *modelled) commit(op string) {
	switch m.kind {
	case session.Pause:
		m.status = session.Paused
	case session.Resume:
		m.status, m.epoch, m.placed = session.Running, m.epoch+1, op
	case session.Move:
		m.epoch, m.placed = m.epoch+1, op
		m.moves++
	}
}

func wantRefusal(rt *rapid.T, r Result, code apierr.Code) {
	rt.Helper()
	if !apierr.Is(r.Err(), code) {
		rt.Fatalf("got %+v, %v; want %s", r.Session, r.Err(), code)
	}
}

// sessionsOf is every session of the record as text.
func sessionsOf(l *ledger) string {
	var b bytes.Buffer
	_ = l.View().Write(&b)
	var lines []string
	for line := range strings.Lines(b.String()) {
		if strings.Contains(line, `"t":"sessions"`) {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "")
}

func TestTargets(t *testing.T) {
	keeps := func(name, region, class string, free int) Host {
		return Host{Name: name, Region: region, Driver: "microvm", CPUClass: class, Free: free}
	}
	hosts := []Host{keeps("here", "eu", "c", 3), keeps("twin", "eu", "c", 1), keeps("other", "eu", "d", 9), keeps("full", "eu", "c", 0),
		{Name: "oci", Region: "eu", Driver: "oci", Free: 20}, keeps("far", "us", "c", 9)}
	s := session.Session{Host: "here", Region: "eu", Kind: session.Shell}
	for _, c := range []struct {
		host, region, want string
		code               apierr.Code
	}{
		{"", "", "twin oci other here", ""},
		{"", "us", "far", ""},
		{"oci", "", "oci", ""},
		{"here", "eu", "here", ""},
		{"full", "", "", apierr.NoCapacity},
		{"gone", "", "", apierr.InvalidRequest},
		{"", "moon", "", apierr.InvalidRequest},
		{"far", "eu", "", apierr.InvalidRequest},
	} {
		got, err := MoveTargets(hosts, s, c.host, c.region)
		if hostNames(got) != c.want || (err != nil) != (c.code != "") || err != nil && !apierr.Is(err, c.code) {
			t.Errorf("move to %q %q: %s, %v", c.host, c.region, hostNames(got), err)
		}
	}
	for _, c := range []struct {
		snap session.Snapshot
		want string
		code apierr.Code
	}{
		{session.Snapshot{Host: "here", Memory: true, Driver: "microvm", CPUClass: "c"}, "here twin far", ""},
		{session.Snapshot{Host: "full", Memory: true, Driver: "microvm", CPUClass: "c"}, "here twin far", ""},
		{session.Snapshot{Host: "oci"}, "oci other here twin far", ""},
		{session.Snapshot{Host: "gone", Memory: true, Driver: "microvm", CPUClass: "d", Durable: true}, "other", ""},
		{session.Snapshot{Host: "gone"}, "", apierr.Unavailable},
		{session.Snapshot{Host: "here", Memory: true, Driver: "runsc", CPUClass: "c"}, "", apierr.NoCapacity},
	} {
		s.Snapshot = &c.snap
		got, err := ResumeTargets(hosts, s)
		if hostNames(got) != c.want || (err != nil) != (c.code != "") || err != nil && !apierr.Is(err, c.code) {
			t.Errorf("resume of %+v: %s, %v", c.snap, hostNames(got), err)
		}
	}
	s.StrictRegion = true
	s.Snapshot = &session.Snapshot{Host: "oci"}
	if got, err := ResumeTargets(hosts, s); hostNames(got) != "oci other here twin" || err != nil {
		t.Errorf("a session that keeps its region may go to %s, %v", hostNames(got), err)
	}
}

func hostNames(hosts []Host) string {
	var all []string
	for _, h := range hosts {
		all = append(all, h.Name)
	}
	return strings.Join(all, " ")
}
