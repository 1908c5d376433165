package e2e

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/apierr"
)

// line is one of a streamed exec.
type line struct {
	Type       string
	Data       string
	ExitCode   *int
	TimedOut   bool
	Truncated  bool
	DurationMs int64
	Error      *struct{ Code, Message string }
}

// stream runs a command and calls see with each line as it comes.
func stream(t *testing.T, c *testenv.Client, ctx context.Context, id string, f testenv.Fields, see func(line)) (last line) {
	t.Helper()
	streamRaw(t, c, ctx, id, f, func(raw []byte) {
		last = line{}
		if err := json.Unmarshal(raw, &last); err != nil {
			t.Errorf("%s: %v", raw, err)
		}
		see(last)
	})
	return last
}

func streamRaw(t *testing.T, c *testenv.Client, ctx context.Context, id string, f testenv.Fields, see func([]byte)) {
	t.Helper()
	f["stream"] = true
	resp, err := c.Send(ctx, http.MethodPost, "/v1/sessions/"+id+"/exec", f)
	if err != nil {
		t.Error(err)
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK || !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/x-ndjson") {
		t.Errorf("stream: %d %s", resp.StatusCode, resp.Header.Get("Content-Type"))
		return
	}
	scan := bufio.NewScanner(resp.Body)
	scan.Buffer(make([]byte, 256<<10), 4<<20)
	for scan.Scan() {
		see(scan.Bytes())
	}
	if err := scan.Err(); err != nil && ctx.Err() == nil {
		t.Error(err)
	}
}

func TestExecFields(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	id := c.Shell().Id
	r := c.Exec(id, "echo out; echo err >&2; exit 7")
	if r.Stdout != "out\n" || r.Stderr != "err\n" || r.ExitCode == nil || *r.ExitCode != 7 || r.TimedOut || r.Truncated {
		t.Errorf("%+v", r)
	}
	c.Output(id, "cd /usr/share; export A=1; f() { echo in $A; }")
	if got := c.Output(id, "pwd; f"); got != "/usr/share\nin 1" {
		t.Errorf("the shell kept %q", got)
	}
	if r := c.ExecWith(id, testenv.Fields{"command": "pwd; echo ${A-none}", "shell": "other"}); r.Stdout != "/workspace\nnone\n" {
		t.Errorf("another shell: %+v", r)
	}
	if r := c.ExecWith(id, testenv.Fields{"command": "pwd; echo ${A-none}; B=2", "shell": false}); r.Stdout != "/workspace\nnone\n" {
		t.Errorf("a fresh process: %+v", r)
	}
	c.Output(id, "mkdir -p /workspace/sub")
	if r := c.ExecWith(id, testenv.Fields{"command": "pwd; echo $E", "cwd": "sub", "env": testenv.Fields{"E": "x y"}}); r.Stdout != "/workspace/sub\nx y\n" {
		t.Errorf("cwd and env: %+v", r)
	}
	if r := c.Exec(id, "echo ${E-none}"); r.Stdout != "none\n" {
		t.Errorf("env stayed: %+v", r)
	}
	began := time.Now()
	r = c.ExecWith(id, testenv.Fields{"command": "G=kept; sleep 4242 & sleep 4243", "timeoutMs": 500})
	if !r.TimedOut || r.ExitCode != nil || time.Since(began) > 10*time.Second {
		t.Errorf("timeout: %+v after %s", r, time.Since(began))
	}
	if got := c.Exec(id, "pgrep -x -a sleep; echo $A").Stdout; strings.Contains(got, "424") || !strings.Contains(got, "1") {
		t.Errorf("after a timeout: %q; what the command started should be gone, the shell's state not", got)
	}
	r = c.Exec(id, "head -c 3000000 /dev/zero | tr '\\0' x")
	if !r.Truncated || len(r.Stdout) < 1<<20 || len(r.Stdout) > 1<<20+1000 {
		t.Errorf("3 MB of output: truncated %v, %d bytes", r.Truncated, len(r.Stdout))
	}
	if r = c.Exec(id, "printf 'a\\377b'"); r.Stdout != "a\ufffdb" {
		t.Errorf("bytes that are not UTF-8: %q", r.Stdout)
	}
	for _, x := range []struct {
		f      testenv.Fields
		phrase string
	}{
		{testenv.Fields{}, "command"}, {testenv.Fields{"command": ""}, "command"},
		{testenv.Fields{"command": "true", "timeoutMs": 3600001}, "timeoutMs"},
		{testenv.Fields{"command": "true", "cwd": "../etc"}, "cwd"},
		{testenv.Fields{"command": "true", "shell": true}, "shell"},
		{testenv.Fields{"command": "true", "shell": "a b"}, "shell"},
		{testenv.Fields{"command": "true", "env": testenv.Fields{"a": 1}}, "env"},
	} {
		c.Refused(apierr.InvalidRequest, x.phrase, http.MethodPost, "/v1/sessions/"+id+"/exec", x.f)
	}
	if got := c.Output(id, "sudo id -u; python3 -c 'print(6*7)'; node -e 'console.log(6*7)'"); got != "0\n42\n42" {
		t.Errorf("sudo, python, node: %q", got)
	}
}

