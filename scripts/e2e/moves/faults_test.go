package moves

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
)

// harmed is a session on the microVM hosts to which bad things happen. It
// counts in a file; what it keeps changes before each operation, so that a
// machine that went on from an older capture is found out.
type harmed struct {
	t     *testing.T
	env   *testenv.Env
	c     *testenv.Client
	id    string
	round int
	count int // the counter when last looked at
}

func newHarmed(t *testing.T, env *testenv.Env) *harmed {
	c := env.Client(t, "Scale")
	x := &harmed{t: t, env: env, c: c}
	x.begin()
	return x
}

func (x *harmed) begin() {
	x.t.Helper()
	x.id, x.count = create(x.t, x.c, testenv.Fields{"browser": false, "shell": true, "timeout": 7200}).Id, 0
	x.c.Output(x.id, "(n=0; while :; do n=$((n+1)); echo $n > .n; mv .n count; sleep 0.1; done) >/dev/null 2>&1 & sleep 0.3")
}

// change gives variable and files a new content.
func (x *harmed) change() {
	x.t.Helper()
	x.round++
	x.c.Output(x.id, fmt.Sprintf("ROUND=%d; echo $ROUND > round; head -c 300000 /dev/urandom > data; sha256sum data round > sums", x.round))
}

// whole wants everything as the last change left it, and the counter never back.
func (x *harmed) whole(what string) {
	x.t.Helper()
	got := x.c.Output(x.id, "echo $ROUND; sha256sum -c sums; cat count")
	var round, count int
	lines := strings.Fields(strings.ReplaceAll(strings.ReplaceAll(got, "data: OK", ""), "round: OK", ""))
	if _, err := fmt.Sscan(strings.Join(lines, " "), &round, &count); err != nil || round != x.round {
		x.t.Fatalf("%s: round %d has %q", what, x.round, got)
	}
	if count < x.count {
		x.t.Fatalf("%s: the counter went back from %d to %d", what, x.count, count)
	}
	x.count = count
}

// where is the daemon whose machine the session is in.
func (x *harmed) where() string {
	x.t.Helper()
	vms := x.env.VMs()
	if len(vms) != 1 {
		x.t.Fatalf("the session has %d machines: %v", len(vms), vms)
	}
	return vms[0].Daemon
}

// settled waits until the session is in a state to stay in, with the machines
// that belong to it and no other. It gives the status.
func (x *harmed) settled() (s api.Session) {
	x.t.Helper()
	want := map[api.Status]int{"RUNNING": 1}
	last := ""
	for deadline := time.Now().Add(90 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		s = x.c.Get(x.id)
		vms := x.env.VMs()
		if len(vms) == want[s.Status] && x.answers(s) {
			return s
		}
		if last = fmt.Sprintf("%s with machines %v", s.Status, vms); time.Now().After(deadline) {
			x.t.Fatalf("it did not settle: %s", last)
		}
	}
}

// answers says whether a running session works; one that is not is as it is.
func (x *harmed) answers(s api.Session) bool {
	if s.Status != "RUNNING" {
		return true
	}
	a, err := x.c.Try(within(x.t, time.Minute), http.MethodPost, "/v1/sessions/"+x.id+"/exec", testenv.Fields{"command": "true", "shell": false})
	return err == nil && a.Status == http.StatusOK
}

// order asks for an operation; ok says whether it was done.
func (x *harmed) order(what string, body any) (ok bool) {
	a, err := x.c.Try(within(x.t, 3*time.Minute), http.MethodPost, "/v1/sessions/"+x.id+"/"+what, body)
	return err == nil && a.Status == http.StatusOK
}

// name is that of the host that a daemon is.
func name(daemon string) string {
	if daemon == testenv.HostName(0) {
		return "h1"
	}
	return "h2"
}

func other(daemon string) string {
	if daemon == testenv.HostName(0) {
		return testenv.HostName(1)
	}
	return testenv.HostName(0)
}

