package placement

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

var epoch = time.Date(2026, 9, 1, 12, 0, 0, 0, time.UTC)

// ledger drives a State as the log would.
type ledger struct {
	*State
	t     testing.TB
	index uint64
	now   time.Time
}

func newLedger(t testing.TB) *ledger {
	l := &ledger{State: NewState(), t: t, now: epoch}
	l.must(l.do(setPlans, setPlansData{[]Plan{
		{Name: "Two", ConcurrentSessions: 2, MaxTimeoutSeconds: 900},
		{Name: "Five", ConcurrentSessions: 5, MaxTimeoutSeconds: 900},
	}}))
	l.must(l.do(putKey, putKeyData{Project{ID: "p", Plan: "Two"}, Key{ID: "k", Hash: "h", ProjectID: "p"}}))
	return l
}

func (l *ledger) command(k kind, data any) Command {
	c, err := newCommand(k, data, l.now)
	if err != nil {
		l.t.Fatal(err)
	}
	return c
}

// run takes the way of every command: bytes, as they stand in the log.
func (l *ledger) run(c Command) Result {
	raw, err := json.Marshal(c)
	if err == nil {
		c, err = decodeCommand(raw)
	}
	if err != nil {
		l.t.Fatal(err)
	}
	l.index++
	return l.Apply(l.index, c)
}

func (l *ledger) do(k kind, data any) Result { return l.run(l.command(k, data)) }

func (l *ledger) must(r Result) Result {
	if err := r.Err(); err != nil {
		l.t.Fatal(err)
	}
	return r
}

func draft(id, project string, created time.Time) session.Session {
	return session.Session{ID: id, ProjectID: project, Region: "local", Kind: session.Both, Status: session.Running, Timeout: 300,
		CreatedAt: created, StartedAt: created, ExpiresAt: session.Expiry(created, 300), Host: "h1", Epoch: 1, URLKeyVersion: 1}
}

func (l *ledger) create(id, key string) Result {
	return l.do(createSession, createSessionData{draft(id, "p", l.now), key})
}

func TestCreateHoldsTheLimitOfThePlan(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	l.must(l.create("b", ""))
	err := l.create("c", "").Err()
	if !apierr.Is(err, apierr.ConcurrencyLimit) || apierr.From(err).RetryAfter <= 0 || !strings.Contains(err.Error(), "Two allows 2") {
		t.Fatalf("a third session under a plan of two: %v", err)
	}
	if _, ok := l.View().Session("c"); ok {
		t.Error("the refused session is in the record")
	}
	l.must(l.do(endSession, endSessionData{ID: "a", At: l.now, Reason: session.Released}))
	l.must(l.create("c", ""))
	l.must(l.do(putKey, putKeyData{Project{ID: "p", Plan: "Five"}, Key{ID: "k2", Hash: "h2", ProjectID: "p"}}))
	l.must(l.create("d", ""))
	if n := l.View().Running("p"); n != 3 {
		t.Errorf("%d running, want 3", n)
	}
}

func TestCreateRefusals(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	ended := draft("e", "p", l.now)
	ended.Status = session.Completed
	for name, c := range map[string]struct {
		data createSessionData
		want apierr.Code
	}{
		"unknown project": {createSessionData{Session: draft("x", "nobody", l.now)}, apierr.NotFound},
		"id in use":       {createSessionData{Session: draft("a", "p", l.now)}, apierr.Internal},
		"no id":           {createSessionData{Session: draft("", "p", l.now)}, apierr.Internal},
		"not running":     {createSessionData{Session: ended}, apierr.Internal},
		"zero in the key": {createSessionData{draft("x", "p", l.now), "a\x00b"}, apierr.Internal},
	} {
		if err := l.do(createSession, c.data).Err(); !apierr.Is(err, c.want) {
			t.Errorf("%s: %v, want %s", name, err, c.want)
		}
	}
	if n := l.View().Running("p"); n != 1 {
		t.Errorf("%d running after refusals, want 1", n)
	}
}

