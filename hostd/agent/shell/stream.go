package shell

import (
	"encoding/json"
	"net/http"
	"sync"

	"github.com/berth-dev/berth/shared/apierr"
)

// line is one line of a streamed exec (spec "Shell").
type line struct {
	Type string `json:"type"`
	Data string `json:"data"`
}

type exitLine struct {
	Type       string `json:"type"`
	ExitCode   *int   `json:"exitCode"`
	TimedOut   bool   `json:"timedOut"`
	DurationMs int64  `json:"durationMs"`
	Truncated  bool   `json:"truncated"`
}

type errorLine struct {
	Type  string `json:"type"`
	Error struct {
		Code    apierr.Code `json:"code"`
		Message string      `json:"message"`
	} `json:"error"`
}

// stream writes NDJSON, flushed line by line: a pipe's content is one line, so
// slow output comes at once and fast output in large pieces. A client that
// reads slowly slows the command down.
type stream struct {
	mu      sync.Mutex
	w       http.ResponseWriter
	enc     *json.Encoder // guarded by mu
	flush   *http.ResponseController
	started bool // guarded by mu
}

func newStream(w http.ResponseWriter) *stream {
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	return &stream{w: w, enc: enc, flush: http.NewResponseController(w)}
}

// begin sends the head; until then the answer may still be an error.
func (s *stream) begin() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.w.Header().Set("Content-Type", "application/x-ndjson")
	s.w.Header().Set("X-Accel-Buffering", "no") // proxies in front must not wait for more
	s.w.WriteHeader(http.StatusOK)
	s.started = true
	_ = s.flush.Flush()
}

func (s *stream) begun() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.started
}

func (s *stream) send(v any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.enc.Encode(v); err != nil {
		return err
	}
	return s.flush.Flush()
}

// side is one of the two streams. It holds back up to three bytes that begin a
// character; bytes that are no UTF-8 become U+FFFD each, in encoding/json.
type side struct {
	s    *stream
	name string
	held []byte
}

func (o *side) Write(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	all := p
	if len(o.held) > 0 {
		all = append(o.held, p...)
	}
	keep := split(all)
	now := all[:len(all)-keep]
	var err error
	if len(now) > 0 {
		err = o.s.send(line{o.name, string(now)})
	}
	o.held = append([]byte(nil), all[len(all)-keep:]...)
	return len(p), err
}

// end sends what is held back.
func (o *side) end() {
	if len(o.held) > 0 {
		_ = o.s.send(line{o.name, string(o.held)})
		o.held = nil
	}
}
