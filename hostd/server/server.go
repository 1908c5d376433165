// Package server speaks the host link (shared/hostlink) to gateways: HTTP in
// and out, the sessions themselves are hostd/session's.
package server

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

// Sessions is what the server does for a gateway.
type Sessions interface {
	Acquire(ctx context.Context, a hostlink.Acquire) (st hostlink.Status, created bool, err error)
	Patch(ctx context.Context, id string, set hostlink.Settings) (hostlink.Status, error)
	End(ctx context.Context, t hostlink.Tombstone) (hostlink.Tombstone, error)
	Inventory(ctx context.Context) (hostlink.Inventory, error)
	Ack(ids []string) error
	Watch() (notices <-chan hostlink.Notice, stop func())
	// Tunnel's done closes the connection, whatever happens before.
	Tunnel(ctx context.Context, id string, epoch uint64) (conn net.Conn, done func(), err error)

	Prepare(ctx context.Context, id string, o hostlink.Prepare) error
	TemplateOf(id string) (hostlink.TemplateOf, error)
	MadeTemplate(recipe string) hostlink.MadeTemplate
	Capture(ctx context.Context, id string, o hostlink.Capture) (hostlink.Captured, error)
	Restore(ctx context.Context, id string, o hostlink.Restore) (hostlink.Restored, error)
	Verdict(ctx context.Context, id string, v hostlink.Verdict) error
	Baggage(ctx context.Context, id, snapshotID string) (hostlink.Baggage, error)
	Parts(id string) []string
	Ahead(ctx context.Context, id, opID string, in io.Reader) error
	OpenSnapshot(ctx context.Context, id string, have []string) (io.ReadCloser, error)
	DeleteSnapshot(ctx context.Context, id, sessionID string) error
	OpenTemplate(hash string) (io.ReadCloser, error)
}

// Events reads the sessions' logs.
type Events interface {
	Page(sessionID string, after uint64, types []event.Type, limit int) (hostlink.EventPage, error)
	// Follow yields events after the given seq, and a zero Event when nothing
	// came for a while; it ends after the last event of an ended session.
	Follow(ctx context.Context, sessionID string, after uint64, types []event.Type) iter.Seq2[event.Event, error]
}

const (
	maxBody   = 4 << 20         // an Acquire with 1 MiB of setup, generously
	pingEvery = 5 * time.Second // on the watch
)

// Server is the host link's HTTP side.
type Server struct {
	sessions Sessions
	events   Events
	log      *slog.Logger
}

// New adds the host link's paths to mux, each behind the cluster secret.
func New(mux *http.ServeMux, secret *trust.Secret, s Sessions, e Events, log *slog.Logger) {
	srv := &Server{s, e, log}
	for pattern, handle := range map[string]func(http.ResponseWriter, *http.Request) error{
		"POST /v1/sessions":                   srv.acquire,
		"GET /v1/sessions":                    srv.inventory,
		"PATCH /v1/sessions/{id}":             srv.patch,
		"DELETE /v1/sessions/{id}":            srv.end,
		"POST /v1/acks":                       srv.ack,
		"GET /v1/sessions/{id}/events":        srv.page,
		"GET /v1/sessions/{id}/events/stream": srv.stream,
		"GET /v1/watch":                       srv.watch,
		"GET /v1/sessions/{id}/tunnel":        srv.tunnel,
		"POST /v1/sessions/{id}/prepare":      srv.prepare,
		"GET /v1/sessions/{id}/template":      srv.templateOf,
		"GET /v1/sessions/{id}/parts":         srv.parts,
		"PUT /v1/sessions/{id}/ahead":         srv.ahead,
		"POST /v1/sessions/{id}/capture":      srv.capture,
		"POST /v1/sessions/{id}/restore":      srv.restore,
		"POST /v1/sessions/{id}/verdict":      srv.verdict,
		"GET /v1/sessions/{id}/baggage":       srv.baggage,
		"GET /v1/snapshots/{id}":              srv.snapshot,
		"DELETE /v1/snapshots/{id}":           srv.deleteSnapshot,
		"GET /v1/templates":                   srv.madeTemplate,
		"GET /v1/templates/{hash}":            srv.template,
	} {
		mux.HandleFunc(pattern, srv.guard(secret, handle))
	}
}

// guard checks the secret and turns an error into the envelope.
func (s *Server) guard(secret *trust.Secret, handle func(http.ResponseWriter, *http.Request) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		err := error(apierr.New(apierr.Unauthorized, "not a member of this cluster"))
		if secret.Check(r.Header.Get(trust.Header)) {
			err = handle(w, r)
		}
		if err == nil {
			return
		}
		e := apierr.From(err)
		if e.Code == apierr.Internal && r.Context().Err() == nil {
			s.log.Error("host link request failed", "method", r.Method, "path", r.URL.Path, "error", err)
		}
		if e.RetryAfter > 0 {
			w.Header().Set("Retry-After", strconv.Itoa(int((e.RetryAfter+time.Second-1)/time.Second)))
		}
		reply(w, e.Status(), e)
	}
}

func reply(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the gateway went away: nothing to tell it
}

func decode(w http.ResponseWriter, r *http.Request, v any) error {
	if err := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxBody)).Decode(v); err != nil {
		return apierr.Wrap(err, apierr.InvalidRequest, "the body is not what the host link expects")
	}
	return nil
}