func TestARetriedCommandGetsTheSameAnswerAndChangesNothing(t *testing.T) {
	l := newLedger(t)
	first := l.command(createSession, createSessionData{draft("a", "p", l.now), ""})
	l.must(l.run(first))
	l.must(l.create("b", ""))
	full := l.command(createSession, createSessionData{draft("c", "p", l.now), ""})
	if err := l.run(full).Err(); !apierr.Is(err, apierr.ConcurrencyLimit) {
		t.Fatal(err)
	}
	end := l.command(endSession, endSessionData{ID: "a", At: l.now, Reason: session.Released})
	if r := l.must(l.run(end)); r.Already {
		t.Error("the first end says that it came too late")
	}
	if r := l.must(l.run(end)); r.Already || r.Session.Status != session.Completed {
		t.Errorf("the end, tried again: %+v", r)
	}
	if r := l.must(l.run(first)); r.Session.ID != "a" || r.Session.Status != session.Running {
		t.Errorf("the create, tried again: %+v", r.Session)
	}
	if err := l.run(full).Err(); !apierr.Is(err, apierr.ConcurrencyLimit) {
		t.Errorf("the refusal, tried again: %v", err)
	}
	if n := l.View().Running("p"); n != 1 {
		t.Errorf("%d running, want 1", n)
	}
	if l.View().Index() != l.index {
		t.Errorf("index %d, want %d: retries count too", l.View().Index(), l.index)
	}
}

func TestIdempotencyKeys(t *testing.T) {
	l := newLedger(t)
	l.must(l.do(putKey, putKeyData{Project{ID: "q", Plan: "Two"}, Key{ID: "kq", Hash: "hq", ProjectID: "q"}}))
	l.must(l.create("a", "key"))
	if r := l.must(l.create("b", "key")); !r.Already || r.Session.ID != "a" {
		t.Errorf("the same key made %+v", r)
	}
	if r := l.must(l.do(createSession, createSessionData{draft("c", "q", l.now), "key"})); r.Already {
		t.Error("the key of one project gave another project's session")
	}
	l.must(l.do(endSession, endSessionData{ID: "a", At: l.now, Reason: session.Released}))
	if r := l.must(l.create("d", "key")); !r.Already || r.Session.Status != session.Completed {
		t.Errorf("the key of an ended session: %+v", r)
	}
	l.now = l.now.Add(idempotencyAge - time.Millisecond)
	if r := l.must(l.create("e", "key")); !r.Already {
		t.Error("forgotten before 24 h")
	}
	if s, ok := l.View().MadeWith("p", "key"); !ok || s.ID != "a" {
		t.Errorf("the view has %+v, %v", s, ok)
	}
	for _, other := range [][2]string{{"p", "other"}, {"p", ""}, {"r", "key"}} {
		if s, ok := l.View().MadeWith(other[0], other[1]); ok {
			t.Errorf("%q made %+v", other, s)
		}
	}
	l.now = l.now.Add(time.Millisecond)
	if r := l.must(l.create("f", "key")); r.Already || r.Session.ID != "f" {
		t.Errorf("after 24 h: %+v", r)
	}
}

func TestDropMakesACreateUnhappen(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", "key"))
	l.must(l.do(dropSession, dropSessionData{"a"}))
	if _, ok := l.View().Session("a"); ok {
		t.Error("the dropped session is still there")
	}
	if r := l.must(l.create("b", "key")); r.Already || r.Session.ID != "b" {
		t.Errorf("its idempotency key is still there: %+v", r)
	}
	l.must(l.do(endSession, endSessionData{ID: "b", At: l.now, Reason: session.Released}))
	l.must(l.do(dropSession, dropSessionData{"b"}))
	if _, ok := l.View().Session("b"); !ok {
		t.Error("a session that somebody ended was dropped: somebody knew of it")
	}
	l.must(l.do(dropSession, dropSessionData{"never"}))
}

