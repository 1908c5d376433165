package files

import (
	"context"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/berth-dev/berth/hostd/agent/procfs/procfstest"
)

// waiting starts a wait and gives its answer.
func (s *served) waiting(pattern, more string) <-chan *httptest.ResponseRecorder {
	answer := make(chan *httptest.ResponseRecorder, 1)
	go func() { answer <- s.do("GET", "/files/wait?pattern="+url.QueryEscape(pattern)+more, nil) }()
	return answer
}

func (s *served) answers(what string, answer <-chan *httptest.ResponseRecorder, body string) {
	s.t.Helper()
	select {
	case w := <-answer:
		if w.Code != 200 || w.Body.String() != body+"\n" {
			s.t.Errorf("%s: %d %s, want %s", what, w.Code, w.Body, body)
		}
	case <-time.After(30 * time.Second):
		s.t.Fatalf("%s: no answer", what)
	}
}

func TestWaitForDownload(t *testing.T) {
	s := serve(t)
	answer := s.waiting("downloads/*.csv", "")
	began := time.Now()
	s.write("downloads/other.txt", "x")
	s.write("downloads/a.csv.crdownload", "1,2")
	s.write("downloads/b.csv.part", "1,2")
	full := filepath.Join(s.dir, "downloads")
	if err := os.Rename(full+"/a.csv.crdownload", full+"/a.csv"); err != nil {
		t.Fatal(err)
	}
	s.answers("renamed", answer, `{"path":"`+full+`/a.csv","size":3}`)
	if took := time.Since(began); took < still-10*time.Millisecond || took > 20*time.Second {
		t.Errorf("took %s", took)
	}
	s.answers("there already", s.waiting(full+"/a.csv", ""), `{"path":"`+full+`/a.csv","size":3}`)
	if found, _ := s.look("downloads", "a.csv", make(map[string]seen)); found == nil {
		t.Error("the first look does not see that a file has stood still for long")
	}
}

// TestWaitForWriter: a file that is open for writing is not finished however
// long it stands still.
func TestWaitForWriter(t *testing.T) {
	s := serve(t)
	writer := exec.Command("bash", "-c", "exec 3>slow.bin; echo open; read; printf done >&3")
	writer.Dir = s.dir
	writer.SysProcAttr = &syscall.SysProcAttr{Credential: s.owner.Credential()}
	in, _ := writer.StdinPipe()
	out, _ := writer.StdoutPipe()
	if err := writer.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = writer.Wait() }()
	defer in.Close()
	_, _ = out.Read(make([]byte, 5))
	w := <-s.waiting("*.bin", "&timeoutMs=900")
	s.want("open for writing", w, 408, "no finished file matched *.bin within 900 ms")
	answer := s.waiting("*.bin", "")
	_, _ = in.Write([]byte("\n"))
	s.answers("closed", answer, `{"path":"`+s.dir+`/slow.bin","size":4}`)

	reader, err := os.Open(filepath.Join(s.dir, "slow.bin"))
	if err != nil {
		t.Fatal(err)
	}
	defer reader.Close()
	s.answers("open for reading", s.waiting("*.bin", ""), `{"path":"`+s.dir+`/slow.bin","size":4}`)
}

// TestAsInAMachine: writers are seen without the right to look into everything.
func TestAsInAMachine(t *testing.T) { procfstest.WithoutPtrace(t, "^TestWaitForWriter$") }

func TestWaitRefusals(t *testing.T) {
	s := serve(t)
	s.link("/etc", "out")
	for query, field := range map[string]string{
		"":                            "pattern",
		"pattern=*/x":                 "pattern",
		"pattern=[":                   "pattern",
		"pattern=../x":                "pattern",
		"pattern=out/*":               "pattern",
		"pattern=.":                   "pattern",
		"pattern=d/":                  "pattern",
		"pattern=x&timeoutMs=0":       "timeoutMs",
		"pattern=x&timeoutMs=1.5":     "timeoutMs",
		"pattern=x&timeoutMs=":        "timeoutMs",
		"pattern=x&timeoutMs=6e9":     "timeoutMs",
		"pattern=x&timeoutMs=6000001": "timeoutMs",
	} {
		s.want(query, s.do("GET", "/files/wait?"+query, nil), 400, field)
	}
	s.want("nothing came", s.do("GET", "/files/wait?pattern=x&timeoutMs=20", nil), 408, "no finished file")
	s.want("method", s.do("POST", "/files/wait?pattern=x", nil), 405, "method")
}

func TestWaitEndsWithItsClient(t *testing.T) {
	s := serve(t)
	ctx, cancel := context.WithCancel(t.Context())
	p, _ := s.parsePattern("*")
	ended := make(chan error)
	go func() { _, err := s.waitFor(ctx, p); ended <- err }()
	cancel()
	select {
	case err := <-ended:
		if err != context.Canceled {
			t.Error(err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("the wait went on")
	}
}
