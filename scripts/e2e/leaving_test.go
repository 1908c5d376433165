package e2e

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
)

// Clients that leave in the middle leave nothing behind.
func TestClientLeavesExec(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Shell()
	for _, f := range []testenv.Fields{{"command": "sleep 11111"}, {"command": "sleep 11111", "shell": false}, {"command": "echo x; sleep 11111", "stream": true}} {
		ctx, leave := context.WithCancel(within(t, time.Minute))
		gone := make(chan struct{})
		go func() {
			defer close(gone)
			_, _ = c.Try(ctx, http.MethodPost, "/v1/sessions/"+s.Id+"/exec", f) // it is cut on purpose
		}()
		watching := testenv.Fields{"command": "pgrep -f '^sleep 11111' || true", "shell": "watch"}
		testenv.Wait(t, 10*time.Second, "the command runs", func() bool { return c.ExecWith(s.Id, watching).Stdout != "" })
		leave()
		<-gone
		testenv.Wait(t, 10*time.Second, "the command of a client that left is gone", func() bool { return c.ExecWith(s.Id, watching).Stdout == "" })
	}
	if got := c.Output(s.Id, "echo usable"); got != "usable" {
		t.Errorf("%q", got)
	}
}

func TestClientLeavesUpload(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Shell()
	ctx, leave := context.WithCancel(within(t, time.Minute))
	r, w := io.Pipe()
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		_, _ = c.Try(ctx, http.MethodPut, testenv.FilePath(s.Id, "dir/half"), r)
	}()
	if _, err := w.Write(make([]byte, 8<<20)); err != nil {
		t.Fatal(err)
	}
	used := func() string { return c.Output(s.Id, "find /workspace -size +100k | wc -l") }
	testenv.Wait(t, 10*time.Second, "bytes arrive", func() bool { return used() != "0" })
	leave()
	w.CloseWithError(io.ErrClosedPipe)
	<-gone
	testenv.Wait(t, 10*time.Second, "nothing of the upload is left", func() bool { return used() == "0" })
	c.Refused(apierr.NotFound, "", http.MethodGet, testenv.FilePath(s.Id, "dir/half"), nil)
}

// A create whose client left either never was or is not kept: it does not
// count, is not listed as running, and its machine is gone.
func TestClientLeavesCreate(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	for i := range 12 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i*i)*time.Millisecond/2)
		a, err := c.Try(ctx, http.MethodPost, "/v1/sessions", testenv.Fields{"browser": false, "shell": true, "userMetadata": testenv.Fields{"i": i}})
		cancel()
		if err == nil && a.Status != http.StatusCreated {
			t.Errorf("%d %s", a.Status, a.Body)
		}
		if err == nil {
			var s struct{ ID string }
			decode(t, a.Body, &s)
			c.Release(s.ID)
		}
	}
	// An answer that was on its way when the client left has made its session;
	// the gateway has noted it. Nothing else stays.
	var l api.SessionList
	testenv.Wait(t, 10*time.Second, "no session runs whose client left before the answer", func() bool {
		c.Want(200, http.MethodGet, "/v1/sessions?status=RUNNING", nil, &l)
		log := env.Log("gateway")
		return !slices.ContainsFunc(l.Data, func(s api.Session) bool {
			return !strings.Contains(log, `msg="session created" daemon=gateway session=`+s.Id)
		})
	})
	if len(l.Data) > 2 {
		t.Errorf("%d of 12 answers were on their way when the client left", len(l.Data))
	}
	var me api.Me
	c.Want(200, http.MethodGet, "/v1/auth/me", nil, &me)
	if me.Usage.RunningSessions != len(l.Data) {
		t.Errorf("%d sessions count, %d are listed", me.Usage.RunningSessions, len(l.Data))
	}
	for _, s := range l.Data {
		c.Release(s.Id)
	}
}

// Whoever pours bytes in and does not read is held up, not stored.
func TestSlowReaderHoldsTheWriter(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	s := c.Shell()
	ctx, leave := context.WithCancel(within(t, time.Minute))
	defer leave()
	resp, err := c.Send(ctx, http.MethodPost, "/v1/sessions/"+s.Id+"/exec", testenv.Fields{"command": "yes", "shell": false, "stream": true})
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	flat := watchMemory(t, env)
	time.Sleep(3 * time.Second) // bash could print gigabytes meanwhile
	flat()
	if got := c.Output(s.Id, "ps -o rss= -p $(pgrep -x yes) | awk '{print $1 < 100000}'"); got != "1" {
		t.Errorf("%q", got)
	}
	leave()
	testenv.Wait(t, 10*time.Second, "yes has ended", func() bool { return strings.TrimSpace(c.Exec(s.Id, "pgrep -x yes").Stdout) == "" })
}