func TestEnd(t *testing.T) {
	l := newLedger(t)
	s := draft("a", "p", l.now)
	s.Epoch = 3
	l.must(l.do(createSession, createSessionData{s, ""}))
	stale := l.do(endSession, endSessionData{ID: "a", Epoch: 2, At: l.now, Reason: session.TimedOut}).Err()
	if !isStale(stale) || !apierr.Is(stale, apierr.SessionNotRunning) {
		t.Errorf("an older epoch: %v", stale)
	}
	r := l.must(l.do(endSession, endSessionData{ID: "a", Epoch: 3, At: l.now.Add(time.Minute), Error: "The machine was lost."}))
	if r.Session.Status != session.Error || r.Session.EndReason != "" || !r.Session.EndedAt.Equal(l.now.Add(time.Minute)) {
		t.Errorf("ended as %+v", r.Session)
	}
	r = l.must(l.do(endSession, endSessionData{ID: "a", Epoch: 2, At: l.now, Reason: session.Released}))
	if !r.Already || r.Session.Status != session.Error {
		t.Errorf("a second end changed it: %+v", r.Session)
	}
	if err := l.do(endSession, endSessionData{ID: "b", At: l.now, Reason: session.Released}).Err(); !apierr.Is(err, apierr.NotFound) {
		t.Errorf("an unknown session: %v", err)
	}
	for name, err := range map[string]error{
		"patch":  l.do(patchSession, patchSessionData{ID: "a"}).Err(),
		"rotate": l.do(rotateURLs, rotateURLsData{ID: "a"}).Err(),
	} {
		if !apierr.Is(err, apierr.SessionNotRunning) {
			t.Errorf("%s of an ended session: %v", name, err)
		}
	}
	if r := l.must(l.do(setSetup, setSetupData{ID: "a", Status: session.SetupDone})); r.Session.SetupStatus != "" {
		t.Error("late news of setup changed an ended session")
	}
}

func isStale(err error) bool { return errors.Is(err, ErrStaleEpoch) }

func TestSettings(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	keep, timeout := true, 600
	s := l.must(l.do(patchSession, patchSessionData{"a", session.Patch{KeepAlive: &keep, Timeout: &timeout}})).Session
	if !s.KeepAlive || s.Timeout != 600 || !s.ExpiresAt.Equal(s.StartedAt.Add(10*time.Minute)) || s.SettingsVersion != 1 {
		t.Errorf("patched to %+v", s)
	}
	s = l.must(l.do(rotateURLs, rotateURLsData{ID: "a"})).Session
	if s.URLKeyVersion != 2 || s.CutBelow != 0 {
		t.Errorf("rotated to %d, cut below %d", s.URLKeyVersion, s.CutBelow)
	}
	s = l.must(l.do(rotateURLs, rotateURLsData{"a", true})).Session
	if s.URLKeyVersion != 3 || s.CutBelow != 3 {
		t.Errorf("rotated to %d, cut below %d", s.URLKeyVersion, s.CutBelow)
	}
	s = l.must(l.do(setSetup, setSetupData{"a", session.SetupFailed, "step 2"})).Session
	if s.SetupStatus != session.SetupFailed || s.SetupError != "step 2" {
		t.Errorf("setup %q %q", s.SetupStatus, s.SetupError)
	}
}

