package e2e

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/event"
)

func TestSetup(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Create(testenv.Fields{"browser": false, "shell": true, "setup": []string{"sleep 0.5", "echo one > /workspace/one", "export FROM_SETUP=yes; cd /tmp"}})
	if s.SetupStatus == nil || *s.SetupStatus != "running" && *s.SetupStatus != "done" {
		t.Errorf("setupStatus at create: %v", s.SetupStatus)
	}
	// The first command waits for setup and finds the shell as setup left it.
	if got := c.Output(s.Id, "cat /workspace/one; echo $FROM_SETUP; pwd"); got != "one\nyes\n/tmp" {
		t.Errorf("after setup: %q", got)
	}
	testenv.Wait(t, 5*time.Second, "setupStatus done", func() bool { return *c.Get(s.Id).SetupStatus == "done" })
	steps := 0
	for _, e := range c.Events(s.Id) {
		var d struct {
			Step     *int
			Command  string
			ExitCode *int
		}
		_ = json.Unmarshal(e.Data, &d) // other events have other fields
		if e.Type == event.Lifecycle && d.Step != nil && d.ExitCode != nil {
			steps++
			if *d.ExitCode != 0 || d.Command == "" {
				t.Errorf("setup step: %s", e.Data)
			}
		}
	}
	if steps != 3 {
		t.Errorf("%d setup steps in the events, want 3", steps)
	}

	bad := c.Create(testenv.Fields{"browser": false, "shell": true, "setup": []string{"true", "echo broken >&2; exit 3", "touch /workspace/never"}})
	testenv.Wait(t, 10*time.Second, "setupStatus failed", func() bool { return *c.Get(bad.Id).SetupStatus == "failed" })
	got := c.Get(bad.Id)
	if got.SetupError == nil || !strings.Contains(*got.SetupError, "3") || got.Status != "RUNNING" {
		t.Errorf("setupError %v, status %s", got.SetupError, got.Status)
	}
	if got := c.Output(bad.Id, "ls /workspace"); strings.Contains(got, "never") {
		t.Errorf("setup went on after a failure: %q", got)
	}
}

func TestEventsPages(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Shell()
	for i := range 4 {
		c.ExecWith(s.Id, testenv.Fields{"command": fmt.Sprintf("exit %d", i), "shell": false})
	}
	testenv.Wait(t, 5*time.Second, "four exec events", func() bool {
		n := 0
		for _, e := range c.Events(s.Id) {
			if e.Type == event.Exec {
				n++
			}
		}
		return n == 4
	})
	all := c.Events(s.Id)
	for i, e := range all {
		if e.Seq != all[0].Seq+uint64(i) {
			t.Errorf("event %d has seq %d after %d", i, e.Seq, all[0].Seq)
		}
	}
	var seen []event.Event
	for after := uint64(0); ; {
		var page struct {
			Data      []event.Event
			NextAfter uint64
		}
		c.Want(http.StatusOK, http.MethodGet, fmt.Sprintf("/v1/sessions/%s/events?types=exec&limit=3&after=%d", s.Id, after), nil, &page)
		if len(page.Data) == 0 {
			break
		}
		seen = append(seen, page.Data...)
		after = page.NextAfter
	}
	if len(seen) != 4 {
		t.Fatalf("paging gave %d exec events", len(seen))
	}
	for i, e := range seen {
		var d struct {
			Command    string
			ExitCode   *int
			DurationMs *int64
			TimedOut   *bool
		}
		if err := json.Unmarshal(e.Data, &d); err != nil || d.ExitCode == nil || *d.ExitCode != i || d.DurationMs == nil || d.TimedOut == nil {
			t.Errorf("exec event %d: %s (%v)", i, e.Data, err)
		}
	}
}

// sse reads a stream's events into a channel that closes with the stream.
func sse(t *testing.T, c *testenv.Client, ctx context.Context, path string, header ...string) <-chan event.Event {
	t.Helper()
	resp, err := c.Send(ctx, http.MethodGet, path, nil, header...)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d", path, resp.StatusCode)
	}
	out := make(chan event.Event, 100)
	go func() {
		defer close(out)
		defer resp.Body.Close()
		id := ""
		for scan := bufio.NewScanner(resp.Body); scan.Scan(); {
			line := scan.Text()
			if v, ok := strings.CutPrefix(line, "id: "); ok {
				id = v
			}
			if strings.HasPrefix(line, "event:") {
				t.Errorf("a named event: %s", line)
			}
			if v, ok := strings.CutPrefix(line, "data: "); ok {
				var e event.Event
				if err := json.Unmarshal([]byte(v), &e); err != nil || fmt.Sprint(e.Seq) != id {
					t.Errorf("id %s, data %s (%v)", id, v, err)
				}
				out <- e
			}
		}
	}()
	return out
}

func next(t *testing.T, ch <-chan event.Event) event.Event {
	t.Helper()
	select {
	case e, ok := <-ch:
		if !ok {
			t.Fatal("the stream has ended")
		}
		return e
	case <-time.After(10 * time.Second):
		t.Fatal("no event came")
	}
	return event.Event{}
}

func TestEventStream(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	s := c.Shell()
	path := "/v1/sessions/" + s.Id + "/events/stream"
	ctx, leave := context.WithCancel(within(t, time.Minute))
	live := sse(t, c, ctx, path+"?types=exec")
	c.Exec(s.Id, "true # one")
	one := next(t, live)
	if one.Type != event.Exec || !strings.Contains(string(one.Data), "# one") {
		t.Fatalf("a new stream began with %+v: %s", one, one.Data)
	}
	leave()
	c.Exec(s.Id, "true # two")
	c.Exec(s.Id, "true # three")
	// Last-Event-ID wins over after, nothing is lost or doubled.
	again := sse(t, c, within(t, time.Minute), path+"?types=exec,lifecycle&after=0", "Last-Event-ID", fmt.Sprint(one.Seq))
	for _, want := range []string{"# two", "# three"} {
		if e := next(t, again); !strings.Contains(string(e.Data), want) || e.Seq <= one.Seq {
			t.Errorf("after Last-Event-ID came %+v: %s, want %s", e, e.Data, want)
		}
	}
	c.Release(s.Id)
	last := event.Event{}
	for e := range again { // the stream ends by itself
		last = e
	}
	if last.Type != event.Lifecycle || !strings.Contains(string(last.Data), "released") {
		t.Errorf("the last event of an ended session: %+v %s", last, last.Data)
	}
	var all []event.Event
	for e := range sse(t, c, within(t, 20*time.Second), path+"?after=0") {
		all = append(all, e)
	}
	if len(all) < 5 || all[len(all)-1].Seq != last.Seq {
		t.Errorf("an ended session's stream gave %d events", len(all))
	}
}
