// Package moves moves sessions between hosts of one computer while their
// clients are at work: with memory (microVMs) no client may notice more than a
// pause, without (containers) what was promised to be carried over is there.
package moves

import (
	"bufio"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/ws"
)

// memory is two hosts whose machines move with their memory. The second has no
// machine and no template of its own: it fetches what it needs.
var memory = testenv.New(testenv.Options{Hosts: 2, Driver: testenv.Microvm, Pool: "browser=0,shell=0,both=0",
	Gateway: []string{"--create-deadline", "5m"}, Hostd: []string{"--boot-deadline", "5m"}})

// portable is two hosts whose machines move without their memory.
var portable = testenv.New(testenv.Options{Hosts: 2, Pool: "browser=0,shell=1,both=1"})

func TestMain(m *testing.M) { os.Exit(testenv.Main(m, memory, portable)) }

// soak is how much of something a test does: little in make test, much in make
// soak, which sets BERTH_SOAK.
func soak(little, much int) int {
	if os.Getenv("BERTH_SOAK") != "" {
		return much
	}
	return little
}

// patient bounds what may build a template first, without virtualisation.
const patient = 6 * time.Minute

// lasting bounds the streams of a test.
const lasting = 2 * patient

func within(t testing.TB, d time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), d)
	t.Cleanup(cancel)
	return ctx
}

// create waits as long as a first template takes.
func create(t *testing.T, c *testenv.Client, f testenv.Fields) api.Session {
	t.Helper()
	a, err := c.Try(within(t, patient), http.MethodPost, "/v1/sessions", f)
	if err != nil || a.Status != http.StatusCreated {
		t.Fatalf("create: %d %s %v", a.Status, a.Body, err)
	}
	var s api.Session
	if err := json.Unmarshal(a.Body, &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// stream is a client's long-lived reading: what it got, and how it ended.
type stream struct {
	mu   sync.Mutex
	got  strings.Builder // guarded by mu
	done chan struct{}   // closed at the end; err is set then
	err  error
}

func follow(read func() ([]byte, error)) *stream {
	x := &stream{done: make(chan struct{})}
	go func() {
		defer close(x.done)
		for {
			b, err := read()
			x.mu.Lock()
			x.got.Write(b)
			x.mu.Unlock()
			if err != nil {
				x.err = err
				return
			}
		}
	}()
	return x
}

func (x *stream) text() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.got.String()
}

func (x *stream) ended() bool {
	select {
	case <-x.done:
		return true
	default:
		return false
	}
}

// terminal opens a terminal and types a command.
func terminal(t *testing.T, env *testenv.Env, url, command string) *stream {
	t.Helper()
	conn, err := ws.Dial(within(t, time.Minute), strings.Replace(env.BaseURL, "http://", "ws://", 1)+url)
	if err != nil {
		t.Fatal(err)
	}
	x := follow(func() ([]byte, error) { _, b, err := conn.Read(context.Background()); return b, err })
	t.Cleanup(func() { conn.CloseNow(); <-x.done })
	b, _ := json.Marshal(testenv.Fields{"type": "input", "data": command + "\r"}) // strings
	if err := conn.Write(within(t, time.Minute), ws.Text, b); err != nil {
		t.Fatal(err)
	}
	return x
}

// execStream runs a command whose output is read as it comes.
func execStream(t *testing.T, c *testenv.Client, id, command string) *stream {
	t.Helper()
	resp, err := c.Send(within(t, lasting), http.MethodPost, "/v1/sessions/"+id+"/exec",
		testenv.Fields{"command": command, "stream": true, "shell": "stream", "timeoutMs": 3_600_000})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { resp.Body.Close() })
	lines := bufio.NewReader(resp.Body)
	return follow(func() ([]byte, error) {
		b, err := lines.ReadBytes('\n')
		var l struct{ Type, Data string }
		if err == nil {
			err = json.Unmarshal(b, &l)
		}
		if err == nil && l.Type == "error" {
			err = fmt.Errorf("the stream says %s", b)
		}
		return []byte(l.Data), err
	})
}