func TestExecStream(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	id := c.Shell().Id
	var out, errs strings.Builder
	var firstAt, lastAt time.Time
	last := stream(t, c, within(t, time.Minute), id, testenv.Fields{"command": "echo early; sleep 1; echo late >&2; exit 3"}, func(l line) {
		switch l.Type {
		case "stdout":
			out.WriteString(l.Data)
			firstAt = time.Now()
		case "stderr":
			errs.WriteString(l.Data)
			lastAt = time.Now()
		}
	})
	if out.String() != "early\n" || errs.String() != "late\n" || last.Type != "exit" || last.ExitCode == nil || *last.ExitCode != 3 {
		t.Errorf("stdout %q, stderr %q, last %+v", out.String(), errs.String(), last)
	}
	if gap := lastAt.Sub(firstAt); gap < 500*time.Millisecond {
		t.Errorf("output that was a second apart came %s apart: it is not streamed", gap)
	}
	last = stream(t, c, within(t, time.Minute), id, testenv.Fields{"command": "sleep 60", "timeoutMs": 300}, func(line) {})
	if last.Type != "exit" || !last.TimedOut || last.ExitCode != nil {
		t.Errorf("timeout of a stream: %+v", last)
	}
}

// A gigabyte printed is a gigabyte received, in order, and no daemon keeps it.
func TestExecPrintsAGigabyte(t *testing.T) {
	if testing.Short() {
		t.Skip("long")
	}
	t.Parallel()
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	id := c.Create(testenv.Fields{"browser": false, "shell": true, "timeout": 900}).Id
	flat := watchMemory(t, env)
	var got int64
	var last line
	began := time.Now()
	command := testenv.Fields{"command": "yes 0123456789abcde | head -c 1073741824", "shell": false, "timeoutMs": 600000}
	streamRaw(t, c, within(t, 6*time.Minute), id, command, func(raw []byte) {
		const head, tail = `{"type":"stdout","data":"`, `"}` // decoding JSON takes longer than all the rest
		if bytes.HasPrefix(raw, []byte(head)) {
			got += int64(len(raw) - len(head) - len(tail) - bytes.Count(raw, []byte(`\n`)))
			return
		}
		decode(t, raw, &last)
	})
	t.Logf("1 GiB printed in %s (race detector on)", time.Since(began).Round(time.Millisecond))
	if got != 1<<30 || last.Type != "exit" || last.ExitCode == nil || *last.ExitCode != 0 {
		t.Errorf("got %d bytes and %+v", got, last)
	}
	flat()
}

// watchMemory samples the daemons' own memory; the returned func fails the test
// when one of them grew by more than a window or two.
func watchMemory(t *testing.T, env *testenv.Env) func() {
	t.Helper()
	const room = 96 << 20 // windows of 16 MiB on each side, and the race detector's shadow of them
	daemons := []string{testenv.Gateway, testenv.Hostd, testenv.Proxyd}
	before, most := map[string]int64{}, map[string]int64{}
	for _, d := range daemons {
		before[d] = env.Anon(t, d)
	}
	stop, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for tick := time.NewTicker(50 * time.Millisecond); ; {
			select {
			case <-stop:
				tick.Stop()
				return
			case <-tick.C:
				for _, d := range daemons {
					most[d] = max(most[d], env.Anon(t, d))
				}
			}
		}
	}()
	var once sync.Once
	end := func() { once.Do(func() { close(stop); <-done }) }
	t.Cleanup(end)
	return func() {
		t.Helper()
		end()
		for _, d := range daemons {
			t.Logf("%s: %d MiB before, %d MiB at most", d, before[d]>>20, most[d]>>20)
			if most[d]-before[d] > room {
				t.Errorf("%s grew from %d to %d MiB", d, before[d]>>20, most[d]>>20)
			}
		}
	}
}

func TestShellRestart(t *testing.T) {
	c := stack.Start(t).Client(t, "Scale")
	id := c.Shell().Id
	c.Output(id, "touch /workspace/stays; X=gone; cd /")
	c.Want(http.StatusNoContent, http.MethodPost, "/v1/sessions/"+id+"/shell/restart", nil, nil)
	if got := c.Output(id, "pwd; ls stays; echo ${X-none}"); got != "/workspace\nstays\nnone" {
		t.Errorf("after a restart: %q", got)
	}
	if r := c.Exec(id, "exit 9"); r.ExitCode == nil || *r.ExitCode != 9 {
		t.Errorf("exit: %+v", r)
	}
	if got := c.Output(id, "echo back"); got != "back" {
		t.Errorf("after exit: %q", got)
	}
	// A bash that hangs is replaced at the timeout.
	if r := c.ExecWith(id, testenv.Fields{"command": "trap '' TERM INT; while :; do :; done", "timeoutMs": 500}); !r.TimedOut {
		t.Errorf("a hung shell: %+v", r)
	}
	if got := c.Output(id, "echo again"); got != "again" {
		t.Errorf("after a hang: %q", got)
	}
}