// A daemon dies at any moment of an operation, and comes back: the session is
// running in one place with all it had, or is paused with all it had.
func TestDaemonsKilledDuringOperations(t *testing.T) {
	env := memory.Start(t)
	seed := uint64(20)
	if soak(0, 1) == 1 {
		seed = uint64(time.Now().UnixNano())
	}
	t.Logf("seed %d", seed)
	chance := rand.New(rand.NewPCG(seed, 0))
	x := newHarmed(t, env)
	move(t, x.c, x.id) // the other host has the template now
	x.change()
	took := map[string]time.Duration{}
	for _, what := range []string{"move", "pause", "resume"} { // unharmed, to know how long it takes
		began := time.Now()
		if !x.order(what, nil) {
			t.Fatalf("an unharmed %s failed", what)
		}
		took[what] = time.Since(began)
	}
	x.whole("before all harm")
	plan := []struct{ what, victim string }{{"move", "source"}, {"move", "target"}, {"move", "gateway"}, {"pause", "source"},
		{"resume", "target"}, {"pause", "gateway"}, {"resume", "gateway"}, {"move", "source"}, {"move", "target"}}
	done := map[string]int{}
	for i := range soak(len(plan), 10*len(plan)) {
		what, victim := plan[i%len(plan)].what, plan[i%len(plan)].victim
		done[x.harm(what, victim, some(chance, took[what]*5/4))]++
	}
	t.Logf("%v; unharmed: %v", done, took)
	if done["ERROR"] > 0 {
		t.Errorf("%d sessions were lost, though no machine died", done["ERROR"])
	}
}

// harm kills a daemon some time after an operation began and says in which
// state the session settled.
func (x *harmed) harm(what, victim string, after time.Duration) string {
	x.t.Helper()
	x.change()
	source := x.where()
	daemon := map[string]string{"source": source, "target": other(source), "gateway": testenv.Gateway}[victim]
	var body any
	switch what {
	case "move":
		body = testenv.Fields{"host": name(other(source))}
	case "resume":
		if !x.order("pause", nil) {
			x.t.Fatal("an unharmed pause failed")
		}
		if victim == "target" {
			daemon = source // which has the snapshot
		}
	}
	result := make(chan bool, 1)
	go func() { result <- x.order(what, body) }()
	time.Sleep(after) // the moment is the test
	x.env.Kill9(x.t, daemon)
	x.env.Restart(x.t, daemon)
	ok := <-result
	s := x.settled()
	x.t.Logf("%s, %s killed after %s: done %t, then %s in %v", what, victim, after.Round(time.Millisecond), ok, s.Status, x.env.VMs())
	if s.Status == "ERROR" {
		if s.Error == nil || !strings.Contains(*s.Error, " ") {
			x.t.Errorf("ERROR without a sentence: %v", s.Error)
		} else {
			x.t.Logf("its sentence: %s", *s.Error)
		}
		x.begin()
		return string(s.Status)
	}
	x.whole(what + " with a killed " + victim) // resumes it if it is paused
	x.settled()
	return string(s.Status)
}

// A session's machine that dies is an ERROR that says so, at once.
func TestAKilledMachineIsAnError(t *testing.T) {
	env := memory.Start(t)
	c := env.Client(t, "Scale")
	s, stays := create(t, c, shellOnly), create(t, c, shellOnly)
	c.Output(stays.Id, "A=kept")
	before := env.VMs()
	pause(c, stays.Id) // its machine goes, so the one left is the victim
	vms := env.VMs()
	if len(before) != 2 || len(vms) != 1 {
		t.Fatalf("machines %v, then %v", before, vms)
	}
	env.KillProcess(t, vms[0].PID)
	testenv.Wait(t, 2*time.Second, "ERROR", func() bool { return c.Get(s.Id).Status == "ERROR" })
	got := c.Get(s.Id)
	if got.Error == nil || !strings.Contains(*got.Error, " ") || got.EndedAt == nil || got.EndReason != nil {
		t.Errorf("it ended with %v, %v, %v", got.Error, got.EndedAt, got.EndReason)
	} else {
		t.Log(*got.Error)
	}
	if got := c.Output(stays.Id, "echo $A"); got != "kept" {
		t.Errorf("the other session: %q", got)
	}
}