// typist is Playwright at work in a page. Each key is a line that it prints, so
// typed has as many lines as keys, and the report after them.
type typist struct {
	in    io.WriteCloser
	typed *stream
	cmd   *exec.Cmd
	err   *strings.Builder
}

func (x *typist) keys() int { return strings.Count(x.typed.text(), "key\n") }

func startTyping(t *testing.T, connectURL string) *typist {
	t.Helper()
	cmd := exec.CommandContext(within(t, lasting), "node", "typing.mjs")
	cmd.Dir = "../../conformance"
	cmd.Env = append(os.Environ(), "BERTH_CONNECT="+connectURL, "NODE_NO_WARNINGS=1")
	x := &typist{cmd: cmd, err: &strings.Builder{}}
	cmd.Stderr = x.err
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(out)
	x.in, x.typed = in, follow(func() ([]byte, error) { return lines.ReadBytes('\n') })
	return x
}

// finish ends the typing and gives what it reports.
func (x *typist) finish(t *testing.T) (keys, longestMs int) {
	t.Helper()
	x.in.Close()
	<-x.typed.done
	if err := x.cmd.Wait(); err != nil {
		t.Fatalf("Playwright: %v\n%s", err, x.err)
	}
	var r struct{ Keys, LongestMs int }
	report := strings.ReplaceAll(x.typed.text(), "key\n", "")
	if err := json.Unmarshal([]byte(report), &r); err != nil {
		t.Fatalf("Playwright: %v: %q", err, report)
	}
	return r.Keys, r.LongestMs
}

// moved is the answer of a move.
type moved struct {
	Session api.Session
	Timings struct{ CaptureMs, AcquireMs, RestoreMs, TotalMs int }
}

func move(t *testing.T, c *testenv.Client, id string) (m moved) {
	t.Helper()
	a, err := c.Try(within(t, patient), http.MethodPost, "/v1/sessions/"+id+"/move", testenv.Fields{})
	if err == nil {
		err = json.Unmarshal(a.Body, &m)
	}
	if err != nil || a.Status != http.StatusOK {
		t.Fatalf("move: %d %s %v", a.Status, a.Body, err)
	}
	return m
}

// countsUp wants the lines PREFIX1, PREFIX2, … without a gap or a repetition.
func countsUp(t *testing.T, what, text, prefix string) (last int) {
	t.Helper()
	for line := range strings.FieldsFuncSeq(text, func(r rune) bool { return r == '\r' || r == '\n' }) {
		rest, ok := strings.CutPrefix(line, prefix)
		if !ok || rest == "" || rest[0] < '0' || rest[0] > '9' {
			continue // the prompt, the command's echo
		}
		var n int
		if _, err := fmt.Sscan(rest, &n); err != nil {
			continue
		}
		if n != last+1 {
			t.Fatalf("%s: %d came after %d", what, n, last)
		}
		last = n
	}
	return last
}

const moves = 20

