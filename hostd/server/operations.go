package server

import (
	"context"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// keyBytes is the size of a session's key.
const keyBytes = 32

func (s *Server) prepare(w http.ResponseWriter, r *http.Request) error {
	var o hostlink.Prepare
	if err := decode(w, r, &o); err != nil {
		return err
	}
	if !validID.MatchString(r.PathValue("id")) || !validID.MatchString(o.OpID) {
		return apierr.New(apierr.InvalidRequest, "opId: %q is not an id", o.OpID)
	}
	if !slices.Contains(session.Kinds(), o.Kind) {
		return apierr.New(apierr.InvalidRequest, "kind: %q is not browser, shell or both", o.Kind)
	}
	if err := s.sessions.Prepare(r.Context(), r.PathValue("id"), o); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) templateOf(w http.ResponseWriter, r *http.Request) error {
	t, err := s.sessions.TemplateOf(r.PathValue("id"))
	if err == nil {
		reply(w, http.StatusOK, t)
	}
	return err
}

func (s *Server) parts(w http.ResponseWriter, r *http.Request) error {
	reply(w, http.StatusOK, s.sessions.Parts(r.PathValue("id")))
	return nil
}

// ahead takes a stream of any length in, as long as it goes on.
func (s *Server) ahead(w http.ResponseWriter, r *http.Request) error {
	ctl := http.NewResponseController(w)
	defer func() { _ = ctl.SetReadDeadline(time.Time{}) }()
	if err := s.sessions.Ahead(r.Context(), r.PathValue("id"), r.URL.Query().Get("op"), &lively{r.Body, ctl}); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// lively is a body whose every part has to come within writeTime.
type lively struct {
	io.Reader
	ctl *http.ResponseController
}

func (l *lively) Read(b []byte) (int, error) {
	_ = l.ctl.SetReadDeadline(time.Now().Add(writeTime)) // unsupported only by tests' recorders
	return l.Reader.Read(b)
}

func (s *Server) capture(w http.ResponseWriter, r *http.Request) error {
	var o hostlink.Capture
	if err := decode(w, r, &o); err != nil {
		return err
	}
	if o.Kind != session.Pause && o.Kind != session.Move {
		return apierr.New(apierr.InvalidRequest, "kind: %q is not pause or move", o.Kind)
	}
	if err := checkOrder(r.PathValue("id"), o.OpID, o.SnapshotID, o.Key); err != nil {
		return err
	}
	if o.Previous != "" && !validID.MatchString(o.Previous) {
		return apierr.New(apierr.InvalidRequest, "previous: %q is not an id", o.Previous)
	}
	// A capture does not stop half way because the gateway went: the same order
	// asks for its answer again.
	done, err := s.sessions.Capture(r.Context(), r.PathValue("id"), o)
	if err == nil {
		reply(w, http.StatusOK, done)
	}
	return err
}

func (s *Server) restore(w http.ResponseWriter, r *http.Request) error {
	var o hostlink.Restore
	if err := decode(w, r, &o); err != nil {
		return err
	}
	if o.Kind != session.Resume && o.Kind != session.Move {
		return apierr.New(apierr.InvalidRequest, "kind: %q is not resume or move", o.Kind)
	}
	if o.Acquire.SessionID != r.PathValue("id") {
		return apierr.New(apierr.InvalidRequest, "acquire.sessionId: is not that of the path")
	}
	if err := checkOrder(o.Acquire.SessionID, o.OpID, o.Snapshot.ID, o.Key); err != nil {
		return err
	}
	if err := checkAcquire(o.Acquire); err != nil {
		return err
	}
	done, err := s.sessions.Restore(r.Context(), o.Acquire.SessionID, o)
	if err == nil {
		reply(w, http.StatusOK, done)
	}
	return err
}

func checkOrder(id, op, snapshot string, key []byte) error {
	for name, v := range map[string]string{"session": id, "opId": op, "snapshot": snapshot} {
		if !validID.MatchString(v) {
			return apierr.New(apierr.InvalidRequest, "%s: %q is not an id", name, v)
		}
	}
	if len(key) != keyBytes {
		return apierr.New(apierr.InvalidRequest, "key: has %d bytes, not %d", len(key), keyBytes)
	}
	return nil
}

func (s *Server) verdict(w http.ResponseWriter, r *http.Request) error {
	var v hostlink.Verdict
	if err := decode(w, r, &v); err != nil {
		return err
	}
	if v.OpID == "" {
		return apierr.New(apierr.InvalidRequest, "opId: must be given")
	}
	// It is carried out to its end, whoever waits for it.
	if err := s.sessions.Verdict(context.WithoutCancel(r.Context()), r.PathValue("id"), v); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) baggage(w http.ResponseWriter, r *http.Request) error {
	b, err := s.sessions.Baggage(r.Context(), r.PathValue("id"), r.FormValue("snapshot"))
	if err == nil {
		reply(w, http.StatusOK, b)
	}
	return err
}

func (s *Server) snapshot(w http.ResponseWriter, r *http.Request) error {
	var have []string
	if v := r.FormValue("have"); v != "" {
		have = strings.Split(v, ",")
	}
	in, err := s.sessions.OpenSnapshot(r.Context(), r.PathValue("id"), have)
	if err != nil {
		return err
	}
	send(w, in)
	return nil
}

func (s *Server) deleteSnapshot(w http.ResponseWriter, r *http.Request) error {
	if err := s.sessions.DeleteSnapshot(r.Context(), r.PathValue("id"), r.FormValue("session")); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

func (s *Server) madeTemplate(w http.ResponseWriter, r *http.Request) error {
	reply(w, http.StatusOK, s.sessions.MadeTemplate(r.FormValue("recipe")))
	return nil
}

func (s *Server) template(w http.ResponseWriter, r *http.Request) error {
	in, err := s.sessions.OpenTemplate(r.PathValue("hash"))
	if err != nil {
		return err
	}
	send(w, in)
	return nil
}

// sendPart is what a reader of a stream has writeTime for, bytes.
const sendPart = 1 << 20

// send writes a stream of any length. A clean end would say that it is whole:
// one that breaks off cuts the connection.
func send(w http.ResponseWriter, in io.ReadCloser) {
	defer in.Close()
	ctl := http.NewResponseController(w)
	w.Header().Set("Content-Type", "application/octet-stream")
	defer func() { _ = ctl.SetWriteDeadline(time.Time{}) }()
	for {
		_ = ctl.SetWriteDeadline(time.Now().Add(writeTime)) // unsupported only by tests' recorders
		_, err := io.CopyN(w, in, sendPart)
		if err == io.EOF {
			return
		}
		if err != nil {
			panic(http.ErrAbortHandler)
		}
	}
}
