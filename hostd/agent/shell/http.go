package shell

import (
	"net/http"
	"time"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
)

// Register mounts exec and shell/restart on mux.
func (s *Shells) Register(mux *http.ServeMux) {
	mux.Handle(agentlink.PathExec, s)
	mux.Handle(agentlink.PathShellRestart, s)
}

// ServeHTTP serves PathExec and PathShellRestart as the public API says.
func (s *Shells) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if !reply.Method(w, r, http.MethodPost) {
		return
	}
	var err error
	switch r.URL.Path {
	case agentlink.PathExec:
		err = s.serveExec(w, r)
	case agentlink.PathShellRestart:
		err = s.serveRestart(w, r)
	default:
		err = apierr.New(apierr.NotFound, "path: nothing at %s", r.URL.Path)
	}
	if err == nil {
		return
	}
	if r.Context().Err() != nil {
		err = apierr.Wrap(err, apierr.Canceled, "the client left")
	}
	reply.Error(w, r, err)
}

// serveExec returns an error only while nothing has been answered.
func (s *Shells) serveExec(w http.ResponseWriter, r *http.Request) error {
	var req request
	if err := reply.Decode(w, r, &req); err != nil {
		return err
	}
	c, err := s.parse(&req)
	if err != nil {
		return err
	}
	if req.Stream {
		return s.streamExec(w, r, c)
	}
	stdout, stderr := &halves{limit: keepLimit}, &halves{limit: keepLimit}
	out, err := s.Exec(r.Context(), c, Sinks{Stdout: stdout, Stderr: stderr})
	if err != nil {
		return err
	}
	reply.JSON(w, http.StatusOK, agentlink.ExecResult{
		Stdout: stdout.text(), Stderr: stderr.text(), Truncated: stdout.lost || stderr.lost,
		ExitCode: out.ExitCode, TimedOut: out.TimedOut, DurationMs: milliseconds(out),
	})
	return nil
}

func (s *Shells) streamExec(w http.ResponseWriter, r *http.Request, c *Command) error {
	st := newStream(w)
	stdout, stderr := &side{s: st, name: "stdout"}, &side{s: st, name: "stderr"}
	out, err := s.Exec(r.Context(), c, Sinks{Stdout: stdout, Stderr: stderr, Begin: st.begin})
	if err != nil && !st.begun() {
		return err
	}
	stdout.end()
	stderr.end()
	if err != nil {
		l := errorLine{Type: "error"}
		e := apierr.From(err)
		l.Error.Code, l.Error.Message = e.Code, e.Message
		_ = st.send(l)
		return nil
	}
	_ = st.send(exitLine{"exit", out.ExitCode, out.TimedOut, milliseconds(out), false})
	return nil
}

func (s *Shells) serveRestart(w http.ResponseWriter, r *http.Request) error {
	var req struct {
		Shell *string `json:"shell"`
	}
	if err := reply.Decode(w, r, &req); err != nil {
		return err
	}
	name := Default
	if req.Shell != nil {
		name = *req.Shell
	}
	if err := s.Restart(r.Context(), name); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func milliseconds(o Outcome) int64 { return o.Duration.Round(time.Millisecond).Milliseconds() }