// Streams of a microVM outlive its hostd.
func TestStreamsOutliveHostd(t *testing.T) {
	env := memory.Start(t)
	x := newHarmed(t, env)
	x.change()
	s := x.c.Get(x.id)
	tty := terminal(t, env, *s.TerminalUrl, "i=0; while :; do i=$((i+1)); echo tick$i; sleep 0.05; done")
	run := execStream(t, x.c, x.id, "i=0; while [ ! -e stop ]; do i=$((i+1)); echo line$i; sleep 0.05; done; echo end")
	for range soak(2, 20) {
		daemon := x.where()
		ticks, lines := len(tty.text()), len(run.text())
		env.Kill9(t, daemon)
		env.Restart(t, daemon)
		testenv.Wait(t, 30*time.Second, "both streams go on", func() bool {
			return len(tty.text()) > ticks+100 && len(run.text()) > lines+100 || tty.ended() || run.ended()
		})
	}
	x.whole("after the hostds that died")
	x.c.Output(x.id, "touch stop")
	testenv.Wait(t, time.Minute, "the exec stream ends", run.ended)
	if !strings.HasSuffix(run.text(), "end\n") {
		t.Errorf("the exec stream ended with %v", run.err)
	}
	if tty.ended() {
		t.Errorf("the terminal dropped: %v", tty.err)
	}
	t.Logf("%d lines, %d ticks", countsUp(t, "the exec stream", run.text(), "line"), countsUp(t, "the terminal", tty.text(), "tick"))
}

// asked is an operation that was asked for beside others.
type asked struct {
	what string
	testenv.Answer
	err error
}

// atOnce asks for several operations of a session, each a random time after the
// one before.
func (x *harmed) atOnce(chance *rand.Rand, most time.Duration, what ...string) map[int]asked {
	type at struct {
		i int
		asked
	}
	answers := make(chan at, len(what))
	for i, w := range what {
		go func() {
			ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
			defer cancel()
			a, err := x.c.Try(ctx, http.MethodPost, "/v1/sessions/"+x.id+"/"+w, nil)
			answers <- at{i, asked{w, a, err}}
		}()
		if i < len(what)-1 {
			time.Sleep(some(chance, most))
		}
	}
	out := map[int]asked{}
	for range what {
		a := <-answers
		if a.err != nil {
			x.t.Fatal(a.err)
		}
		out[a.i] = a.asked
	}
	return out
}

// refusedFor wants an answer that is 200, or the 409 that says that another
// operation was first.
func (x *harmed) refusedFor(a asked, codes ...string) (done bool) {
	x.t.Helper()
	if a.Status == http.StatusOK {
		return true
	}
	for _, code := range codes {
		if string(a.Code()) == code {
			return false
		}
	}
	x.t.Errorf("%s: %d %s", a.what, a.Status, a.Body)
	return false
}

// Of two operations at once one is done and the other is refused, or both are
// done one after the other; a release wins over all.
func TestOperationsAtOnce(t *testing.T) {
	env := memory.Start(t)
	chance := rand.New(rand.NewPCG(21, 0))
	x := newHarmed(t, env)
	for range soak(2, 30) {
		x.change()
		moved := x.c.Get(x.id).Moves
		done := 0
		for _, a := range x.atOnce(chance, 400*time.Millisecond, "move", "move") {
			if x.refusedFor(a, "operation_in_progress") {
				done++
			}
		}
		if s := x.settled(); s.Status != "RUNNING" || s.Moves != moved+done || done == 0 {
			t.Fatalf("two moves, %d done: %s after %d and then %d moves", done, s.Status, moved, s.Moves)
		}
		x.whole("two moves at once")

		x.change()
		answers := x.atOnce(chance, 400*time.Millisecond, "pause", "move")
		paused := x.refusedFor(answers[0], "operation_in_progress")
		x.refusedFor(answers[1], "operation_in_progress", "session_not_running")
		if s := x.settled(); paused != (s.Status == "PAUSED") {
			t.Fatalf("pause %d %s and move %d %s: it is %s", answers[0].Status, answers[0].Body, answers[1].Status, answers[1].Body, s.Status)
		}
		x.whole("pause and move at once")
	}
	for _, what := range []string{"move", "pause", "resume"} {
		for range soak(1, 20) {
			if what == "resume" {
				pause(x.c, x.id)
			}
			answers := x.atOnce(chance, 500*time.Millisecond, what, "release")
			x.refusedFor(answers[0], "session_not_running")
			if !x.refusedFor(answers[1]) {
				t.Errorf("the release did not win over a %s", what)
			}
			if s := x.settled(); s.Status != "COMPLETED" || *s.EndReason != "released" {
				t.Fatalf("released during a %s it is %s %v", what, s.Status, s.EndReason)
			}
			x.begin()
		}
	}
}

// some is a time below most.
func some(chance *rand.Rand, most time.Duration) time.Duration {
	return time.Duration(chance.Int64N(int64(most)))
}
