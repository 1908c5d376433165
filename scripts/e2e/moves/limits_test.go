package moves

import (
	"encoding/json"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
)

var shellOnly = testenv.Fields{"browser": false, "shell": true, "timeout": 800}

func pause(c *testenv.Client, id string) (s api.Session) {
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+id+"/pause", nil, &s)
	return s
}

func resume(c *testenv.Client, id string) (s api.Session) {
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+id+"/resume", nil, &s)
	return s
}

// A pause frees a place of the plan, and a resume needs one, whoever asks for it.
func TestResumeNeedsAPlaceOfThePlan(t *testing.T) {
	c := memory.Start(t).Client(t, "Free") // three at once
	var ids []string
	for range 3 {
		ids = append(ids, create(t, c, shellOnly).Id)
	}
	c.Output(ids[0], "A=kept")
	c.Refused(apierr.ConcurrencyLimit, "", http.MethodPost, "/v1/sessions", shellOnly)
	pause(c, ids[0])
	fourth := create(t, c, shellOnly)
	a := c.Refused(apierr.ConcurrencyLimit, "", http.MethodPost, "/v1/sessions/"+ids[0]+"/resume", nil)
	if a.Header.Get("Retry-After") == "" {
		t.Error("no retry-after")
	}
	c.Refused(apierr.ConcurrencyLimit, "", http.MethodPost, "/v1/sessions/"+ids[0]+"/exec", testenv.Fields{"command": "true"})
	c.Refused(apierr.ConcurrencyLimit, "", http.MethodGet, testenv.FilePath(ids[0], "/workspace"), nil)
	if got := c.Get(ids[0]); got.Status != "PAUSED" {
		t.Fatalf("refused, it is %s", got.Status)
	}
	c.Release(fourth.Id)
	if got := c.Output(ids[0], "echo $A"); got != "kept" {
		t.Errorf("resumed by an exec: %q", got)
	}
	// A move takes no second place.
	if m := move(t, c, ids[0]); m.Session.Moves != 1 {
		t.Errorf("%d moves", m.Session.Moves)
	}
}

// What is refused leaves the session as it was.
func TestRefusedMoves(t *testing.T) {
	c := memory.Start(t).Client(t, "Scale")
	s := create(t, c, shellOnly)
	path := "/v1/sessions/" + s.Id
	c.Refused(apierr.InvalidRequest, "host", http.MethodPost, path+"/move", testenv.Fields{"host": "h77"})
	c.Refused(apierr.InvalidRequest, "region", http.MethodPost, path+"/move", testenv.Fields{"region": "nowhere"})
	c.Refused(apierr.InvalidRequest, "place", http.MethodPost, path+"/move", testenv.Fields{"place": "h1"})
	pause(c, s.Id)
	c.Refused(apierr.SessionNotRunning, "", http.MethodPost, path+"/move", nil)
	if got := c.Get(s.Id); got.Status != "PAUSED" || got.Moves != 0 {
		t.Errorf("refused moves made it %s with %d moves", got.Status, got.Moves)
	}
	if got := c.Release(s.Id); got.Status != "COMPLETED" || *got.EndReason != "released" {
		t.Errorf("released while paused: %s %v", got.Status, got.EndReason)
	}
	for _, what := range []string{"/pause", "/resume", "/move", "/release"} {
		c.Refused(apierr.SessionNotRunning, "", http.MethodPost, path+what, nil)
	}
}

// near says whether two times are the same but for what requests take.
func near(a, b time.Time) bool { return a.Sub(b).Abs() < 5*time.Second }

