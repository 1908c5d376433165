package api

import (
	"fmt"
	"net"

	"github.com/fasthttp/router"
	"github.com/valyala/fasthttp"
)

// route is what serves one operation.
type route struct {
	handler handler
	// watched operations work on until they are done or the client has left;
	// the others end after ordinaryTime.
	watched bool
}

// routes are the handlers by operationId. New fails when openapi.yaml and this
// table name different operations.
var routes = map[string]route{
	"createSession":      {(*call).createSession, true},
	"listSessions":       {(*call).listSessions, false},
	"releaseAllSessions": {(*call).releaseAll, false},
	"getSession":         {(*call).getSession, false},
	"patchSession":       {(*call).patchSession, false},
	"deleteSession":      {(*call).releaseSession, false},
	"releaseSession":     {(*call).releaseSession, false},
	"pauseSession":       {(*call).pauseSession, true},
	"resumeSession":      {(*call).resumeSession, true},
	"moveSession":        {(*call).moveSession, true},
	"rotateSessionProxy": {(*call).rotateProxy, false},
	"getSessionLive":     {(*call).freshURLs, false},
	"rotateSessionUrls":  {(*call).rotateURLs, false},

	"listSessionEvents":   {(*call).listEvents, false},
	"streamSessionEvents": {(*call).streamEvents, true},

	"exec":         {(*call).exec, true},
	"restartShell": {(*call).restartShell, true},
	"getFile":      {(*call).getFile, true},
	"putFile":      {(*call).putFile, true},
	"deleteFile":   {(*call).deleteFile, true},
	"waitForFile":  {(*call).waitForFile, true},
	"makeFolder":   {(*call).makeFolder, true},
	"moveFile":     {(*call).moveFile, true},

	"connectBrowser": {(*call).connectBrowser, true},
	"openTerminal":   {(*call).openTerminal, true},
	"browserVersion": {(*call).browserVersion, true},
	"browserTargets": {(*call).browserTargets, true},
	"liveView":       {(*call).liveView, false},
	"liveBrowser":    {(*call).liveBrowser, true},
	"liveTerminal":   {(*call).liveTerminal, true},

	"me":      {(*call).me, false},
	"usage":   {(*call).usage, false},
	"pricing": {(*call).pricing, false},
	"healthz": {(*call).healthz, false},
	"readyz":  {(*call).readyz, false},
	"metrics": {(*call).writeMetrics, false},
}

// router lays the operations out. Paths in openapi.yaml and in the router have
// the same form.
func (s *Server) router() (*router.Router, error) {
	r := router.New()
	r.RedirectTrailingSlash = false
	r.RedirectFixedPath = false
	r.HandleOPTIONS = false
	r.HandleMethodNotAllowed = true
	r.NotFound = s.notFound
	r.MethodNotAllowed = s.methodNotAllowed
	for _, op := range s.api.Operations() {
		served, ok := routes[op.ID]
		if !ok {
			return nil, fmt.Errorf("operation %s of openapi.yaml has no handler", op.ID)
		}
		r.Handle(op.Method, op.Path, s.handle(op, served))
	}
	for id := range routes {
		if s.api.Operation(id) == nil {
			return nil, fmt.Errorf("handler %s has no operation in openapi.yaml", id)
		}
	}
	return r, nil
}

// connState follows client connections: which have not spoken yet, and which
// closed although a socket waited for their hijack.
func (s *Server) connState(c net.Conn, state fasthttp.ConnState) {
	switch state {
	case fasthttp.StateNew:
		s.silent.Store(c, nil)
	case fasthttp.StateClosed:
		s.silent.Delete(c)
		if k, ok := s.unclaimed.LoadAndDelete(c); ok {
			k.(*socket).abandon()
		}
	}
}
