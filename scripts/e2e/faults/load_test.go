package faults

import (
	"context"
	"encoding/json"
	"net/http"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
)

// load creates, uses and releases sessions from several clients until it is
// stopped, and remembers what it was told.
type load struct {
	t *testing.T
	c *testenv.Client

	mu       sync.Mutex // guards what follows
	created  map[string]bool
	released map[string]bool
	answers  map[int]int
}

func (l *load) run(ctx context.Context) {
	for ctx.Err() == nil {
		id := l.create(ctx)
		if id == "" {
			time.Sleep(50 * time.Millisecond) // as a client that backs off
			continue
		}
		_, _ = l.c.Try(ctx, http.MethodPost, "/v1/sessions/"+id+"/exec", testenv.Fields{"command": "echo $$"}) // may hit an outage
		l.mu.Lock()
		keep := len(l.created) - len(l.released)
		l.mu.Unlock()
		if keep > 6 {
			l.release(ctx, id)
		}
	}
}

func (l *load) create(ctx context.Context) string {
	a, err := l.c.Try(ctx, http.MethodPost, "/v1/sessions", testenv.Fields{"browser": false, "shell": true})
	l.mu.Lock()
	defer l.mu.Unlock()
	if err != nil {
		l.answers[0]++
		return ""
	}
	l.answers[a.Status]++
	if a.Status != http.StatusCreated {
		return ""
	}
	var s api.Session
	if err := json.Unmarshal(a.Body, &s); err != nil {
		l.t.Errorf("%v: %s", err, a.Body)
	}
	l.created[s.Id] = true
	return s.Id
}

func (l *load) release(ctx context.Context, id string) {
	a, err := l.c.Try(ctx, http.MethodPost, "/v1/sessions/"+id+"/release", nil)
	if err != nil || a.Status != http.StatusOK {
		return // nothing was acknowledged
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.released[id] = true
}

// Each daemon is killed in turn while clients create and release. What they
// were told is what the record says, and each session that it says is running
// answers.
func TestAcknowledgedIsKept(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	l := &load{t: t, c: c, created: map[string]bool{}, released: map[string]bool{}, answers: map[int]int{}}
	ctx, stop := context.WithCancel(within(t, 2*time.Minute))
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() { l.run(ctx) })
	}
	for _, daemon := range []string{testenv.Gateway, testenv.Hostd, testenv.Proxyd, testenv.Hostd, testenv.Gateway} {
		time.Sleep(1500 * time.Millisecond) // of load
		env.Kill9(t, daemon)
		env.Restart(t, daemon)
	}
	time.Sleep(time.Second)
	stop()
	wg.Wait()
	t.Logf("answers to creates (0: none): %v; created %d, released %d", l.answers, len(l.created), len(l.released))
	if len(l.created) < 5 {
		t.Errorf("only %d creates were acknowledged: not much of a load", len(l.created))
	}
	for id := range l.created {
		s := c.Get(id)
		switch {
		case l.released[id] && (s.Status != "COMPLETED" || *s.EndReason != "released"):
			t.Errorf("released %s is %s", id, s.Status)
		case !l.released[id] && s.Status == "ERROR":
			t.Errorf("%s was acknowledged and is lost: %s", id, *s.Error)
		}
	}
	var running api.SessionList
	testenv.Wait(t, 45*time.Second, "every session that is listed as running answers", func() bool {
		c.Want(200, http.MethodGet, "/v1/sessions?status=RUNNING", nil, &running)
		for _, s := range running.Data {
			a := c.Do(http.MethodPost, "/v1/sessions/"+s.Id+"/exec", testenv.Fields{"command": "echo x"})
			if a.Status != http.StatusOK {
				if a.Status != http.StatusServiceUnavailable && a.Status != http.StatusConflict {
					t.Fatalf("%s: %d %s", s.Id, a.Status, a.Body)
				}
				return false // cut off in the middle of its create, and not yet given up
			}
		}
		return true
	})
	var all api.ReleasedList
	c.Want(200, http.MethodPost, "/v1/sessions/release-all", nil, &all)
	if len(all.Data) != len(running.Data) {
		t.Errorf("release-all ended %d of %d", len(all.Data), len(running.Data))
	}
}