func TestKeys(t *testing.T) {
	l := newLedger(t)
	put := func(p Project, k Key) Result { return l.do(putKey, putKeyData{p, k}) }
	if r := l.must(put(Project{ID: "p"}, Key{ID: "other", Hash: "h", ProjectID: "p"})); !r.Already || r.Key.ID != "k" {
		t.Errorf("the same hash again gave %+v", r.Key)
	}
	for name, r := range map[string]Result{
		"new project without a plan": put(Project{ID: "new"}, Key{ID: "n", Hash: "n", ProjectID: "new"}),
		"unknown plan":               put(Project{ID: "p", Plan: "Gold"}, Key{ID: "n", Hash: "n", ProjectID: "p"}),
		"another project's key":      put(Project{ID: "q", Plan: "Two"}, Key{ID: "n", Hash: "h", ProjectID: "q"}),
		"id in use":                  put(Project{ID: "p"}, Key{ID: "k", Hash: "n", ProjectID: "p"}),
		"project with a space":       put(Project{ID: "a b", Plan: "Two"}, Key{ID: "n", Hash: "n", ProjectID: "a b"}),
	} {
		if !apierr.Is(r.Err(), apierr.InvalidRequest) {
			t.Errorf("%s: %v", name, r.Err())
		}
	}
	if _, ok := l.View().Project("q"); ok {
		t.Error("a refused key left its project behind")
	}
	l.now = l.now.Add(time.Hour)
	r := l.must(l.do(revokeKey, revokeKeyData{"k"}))
	if !r.Key.RevokedAt.Equal(l.now) {
		t.Errorf("revoked at %v", r.Key.RevokedAt)
	}
	l.now = l.now.Add(time.Hour)
	if again := l.must(l.do(revokeKey, revokeKeyData{"k"})); !again.Key.RevokedAt.Equal(r.Key.RevokedAt) {
		t.Error("revoking again moved the moment")
	}
	if err := l.do(revokeKey, revokeKeyData{"none"}).Err(); !apierr.Is(err, apierr.NotFound) {
		t.Error(err)
	}
	if keys := l.View().Keys("p"); len(keys) != 1 || keys[0].ID != "k" {
		t.Errorf("keys of p: %+v", keys)
	}
}

func TestAnswersAreBounded(t *testing.T) {
	l := newLedger(t)
	old := l.command(rotateURLs, rotateURLsData{ID: "a"})
	_ = l.run(old) // refused: there is no session a
	for range answersKept + 50 {
		l.do(dropSession, dropSessionData{"x"})
	}
	if n := count(l, tabAnswers); n < answersKept+50 {
		t.Fatalf("%d answers kept: young ones were forgotten", n)
	}
	l.now = l.now.Add(answerAge)
	for range 50 {
		l.do(dropSession, dropSessionData{"x"})
	}
	if n := count(l, tabAnswers); n != answersKept {
		t.Errorf("%d answers kept, want %d", n, answersKept)
	}
	l.must(l.create("a", ""))
	if err := l.run(old).Err(); err != nil {
		t.Errorf("a forgotten command ran again with %v", err)
	}
}

func count(l *ledger, table string) (n int) {
	for range rows[any](l.View(), table, byID, nil) {
		n++
	}
	return n
}

func TestSnapshotRoundTrip(t *testing.T) {
	l := newLedger(t)
	l.must(l.do(initCluster, initClusterData{bytes.Repeat([]byte{7}, 32)}))
	l.must(l.create("a", "key"))
	l.must(l.create("b", ""))
	l.must(l.do(endSession, endSessionData{ID: "b", At: l.now, Reason: session.Released}))
	c := l.command(createSession, createSessionData{draft("c", "p", l.now), ""})
	l.must(l.run(c))

	other := newLedger(t)
	other.must(other.create("stray", ""))
	_, _, changed := other.View().WatchSession("stray")
	if err := other.Restore(bytes.NewReader(dump(t, l.State))); err != nil {
		t.Fatal(err)
	}
	if got, want := dump(t, other.State), dump(t, l.State); !bytes.Equal(got, want) {
		t.Errorf("restored\n%s\nwant\n%s", got, want)
	}
	select {
	case <-changed:
	default:
		t.Error("who watched a session across a restore was not woken")
	}
	other.index = l.index
	if r := other.must(other.run(c)); r.Session.ID != "c" || other.View().Running("p") != 2 {
		t.Error("a retry after the restore was applied twice")
	}
	if r := other.must(other.create("d", "key")); !r.Already {
		t.Error("the idempotency key was lost")
	}
}