func (s *Server) acquire(w http.ResponseWriter, r *http.Request) error {
	var a hostlink.Acquire
	if err := decode(w, r, &a); err != nil {
		return err
	}
	if err := checkAcquire(a); err != nil {
		return err
	}
	st, created, err := s.sessions.Acquire(r.Context(), a)
	if err != nil {
		return err
	}
	if created && r.Context().Err() != nil { // the gateway gave up meanwhile: nobody will claim this machine
		_, err := s.sessions.End(context.WithoutCancel(r.Context()), hostlink.Tombstone{
			SessionID: a.SessionID, Epoch: a.Epoch, EndedAt: time.Now().UTC(), Reason: session.Released})
		return errors.Join(context.Cause(r.Context()), err)
	}
	status := http.StatusOK
	if created {
		status = http.StatusCreated
	}
	reply(w, status, st)
	return nil
}

// validID keeps an id from being a path in the host's files.
var validID = regexp.MustCompile(`^[0-9A-Za-z_-]{1,64}$`)

func checkAcquire(a hostlink.Acquire) error {
	switch {
	case !validID.MatchString(a.SessionID):
		return apierr.New(apierr.InvalidRequest, "sessionId: %q is not an id", a.SessionID)
	case !slices.Contains(session.Kinds(), a.Kind):
		return apierr.New(apierr.InvalidRequest, "kind: %q is not browser, shell or both", a.Kind)
	case a.Epoch == 0 || a.ExpiresAt.IsZero():
		return apierr.New(apierr.InvalidRequest, "epoch and expiresAt: must be given")
	}
	return nil
}

func (s *Server) inventory(w http.ResponseWriter, r *http.Request) error {
	inv, err := s.sessions.Inventory(r.Context())
	if err == nil {
		reply(w, http.StatusOK, inv)
	}
	return err
}

func (s *Server) patch(w http.ResponseWriter, r *http.Request) error {
	var set hostlink.Settings
	if err := decode(w, r, &set); err != nil {
		return err
	}
	st, err := s.sessions.Patch(r.Context(), r.PathValue("id"), set)
	if err == nil {
		reply(w, http.StatusOK, st)
	}
	return err
}

func (s *Server) end(w http.ResponseWriter, r *http.Request) error {
	epoch, err := strconv.ParseUint(r.FormValue("epoch"), 10, 64)
	if err != nil {
		return apierr.Wrap(err, apierr.InvalidRequest, "epoch: must be a number")
	}
	t := hostlink.Tombstone{SessionID: r.PathValue("id"), Epoch: epoch, EndedAt: time.Now().UTC(),
		Reason: session.EndReason(r.FormValue("reason")), Error: r.FormValue("error")}
	// Ending does not stop half way because the gateway went.
	t, err = s.sessions.End(context.WithoutCancel(r.Context()), t)
	if err == nil {
		reply(w, http.StatusOK, t)
	}
	return err
}

func (s *Server) ack(w http.ResponseWriter, r *http.Request) error {
	var a hostlink.Acks
	if err := decode(w, r, &a); err != nil {
		return err
	}
	if err := s.sessions.Ack(a.SessionIDs); err != nil {
		return err
	}
	w.WriteHeader(http.StatusNoContent)
	return nil
}

// eventQuery reads after and types.
func eventQuery(r *http.Request) (after uint64, types []event.Type, err error) {
	if v := r.FormValue("after"); v != "" {
		if after, err = strconv.ParseUint(v, 10, 64); err != nil {
			return 0, nil, apierr.Wrap(err, apierr.InvalidRequest, "after: must be a number")
		}
	}
	if v := r.FormValue("types"); v != "" {
		for _, t := range strings.Split(v, ",") {
			types = append(types, event.Type(t))
		}
	}
	return after, types, nil
}

func (s *Server) page(w http.ResponseWriter, r *http.Request) error {
	after, types, err := eventQuery(r)
	if err != nil {
		return err
	}
	limit, err := strconv.Atoi(r.FormValue("limit"))
	if err != nil {
		limit = event.DefaultPage
	}
	page, err := s.events.Page(r.PathValue("id"), after, types, limit)
	if err == nil {
		reply(w, http.StatusOK, page)
	}
	return err
}

func (s *Server) stream(w http.ResponseWriter, r *http.Request) error {
	after, types, err := eventQuery(r)
	if err != nil {
		return err
	}
	out := newLines(w)
	defer out.done()
	for e, err := range s.events.Follow(r.Context(), r.PathValue("id"), after, types) {
		if err == nil && e.Seq == 0 {
			err = out.blank()
		} else if err == nil {
			err = out.line(e)
		}
		if err != nil {
			// A clean end would say that the session has ended: cut the connection.
			panic(http.ErrAbortHandler)
		}
	}
	return nil
}

func (s *Server) watch(w http.ResponseWriter, r *http.Request) error {
	notices, stop := s.sessions.Watch() // before the inventory, so that nothing falls between
	defer stop()
	inv, err := s.sessions.Inventory(r.Context())
	if err != nil {
		return err
	}
	out := newLines(w)
	defer out.done()
	ping := time.NewTicker(pingEvery)
	defer ping.Stop()
	n, ok := hostlink.Notice{Inventory: &inv}, true
	for ok && out.line(n) == nil {
		select {
		case <-r.Context().Done():
			return nil
		case <-ping.C:
			n = hostlink.Notice{Ping: true}
		case n, ok = <-notices:
		}
	}
	return nil
}