// The lifetime stands still while a session is paused, and looking at it does
// not wake it.
func TestThePausedLifetime(t *testing.T) {
	env := memory.Start(t)
	c := env.Client(t, "Scale")
	s := create(t, c, shellOnly)
	if n := len(env.VMs()); n != 1 {
		t.Errorf("a running session has %d machines", n)
	}
	asked := time.Now()
	paused := pause(c, s.Id)
	left := time.Until(s.ExpiresAt)
	if want := asked.Add(30 * 24 * time.Hour); !near(paused.ExpiresAt, want) {
		t.Errorf("paused it expires %s, want %s", paused.ExpiresAt, want)
	}
	began := time.Now()
	testenv.Wait(t, 20*time.Second, "six seconds pass", func() bool {
		for _, path := range []string{"", "/events", "/live"} {
			c.Want(http.StatusOK, http.MethodGet, "/v1/sessions/"+s.Id+path, nil, nil)
		}
		c.Want(http.StatusOK, http.MethodGet, "/v1/sessions?status=PAUSED", nil, nil)
		return time.Since(began) > 6*time.Second
	})
	now := c.Get(s.Id)
	if now.Status != "PAUSED" || now.Usage.Seconds != paused.Usage.Seconds || !now.ExpiresAt.Equal(paused.ExpiresAt) {
		t.Errorf("after looking: %s, %v s, %s", now.Status, now.Usage.Seconds, now.ExpiresAt)
	}
	if n := len(env.VMs()); n != 0 {
		t.Errorf("a paused session has %d machines", n)
	}
	resumed := resume(c, s.Id)
	if want := time.Now().Add(left); !near(resumed.ExpiresAt, want) || !resumed.ExpiresAt.After(s.ExpiresAt) {
		t.Errorf("resumed it expires %s, want %s (at first %s)", resumed.ExpiresAt, want, s.ExpiresAt)
	}
}

// lifecycle gives state, reason and memory of a session's lifecycle events, and
// fails when the log's numbers do not rise.
func lifecycle(t *testing.T, c *testenv.Client, id string) (out []string, last uint64) {
	t.Helper()
	for _, e := range c.Events(id) {
		if e.Seq <= last {
			t.Fatalf("event %d came after %d", e.Seq, last)
		}
		last = e.Seq
		var d struct {
			State, Reason string
			Memory        *bool
		}
		if err := json.Unmarshal(e.Data, &d); err != nil || e.Type != event.Lifecycle {
			continue
		}
		how := ""
		if d.Memory != nil {
			how = map[bool]string{true: " memory", false: " portable"}[*d.Memory]
		}
		out = append(out, d.State+" "+d.Reason+how)
	}
	return out, last
}

// The log of a session is one log wherever the session is, and its numbers
// are used once.
func TestOneLogOfEvents(t *testing.T) {
	for name, stack := range map[string]*testenv.Stack{"memory": memory, "portable": portable} {
		t.Run(name, func(t *testing.T) {
			c := stack.Start(t).Client(t, "Scale")
			s := create(t, c, shellOnly)
			want := []string{"RUNNING created"}
			seen := map[uint64]string{} // what a number was used for
			check := func(more ...string) {
				t.Helper()
				want = append(want, more...)
				got, _ := lifecycle(t, c, s.Id)
				if !slices.Equal(got, want) {
					t.Fatalf("the log has %q, want %q", got, want)
				}
				for _, e := range c.Events(s.Id) {
					text := e.At.String() + string(e.Data)
					if before, ok := seen[e.Seq]; ok && before != text {
						t.Fatalf("event %d was %s and is %s", e.Seq, before, text)
					}
					seen[e.Seq] = text
				}
			}
			for range 2 {
				c.Output(s.Id, "echo an event")
				move(t, c, s.Id)
				check("RUNNING moved " + name)
				c.Output(s.Id, "echo another")
				pause(c, s.Id)
				check("PAUSED paused " + name)
				resume(c, s.Id)
				check("RUNNING resumed " + name)
			}
			execs := 0
			for _, e := range c.Events(s.Id) {
				if e.Type == event.Exec {
					execs++
				}
			}
			if execs != 4 {
				t.Errorf("%d exec events, want 4", execs)
			}
			c.Release(s.Id)
			check("COMPLETED released")
		})
	}
}
