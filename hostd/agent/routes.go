package main

import (
	"context"
	"net/http"

	"github.com/berth-dev/berth/hostd/agent/reply"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
)

// The paths of a machine that lacks a browser or a shell answer 400.
var (
	noBrowser = refusals{[]string{agentlink.PathCDP, agentlink.PathJSONVersion, agentlink.PathJSONList}, "this session has no browser"}
	noShell   = refusals{[]string{agentlink.PathExec, agentlink.PathShellRestart, agentlink.PathTerminal}, "this session has no shell"}
)

// part is what serves some of the Path* paths.
type part interface{ Register(mux *http.ServeMux) }

// at is the part of a handler of one path.
type at struct {
	path    string
	handler http.Handler
}

func (a at) Register(mux *http.ServeMux) { mux.Handle(a.path, a.handler) }

// customer serves a session's own work over the session link, 503 before the
// machine has a session. Requests that come while it stands still wait.
func customer(taken func() bool, awaitThaw func(context.Context) error, parts ...part) http.Handler {
	mux := http.NewServeMux()
	for _, p := range parts {
		p.Register(mux)
	}
	mux.HandleFunc("/", notFound)
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !taken() {
			reply.Error(w, r, apierr.New(apierr.Unavailable, "the session's machine is not started"))
			return
		}
		if awaitThaw(r.Context()) != nil {
			return // the client left
		}
		mux.ServeHTTP(w, r)
	})
}

// refusals is the part that stands where a kind has none.
type refusals struct {
	paths []string
	why   string
}

func (f refusals) Register(mux *http.ServeMux) {
	for _, p := range f.paths {
		mux.HandleFunc(p, func(w http.ResponseWriter, r *http.Request) {
			reply.Error(w, r, apierr.New(apierr.InvalidRequest, "%s", f.why))
		})
	}
}

func notFound(w http.ResponseWriter, r *http.Request) {
	reply.Error(w, r, apierr.New(apierr.NotFound, "path: nothing at %s", r.URL.Path))
}