func dump(t testing.TB, s *State) []byte {
	var b bytes.Buffer
	if err := s.View().Write(&b); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

func TestABadSnapshotChangesNothing(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	good := dump(t, l.State)
	lines := bytes.SplitAfter(good, []byte("\n"))
	for name, bad := range map[string][]byte{
		"empty":     nil,
		"torn":      good[:len(good)-20],
		"a row off": bytes.Join(lines[:len(lines)-2], nil),
		"more":      append(bytes.Clone(good), lines[1]...),
		"newer":     bytes.Replace(good, []byte(`"version":1`), []byte(`"version":2`), 1),
		"foreign":   []byte(`{"format":"else","version":1}`),
		"table":     bytes.Replace(good, []byte(`"t":"plans"`), []byte(`"t":"plums"`), 1),
	} {
		if err := l.Restore(bytes.NewReader(bad)); err == nil {
			t.Errorf("%s: restored", name)
		}
		if !bytes.Equal(dump(t, l.State), good) {
			t.Fatalf("%s: the record changed", name)
		}
	}
}

func TestCommandsOfANewerBerthAreRefused(t *testing.T) {
	for _, raw := range []string{`{"v":2,"kind":"create_session"}`, `{"v":1,"kind":"teleport"}`, `nonsense`} {
		if _, err := decodeCommand([]byte(raw)); err == nil {
			t.Errorf("%s was taken", raw)
		}
	}
}

func TestListing(t *testing.T) {
	l := newLedger(t)
	l.must(l.do(setPlans, setPlansData{[]Plan{{Name: "Two", ConcurrentSessions: 100, MaxTimeoutSeconds: 900}}}))
	for i := range 10 {
		s := draft(fmt.Sprintf("s%d", i), "p", l.now.Add(time.Duration(i/2)*time.Second)) // pairs of one age
		s.Region = []string{"eu", "us"}[i%2]
		s.UserMetadata = json.RawMessage(fmt.Sprintf(`{"n":%d,"team":"t%d","deep":{"a":1}}`, i, i%3))
		l.must(l.do(createSession, createSessionData{s, ""}))
	}
	list := func(f Filter) string {
		var ids []string
		for page := 0; ; page++ {
			found, next, err := l.View().Sessions(f)
			if err != nil || page > 20 || f.Limit > 0 && len(found) > f.Limit {
				t.Fatalf("page %d: %d sessions, %v", page, len(found), err)
			}
			for _, s := range found {
				ids = append(ids, s.ID)
			}
			if f.Cursor = next; next == "" {
				return strings.Join(ids, " ")
			}
		}
	}
	all := "s9 s8 s7 s6 s5 s4 s3 s2 s1 s0"
	for limit := range 12 {
		if got := list(Filter{Project: "p", Limit: limit}); got != all {
			t.Errorf("limit %d: %s", limit, got)
		}
		if got := list(Filter{Status: session.Running, Limit: limit}); got != all {
			t.Errorf("all projects, limit %d: %s", limit, got)
		}
	}
	for _, c := range []struct {
		f    Filter
		want string
	}{
		{Filter{Project: "p", Region: "us", Limit: 2}, "s9 s7 s5 s3 s1"},
		{Filter{Project: "p", Metadata: map[string]string{"team": "t0"}, Limit: 3}, "s9 s6 s3 s0"},
		{Filter{Project: "p", Metadata: map[string]string{"team": "t0", "n": "6"}}, "s6"},
		{Filter{Project: "p", Metadata: map[string]string{"none": ""}}, ""},
		{Filter{Project: "p", Status: session.Paused}, ""},
		{Filter{Project: "q"}, ""},
		{Filter{Project: "pp"}, ""},
	} {
		if got := list(c.f); got != c.want {
			t.Errorf("%+v: %s, want %s", c.f, got, c.want)
		}
	}
	if _, _, err := l.View().Sessions(Filter{Cursor: "garbage!"}); !apierr.Is(err, apierr.InvalidRequest) {
		t.Errorf("a foreign cursor: %v", err)
	}
}

func TestAViewStandsStillAndAWatchWakes(t *testing.T) {
	l := newLedger(t)
	l.must(l.create("a", ""))
	before := l.View()
	_, ok, changed := before.WatchSession("a")
	_, _, appears := before.WatchSession("b")
	l.must(l.do(setSetup, setSetupData{ID: "a", Status: session.SetupDone}))
	l.must(l.create("b", ""))
	for name, ch := range map[string]<-chan struct{}{"changed": changed, "appears": appears} {
		select {
		case <-ch:
		default:
			t.Errorf("%s: not woken", name)
		}
	}
	if s, _ := before.Session("a"); !ok || s.SetupStatus != "" || before.Running("p") != 1 {
		t.Error("an old view changed")
	}
}

// TestRecordAgainstAModel plays random commands, some of them twice, against a
// naive copy of the rules.
func TestRecordAgainstAModel(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		l := newLedger(t)
		const limit = 2
		model := map[string]session.Status{}
		byKey := map[string]string{}
		running := func() (ids []string) {
			for id, s := range model {
				if s == session.Running {
					ids = append(ids, id)
				}
			}
			slices.Sort(ids)
			return ids
		}
		var sent []Command
		id := rapid.SampledFrom([]string{"a", "b", "c", "d", "e", "f"})
		rt.Repeat(map[string]func(*rapid.T){
			"create": func(rt *rapid.T) {
				name, key := id.Draw(rt, "id"), rapid.SampledFrom([]string{"", "x", "y"}).Draw(rt, "key")
				c := l.command(createSession, createSessionData{draft(name, "p", l.now), key})
				sent = append(sent, c)
				r := l.run(c)
				made, known := byKey[key]
				_, exists := model[name]
				switch {
				case key != "" && known:
					if !r.Already || r.Session.ID != made {
						rt.Fatalf("key %s made %s, got %+v", key, made, r)
					}
				case exists:
					if r.Err() == nil {
						rt.Fatalf("%s was made twice", name)
					}
				case len(running()) >= limit:
					if !apierr.Is(r.Err(), apierr.ConcurrencyLimit) {
						rt.Fatalf("%d run, and another: %v", limit, r.Err())
					}
				default:
					if r.Err() != nil {
						rt.Fatal(r.Err())
					}
					model[name] = session.Running
					if key != "" {
						byKey[key] = name
					}
				}
			},
			"end": func(rt *rapid.T) {
				name := id.Draw(rt, "id")
				c := l.command(endSession, endSessionData{ID: name, At: l.now, Reason: session.Released})
				sent = append(sent, c)
				r := l.run(c)
				if s, exists := model[name]; exists != (r.Err() == nil) || exists && r.Already != s.Ended() {
					rt.Fatalf("end of %s (%s): %+v", name, s, r)
				} else if exists {
					model[name] = session.Completed
				}
			},
			"drop": func(rt *rapid.T) {
				name := id.Draw(rt, "id")
				c := l.command(dropSession, dropSessionData{name})
				sent = append(sent, c)
				l.must(l.run(c))
				if model[name] == session.Running {
					delete(model, name)
					for k, v := range byKey {
						if v == name {
							delete(byKey, k)
						}
					}
				}
			},
			"retry": func(rt *rapid.T) {
				if len(sent) > 0 {
					before := l.View()
					l.run(rapid.SampledFrom(sent).Draw(rt, "command"))
					if !reflect.DeepEqual(ids(before), ids(l.View())) {
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
				v := l.View()
				found, _, _ := v.Sessions(Filter{Project: "p", Status: session.Running})
				if n := v.Running("p"); n > limit || n != len(found) || n != len(running()) || n != len(v.SessionsOnHost("h1")) {
					rt.Fatalf("%d counted, %d listed, %d in the model, %d on the host", n, len(found), len(running()), len(v.SessionsOnHost("h1")))
				}
			},
		})
	})
}

func ids(v *View) map[string]session.Status {
	all := map[string]session.Status{}
	found, _, _ := v.Sessions(Filter{})
	for _, s := range found {
		all[s.ID] = s.Status
	}
	return all
}
