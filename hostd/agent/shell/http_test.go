package shell

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
)

// post sends body to path and gives status and answer.
func post(s *Shells, path, body string) (int, string) {
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("POST", path, strings.NewReader(body)))
	return w.Code, w.Body.String()
}

func TestExecAnswer(t *testing.T) {
	var events []Done
	s := newShells(t, func(c *Config) { c.OnExec = func(d Done) { events = append(events, d) } })
	code, body := post(s, agentlink.PathExec, `{"command":"echo out; echo err >&2; printf '\\xff|'; exit 3","shell":false}`)
	var r map[string]any
	if err := json.Unmarshal([]byte(body), &r); err != nil || code != 200 {
		t.Fatalf("%d %s", code, body)
	}
	for k, want := range map[string]any{"stdout": "out\n\uFFFD|", "stderr": "err\n", "exitCode": 3.0, "timedOut": false, "truncated": false} {
		if r[k] != want {
			t.Errorf("%s: %v, want %v", k, r[k], want)
		}
	}
	if _, ok := r["durationMs"].(float64); !ok || len(r) != 6 {
		t.Errorf("answer has %v", r)
	}
	_, body = post(s, agentlink.PathExec, `{"command":"sleep 100","timeoutMs":50}`)
	if !strings.Contains(body, `"exitCode":null,"timedOut":true`) {
		t.Errorf("timed out: %s", body)
	}
	if len(events) != 2 || events[0].Shell != false || *events[0].ExitCode != 3 || events[1].Shell != Default || !events[1].TimedOut || events[1].ExitCode != nil {
		t.Errorf("events: %+v", events)
	}
}

func TestExecRefusals(t *testing.T) {
	s := newShells(t)
	outside, file := filepath.Dir(s.cfg.Workspace.Dir), filepath.Join(s.cfg.Workspace.Dir, "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc", filepath.Join(s.cfg.Workspace.Dir, "out")); err != nil {
		t.Fatal(err)
	}
	for body, field := range map[string]string{
		``:                                        "command: must",
		`{}`:                                      "command: must",
		`{"command":""}`:                          "command: must",
		`{"command":5}`:                           "command: must be a string",
		`{"command":"a\u0000b"}`:                  "command: must not contain a NUL",
		`{"command":":","timeoutMs":0}`:           "timeoutMs: must be 1 to 3600000",
		`{"command":":","timeoutMs":3600001}`:     "timeoutMs: must be 1 to 3600000",
		`{"command":":","timeoutMs":1.5}`:         "timeoutMs: must be a whole number",
		`{"command":":","timeoutMs":"1"}`:         "timeoutMs: must be a whole number",
		`{"command":":","shell":true}`:            "shell: must",
		`{"command":":","shell":""}`:              "shell: must",
		`{"command":":","shell":"a b"}`:           "shell: must",
		`{"command":":","shell":"../x"}`:          "shell: must",
		`{"command":":","shell":5}`:               "shell: must",
		`{"command":":","env":{"a-b":"1"}}`:       `env: "a-b" is not`,
		`{"command":":","env":{"1a":"1"}}`:        `env: "1a" is not`,
		`{"command":":","env":{"":"1"}}`:          `env: "" is not`,
		`{"command":":","env":{"A":null}}`:        "env.A: must be a string",
		`{"command":":","env":{"A":1}}`:           "env",
		`{"command":":","env":{"A":"\u0000"}}`:    "env.A: must not contain a NUL",
		`{"command":":","env":[]}`:                "env: must be an object",
		`{"command":":","cwd":""}`:                "cwd: must",
		`{"command":":","cwd":".."}`:              "cwd: must stay inside",
		`{"command":":","cwd":"` + outside + `"}`: "cwd: must stay inside",
		`{"command":":","cwd":"out"}`:             "cwd: a symbolic link leads out",
		`{"command":":","cwd":"none"}`:            "cwd: must be an existing directory",
		`{"command":":","cwd":"file"}`:            "cwd: must be an existing directory",
		`{"command":":","stream":"yes"}`:          "stream: must be true or false",
		`{"command":":","cmd":"x"}`:               "cmd: unknown field",
		`{"command":":"} {}`:                      "body: must be one JSON object",
		`[]`:                                      "body: must be an object",
		`{"command":`:                             "body: must be a JSON object",
	} {
		code, answer := post(s, agentlink.PathExec, body)
		var e struct {
			Error struct{ Code, Message string }
		}
		if err := json.Unmarshal([]byte(answer), &e); err != nil || code != 400 || e.Error.Code != "invalid_request" || !strings.HasPrefix(e.Error.Message, field) {
			t.Errorf("%s: %d %s, want a 400 about %q", body, code, answer, field)
		}
	}
	if code, _ := post(s, agentlink.PathShellRestart, `{"shell":"a b"}`); code != 400 {
		t.Errorf("restart of a bad name: %d", code)
	}
	if code, body := post(s, agentlink.PathShellRestart, ``); code != 204 || body != "" {
		t.Errorf("restart without body: %d %s", code, body)
	}
	if code, _ := post(s, agentlink.PathExec, `{"command":"`+strings.Repeat(" ", 9<<20)+`"}`); code != 413 {
		t.Errorf("a huge body: %d", code)
	}
	w := httptest.NewRecorder()
	s.ServeHTTP(w, httptest.NewRequest("GET", agentlink.PathExec, nil))
	if w.Code != 405 || w.Header().Get("Allow") != "POST" {
		t.Errorf("GET: %d %v", w.Code, w.Header())
	}
}

