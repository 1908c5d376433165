// Package api is HTTP in and out of the public endpoint: it authenticates,
// checks requests against openapi.yaml, calls the use cases and relays what
// belongs to a session's machine. DESIGN.md tells how. It is the only importer
// of fasthttp.
package api

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"sync"
	"time"

	"github.com/fasthttp/router"
	"github.com/valyala/fasthttp"

	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/apierr"
)

// Config is what a Server is made of; every field but Ready is required, Admin
// only by ServeAdmin.
type Config struct {
	Service  Service
	Accounts Accounts
	Admin    Admin
	Ready    func() error // nil when the gateway can serve, else what is missing; nil func: always ready
	Log      *slog.Logger
}

// Bounds of what a client may send and for how long it may dawdle.
const (
	maxHeaderBytes = 16 << 10
	maxJSONBytes   = 1 << 20
	headerTime     = 30 * time.Second  // for the head and the first bytes of a body, and for a JSON body
	idleTime       = 120 * time.Second // between two requests of a connection
	uploadIdleTime = 60 * time.Second  // an upload that sends nothing for so long ends
	stuckTime      = 5 * time.Minute   // a download of which the client takes nothing for so long ends
	ordinaryTime   = 30 * time.Second  // for operations that only ask the record
)

// Why work is cancelled from here.
var (
	errClientGone = apierr.New(apierr.Canceled, "the client left before the answer")
	errLeaving    = apierr.New(apierr.Unavailable, "this gateway is shutting down; try again").After(time.Second)
)

// Server is the public endpoint. Safe for concurrent use.
type Server struct {
	cfg     Config
	api     *api.API
	http    *fasthttp.Server
	admin   *fasthttp.Server
	metrics *measures

	base   context.Context // ends when Shutdown has waited long enough
	cancel context.CancelCauseFunc

	leaving   context.Context // ends when Shutdown begins: sockets and event streams go
	leave     context.CancelCauseFunc
	sockets   sync.WaitGroup
	unclaimed sync.Map // net.Conn of a client → *socket whose hijack has not begun
	silent    sync.Map // net.Conn that has sent no request yet → nothing
}

// New makes a server; it fails when handlers and openapi.yaml do not match.
func New(cfg Config) (*Server, error) {
	spec, err := api.Load()
	if err != nil {
		return nil, err
	}
	s := &Server{cfg: cfg, api: spec, metrics: newMeasures()}
	s.base, s.cancel = context.WithCancelCause(context.Background())
	s.leaving, s.leave = context.WithCancelCause(s.base)
	r, err := s.router()
	if err != nil {
		return nil, err
	}
	s.http, s.admin = newHTTP(r, s), s.newAdmin()
	return s, nil
}

func newHTTP(r *router.Router, s *Server) *fasthttp.Server {
	return &fasthttp.Server{
		Handler:                      r.Handler,
		ErrorHandler:                 s.malformed,
		ConnState:                    s.connState,
		Logger:                       quiet{s.cfg.Log},
		ReadBufferSize:               maxHeaderBytes,
		WriteBufferSize:              8 << 10,
		ReadTimeout:                  headerTime,
		IdleTimeout:                  idleTime,
		StreamRequestBody:            true, // bodies are read by handlers: see body.go
		MaxRequestBodySize:           maxJSONBytes,
		DisablePreParseMultipartForm: true, // an upload may well be multipart: it is bytes to us
		NoDefaultServerHeader:        true,
		NoDefaultContentType:         true,
		CloseOnShutdown:              true,
		TCPKeepalive:                 true,
	}
}

// Serve answers on ln until Shutdown.
func (s *Server) Serve(ln net.Listener) error { return s.http.Serve(ln) }

// Shutdown stops accepting, closes WebSockets with 1001 and event streams, and
// waits for other requests until ctx ends, then cuts them.
func (s *Server) Shutdown(ctx context.Context) error {
	s.leave(errLeaving)
	defer s.closeSilent()()
	err := errors.Join(s.http.ShutdownWithContext(ctx), s.admin.ShutdownWithContext(ctx))
	if err != nil {
		s.cancel(errLeaving)
		last, stop := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
		defer stop()
		err = errors.Join(err, s.http.ShutdownWithContext(last), s.admin.ShutdownWithContext(last))
	}
	s.cancel(errLeaving)
	s.sockets.Wait() // each ends within closeTime of leaving
	return err
}

// closeSilent closes connections that browsers opened ahead of need, until stop:
// fasthttp takes them for busy and would wait.
func (s *Server) closeSilent() (stop func()) {
	end, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		tick := time.NewTicker(20 * time.Millisecond)
		defer tick.Stop()
		for {
			for c := range s.silent.Range {
				_ = c.(net.Conn).Close()
			}
			select {
			case <-tick.C:
			case <-end:
				return
			}
		}
	}()
	return func() { close(end); <-done }
}

// quiet keeps fasthttp's own lines, mostly of broken clients, at debug.
type quiet struct{ log *slog.Logger }

// Printf implements fasthttp.Logger.
func (q quiet) Printf(format string, args ...any) {
	q.log.Debug("fasthttp", "format", format, "args", args)
}