// Twenty moves between two hosts under three clients at work: the same sockets
// all the way, no byte lost, doubled or out of order, and what is in the
// machine is what was there.
func TestTwentyMovesThatNoSocketNotices(t *testing.T) {
	env := memory.Start(t)
	c := env.Client(t, "Scale")
	s := create(t, c, testenv.Fields{"shell": true, "timeout": 7200})
	c.Output(s.Id, "TOKEN=$(head -c 16 /dev/urandom | base64); echo $TOKEN > token; head -c 5000000 /dev/urandom > data; sync; sha256sum data > sum; sleep 98765 &")
	tty := terminal(t, env, *s.TerminalUrl, "i=0; while :; do i=$((i+1)); echo tick$i; sleep 0.2; done")
	run := execStream(t, c, s.Id, "i=0; while [ ! -e stop ]; do i=$((i+1)); echo line$i; sleep 0.1; done; echo end")
	typing := startTyping(t, *s.ConnectUrl)
	testenv.Wait(t, 3*time.Minute, "Playwright types", func() bool { return typing.keys() > 0 || typing.typed.ended() })

	var total []int
	for i, until := 0, time.Now().Add(time.Duration(soak(0, 300))*time.Second); i < moves || time.Now().Before(until); i++ {
		m := move(t, c, s.Id)
		if m.Session.Moves != i+1 {
			t.Fatalf("move %d: the session says %v", i+1, m.Session.Moves)
		}
		total = append(total, m.Timings.TotalMs)
		t.Logf("move %d: %+v", i+1, m.Timings)
		before, thawed := typing.keys(), time.Now()
		testenv.Wait(t, time.Minute, "Playwright types on", func() bool {
			return typing.keys() > before && time.Since(thawed) > time.Duration(soak(0, 3))*time.Second || typing.typed.ended()
		})
	}
	keys, longest := typing.finish(t)
	if keys < moves {
		t.Errorf("only %d keys were typed", keys)
	}
	c.Output(s.Id, "touch stop")
	select {
	case <-run.done:
	case <-time.After(time.Minute):
		t.Fatal("the exec stream did not end")
	}
	if run.err != io.EOF || !strings.HasSuffix(run.text(), "end\n") {
		t.Errorf("the exec stream: %v, ends in %q", run.err, run.text()[max(0, len(run.text())-60):])
	}
	lines := countsUp(t, "the exec stream", run.text(), "line")
	ticks := countsUp(t, "the terminal", tty.text(), "tick")
	if lines < moves || ticks < moves {
		t.Errorf("%d lines and %d ticks in %d moves", lines, ticks, moves)
	}
	select {
	case <-tty.done:
		t.Errorf("the terminal dropped: %v", tty.err)
	default:
	}
	if got := c.Output(s.Id, "sha256sum -c sum && [ \"$TOKEN\" = \"$(cat token)\" ] && pgrep -fc 'sleep 98765'"); !strings.HasPrefix(got, "data: OK\n") {
		t.Errorf("in the machine: %q", got)
	}
	slices.Sort(total)
	t.Logf("%d keys, the longest %d ms; %d lines; %d ticks; moves took %d ms in the middle, %d at most (checksum of all lines %x)",
		keys, longest, lines, ticks, total[len(total)/2], total[len(total)-1], sha256.Sum256([]byte(run.text())))
}

// A paused session costs nothing, keeps its sockets, and goes on where it was
// with the first message of a client.
func TestPauseAndResume(t *testing.T) {
	env := memory.Start(t)
	c := env.Client(t, "Scale")
	s := create(t, c, testenv.Fields{"browser": false, "shell": true, "timeout": 3600})
	c.Output(s.Id, "A=kept; n=0; (while :; do n=$((n+1)); echo $n > count; sleep 0.1; done) & echo")
	tty := terminal(t, env, *s.TerminalUrl, "echo one; B=also")
	testenv.Wait(t, time.Minute, "the terminal answers", func() bool { return strings.Contains(tty.text(), "one\r\n") })

	var paused api.Session
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/pause", nil, &paused)
	if paused.Status != "PAUSED" {
		t.Fatalf("status %s", paused.Status)
	}
	used := c.Get(s.Id).Usage.Seconds
	testenv.Wait(t, 10*time.Second, "two seconds pass", func() bool { return time.Since(paused.ExpiresAt.Add(-30*24*time.Hour)) > 2*time.Second })
	if now := c.Get(s.Id); now.Usage.Seconds != used || now.Status != "PAUSED" {
		t.Errorf("a paused session is billed: %v became %v (%s)", used, now.Usage.Seconds, now.Status)
	}
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/pause", nil, nil) // again is no error
	if got := c.Output(s.Id, "echo $A; jobs -rp | wc -l; test $(cat count) -gt 0 && echo counts"); got != "kept\n1\ncounts" {
		t.Errorf("after the implicit resume: %q", got)
	}
	if now := c.Get(s.Id); now.Status != "RUNNING" {
		t.Errorf("after an exec it is %s", now.Status)
	}
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/pause", nil, nil)
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/resume", nil, nil)
	select {
	case <-tty.done:
		t.Errorf("the terminal dropped: %v", tty.err)
	default:
	}
	c.Want(http.StatusOK, http.MethodPost, "/v1/sessions/"+s.Id+"/pause", nil, nil)
	ended := c.Release(s.Id)
	if ended.Status != "COMPLETED" || *ended.EndReason != "released" {
		t.Errorf("a paused session released is %s %v", ended.Status, ended.EndReason)
	}
}
