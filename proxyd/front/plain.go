package front

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// Plain HTTP: requests in absolute form (RFC 9112 3.2.2). net/http reads and
// writes the messages, so framing that two parsers could take differently
// never gets through: each message is parsed whole and written anew, with
// Transfer-Encoding over Content-Length (RFC 9112 6.1) and malformed ones
// refused. No Via is added: pages would see the proxy.

type clientKey struct{}

func (s *Server) newPlain() *http.Server {
	return &http.Server{
		Handler:           http.HandlerFunc(s.serveHTTP),
		ReadHeaderTimeout: headTimeout,
		MaxHeaderBytes:    maxHead,
		ErrorLog:          slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, conn net.Conn) context.Context {
			return context.WithValue(ctx, clientKey{}, conn)
		},
		ConnState: func(conn net.Conn, state http.ConnState) { conn.(*client).between.Store(state == http.StateIdle) },
	}
}

// serveHTTP serves each request of a connection; its target is decided anew.
func (s *Server) serveHTTP(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(clientKey{}).(*client)
	if c.spoiled.Load() {
		panic(http.ErrAbortHandler) // closes
	}
	if c.web != nil && s.passes.Replaced(c.pass) {
		panic(http.ErrAbortHandler) // closes: the client repeats it on a new connection, whose pass is today's
	}
	if r.Method == http.MethodConnect {
		s.hijackConnect(c, w, r)
		return
	}
	text, target, refused := plainTarget(r)
	var route *proxylink.Route
	switch {
	case c.refused != nil:
		refused = c.refused
		w.Header().Set("Connection", "close") // the next connection may fare better; this one has no pass, or no place, for ever
	case refused == nil:
		route, refused = s.decide(c, target)
	}
	if refused != nil {
		s.refuse(c, r.Method, text, refused)
		answerRefusal(w, refused)
		return
	}
	if c.web == nil {
		c.web = s.newWeb(c)
	}
	c.target = text
	opened[viaOf(route)].Inc()
	// A site may answer while the body still comes; without this net/http would
	// read the body away before the answer goes out.
	_ = http.NewResponseController(w).EnableFullDuplex()
	r.Body = &body{r.Body, c}
	c.web.serve(w, r, route)
}

// body notes that a request's body has no end that can be found, such as one
// with a malformed chunk. In full duplex net/http would take what follows for
// the next request.
type body struct {
	io.ReadCloser
	c *client
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, http.ErrBodyReadAfterClose) {
		b.c.spoiled.Store(true)
	}
	return n, err
}

// Close reads on to the end, or net/http closes the connection.
func (b *body) Close() error {
	err := b.ReadCloser.Close()
	if err != nil {
		b.c.spoiled.Store(true)
	}
	return err
}

// plainTarget reads the target of a request in absolute form; text is what the
// client wrote.
func plainTarget(r *http.Request) (text string, t egress.Target, refused *egress.Refusal) {
	text = r.URL.Host
	if text == "" {
		return r.Host, t, egress.Refuse(egress.BadTarget, "this is a proxy: send the whole URL, or CONNECT")
	}
	if r.URL.Scheme != "http" && r.URL.Scheme != "ws" {
		return text, t, egress.Refuse(egress.BadTarget, "scheme %q is not served: use http, or CONNECT", r.URL.Scheme)
	}
	if r.URL.Port() == "" {
		text = strings.TrimSuffix(text, ":") + ":80"
	}
	t, refused = egress.ParseTarget(text)
	return text, t, refused
}

// hijackConnect serves a CONNECT that follows plain requests.
func (s *Server) hijackConnect(c *client, w http.ResponseWriter, r *http.Request) {
	_, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.log.Error("hijack", "session", c.hello.SessionID, "error", err)
		return
	}
	ahead, _ := rw.Reader.Peek(rw.Reader.Buffered())
	_ = c.SetDeadline(time.Time{})
	s.tunnel(c, r.RequestURI, append([]byte(nil), ahead...))
}

func answerRefusal(w http.ResponseWriter, r *egress.Refusal) {
	w.Header().Set(egress.ReasonHeader, string(r.Reason))
	http.Error(w, r.Detail, statuses[r.Reason])
}

// buffers is the pool of ReverseProxy's copies.
type buffers struct{}

var bufferPool = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

func (buffers) Get() []byte  { return *bufferPool.Get().(*[]byte) }
func (buffers) Put(b []byte) { bufferPool.Put(&b) }

// handoff is a listener that is given its connections.
type handoff struct {
	conns  chan net.Conn
	closed chan struct{}
	once   *sync.Once
}

func newHandoff() handoff {
	return handoff{make(chan net.Conn), make(chan struct{}), new(sync.Once)}
}

// give passes conn to Accept, or closes it when nobody accepts any more.
func (h handoff) give(conn net.Conn) {
	select {
	case h.conns <- conn:
	case <-h.closed:
		conn.Close()
	}
}

func (h handoff) Accept() (net.Conn, error) {
	select {
	case conn := <-h.conns:
		return conn, nil
	case <-h.closed:
		return nil, net.ErrClosed
	}
}

func (h handoff) Close() error {
	h.once.Do(func() { close(h.closed) })
	return nil
}

func (h handoff) Addr() net.Addr { return &net.TCPAddr{} }