// TestLongCommand: a command of a mebibyte runs, in a shell and without.
func TestLongCommand(t *testing.T) {
	s := newShells(t)
	long := "read -r -d '' x <<'END'\n" + strings.Repeat("é'\"\\$x`\n", 1<<20/9) + "END\necho ${#x}"
	want := fmt.Sprintln(1<<20/9*8 - 1)
	for _, name := range []string{Default, ""} {
		if got := run(t, s, Command{Text: long, Shell: name}); got.out != want {
			t.Errorf("shell %q: %+v, want %s", name, got, want)
		}
	}
	if got := sh(t, s, "echo ok"); got.out != "ok\n" {
		t.Errorf("afterwards: %+v", got)
	}
}

func TestTruncated(t *testing.T) {
	s := newShells(t)
	body, _ := json.Marshal(map[string]any{"command": "echo first; seq 400000; echo last; echo e >&2"})
	_, answer := post(s, agentlink.PathExec, string(body))
	var r agentlink.ExecResult
	if err := json.Unmarshal([]byte(answer), &r); err != nil {
		t.Fatal(err)
	}
	if !r.Truncated || len(r.Stdout) != keepLimit || !strings.HasPrefix(r.Stdout, "first\n1\n") || !strings.HasSuffix(r.Stdout, "400000\nlast\n") || r.Stderr != "e\n" {
		t.Errorf("truncated %v, %d bytes, stderr %q", r.Truncated, len(r.Stdout), r.Stderr)
	}
}

// event is any line of a stream.
type event struct {
	Type, Data          string
	ExitCode            *int
	TimedOut, Truncated bool
}

// TestStream: lines come while the command runs, and in whole characters.
func TestStream(t *testing.T) {
	s := newShells(t)
	sh(t, s, "mkfifo go")
	server := httptest.NewServer(s)
	defer server.Close()
	body := `{"command":"printf 'a\\xc3'; cat go; printf '\\xa9z' ; echo err >&2; printf '\\xe2\\x82'; false","stream":true}`
	resp, err := http.Post(server.URL+agentlink.PathExec, "application/json", strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if ct := resp.Header.Get("Content-Type"); ct != "application/x-ndjson" {
		t.Errorf("content type %q", ct)
	}
	lines := bufio.NewScanner(resp.Body)
	next := func() (e event) {
		if !lines.Scan() {
			t.Fatalf("the stream ended: %v", lines.Err())
		}
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			t.Fatalf("%s: %v", lines.Text(), err)
		}
		return e
	}
	if e := next(); e.Type != "stdout" || e.Data != "a" {
		t.Errorf("first line, while the command waits: %+v", e)
	}
	run(t, s, Command{Text: ": >go"})
	got := map[string]string{}
	var last event
	for last = next(); last.Type != "exit"; last = next() {
		got[last.Type] += last.Data
	}
	if got["stdout"] != "éz\uFFFD\uFFFD" || got["stderr"] != "err\n" {
		t.Errorf("streams: %q", got)
	}
	if last.ExitCode == nil || *last.ExitCode != 1 || last.TimedOut || last.Truncated || lines.Scan() {
		t.Errorf("exit line: %s", lines.Text())
	}
}

// TestStreamIsWhole sends far more than is ever held, to a client that reads
// slowly at first.
func TestStreamIsWhole(t *testing.T) {
	s := newShells(t)
	server := httptest.NewServer(s)
	defer server.Close()
	resp, err := http.Post(server.URL+agentlink.PathExec, "application/json", strings.NewReader(`{"command":"seq 500000","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	dec := json.NewDecoder(resp.Body)
	var all bytes.Buffer
	var e event
	for e.Type != "exit" {
		e = event{}
		if err := dec.Decode(&e); err != nil {
			t.Fatal(err)
		}
		all.WriteString(e.Data)
	}
	want := 0
	for i, ten := 1, 10; i <= 500000; i++ {
		if i == ten {
			ten *= 10
		}
		want += len(fmt.Sprint(i)) + 1
	}
	if all.Len() != want || !bytes.HasSuffix(all.Bytes(), []byte("\n500000\n")) {
		t.Errorf("%d bytes of %d", all.Len(), want)
	}
}

// TestStreamClientLeaves: closing the connection ends the command.
func TestStreamClientLeaves(t *testing.T) {
	s := newShells(t)
	server := httptest.NewServer(s)
	defer server.Close()
	resp, err := http.Post(server.URL+agentlink.PathExec, "application/json", strings.NewReader(`{"command":"yes & sleep 4321","stream":true}`))
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.CopyN(io.Discard, resp.Body, 1<<20)
	resp.Body.Close()
	until(t, "its processes end", func() bool { return s.left() == 0 })
	began := time.Now()
	if got := sh(t, s, "echo ok"); got.out != "ok\n" || time.Since(began) > time.Minute {
		t.Errorf("afterwards: %+v after %s", got, time.Since(began))
	}
}
