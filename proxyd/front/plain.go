package front

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/egress"
)

// Plain HTTP: requests in absolute form (RFC 9112 3.2.2). net/http reads and
// writes the messages, so framing that two parsers could take differently
// never gets through: each message is parsed whole and written anew, with
// Transfer-Encoding over Content-Length (RFC 9112 6.1) and malformed ones
// refused. Upstream connections belong to one client connection: nobody
// shares one with another session. No Via is added: pages would see the proxy.

// web is what plain HTTP keeps for one client connection.
type web struct {
	transport *http.Transport
	proxy     *httputil.ReverseProxy
}

func (w *web) close() {
	if w != nil {
		w.transport.CloseIdleConnections()
	}
}

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
	}
}

// serveHTTP serves each request of a connection; its target is decided anew.
func (s *Server) serveHTTP(w http.ResponseWriter, r *http.Request) {
	c := r.Context().Value(clientKey{}).(*client)
	if r.Method == http.MethodConnect {
		s.hijackConnect(c, w, r)
		return
	}
	target, err := s.plainTarget(c, r)
	if err != nil {
		answerRefusal(w, s.refuse(c, r.URL.Host, err))
		return
	}
	if c.web == nil {
		c.web = s.newWeb(c)
	}
	c.target = target.String()
	// A site may answer while the body still comes; without this net/http would
	// read the body away before the answer goes out.
	_ = http.NewResponseController(w).EnableFullDuplex()
	c.web.proxy.ServeHTTP(w, r)
}

// plainTarget reads and checks the target of a request in absolute form.
func (s *Server) plainTarget(c *client, r *http.Request) (t egress.Target, err error) {
	if c.refused != nil {
		return t, c.refused
	}
	if r.URL.Host == "" {
		return t, egress.Refuse(egress.BadTarget, "this is a proxy: send the whole URL, or CONNECT")
	}
	if r.URL.Scheme != "http" && r.URL.Scheme != "ws" {
		return t, egress.Refuse(egress.BadTarget, "scheme %q is not served: use http, or CONNECT", r.URL.Scheme)
	}
	text := r.URL.Host
	if r.URL.Port() == "" {
		text = strings.TrimSuffix(text, ":") + ":80"
	}
	t, refusal := egress.ParseTarget(text)
	if refusal == nil {
		refusal = t.CheckPort()
	}
	if refusal != nil {
		return t, refusal
	}
	return t, nil
}

// hijackConnect serves a CONNECT that follows plain requests.
func (s *Server) hijackConnect(c *client, w http.ResponseWriter, r *http.Request) {
	_, rw, err := http.NewResponseController(w).Hijack()
	if err != nil {
		s.log.Error("hijack", "session", c.session, "error", err)
		return
	}
	ahead, _ := rw.Reader.Peek(rw.Reader.Buffered())
	_ = c.SetDeadline(time.Time{})
	s.tunnel(c, r.RequestURI, append([]byte(nil), ahead...))
}

func (s *Server) newWeb(c *client) *web {
	transport := &http.Transport{
		DialContext: func(ctx context.Context, _, addr string) (net.Conn, error) {
			target, r := egress.ParseTarget(addr)
			if r != nil {
				return nil, r
			}
			conn, err := s.dialer.Dial(ctx, target)
			if err != nil {
				return nil, err
			}
			return &counted{Conn: conn, c: c}, nil
		},
		DisableCompression:     true, // the client's own Accept-Encoding goes through
		MaxIdleConns:           4,
		MaxIdleConnsPerHost:    2,
		IdleConnTimeout:        90 * time.Second,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: 1 << 20,
	}
	proxy := &httputil.ReverseProxy{
		Transport:     transport,
		Rewrite:       rewrite,
		FlushInterval: -1,
		BufferPool:    buffers{},
		ErrorLog:      slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			if r.Context().Err() == nil { // else the client left
				answerRefusal(w, s.refuse(c, r.URL.Host, plainFailure(err)))
			}
		},
	}
	return &web{transport, proxy}
}

// rewrite gives the request as the client sent it; ReverseProxy has removed
// the hop-by-hop fields (RFC 9110 7.6.1) and, meant for other uses, fields and
// queries that are none of this proxy's business.
func rewrite(p *httputil.ProxyRequest) {
	if p.Out.URL.Scheme == "ws" {
		p.Out.URL.Scheme = "http"
	}
	p.Out.URL.User = nil
	p.Out.URL.RawQuery = p.In.URL.RawQuery
	p.Out.Host = p.In.Host
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := p.In.Header[name]; ok {
			p.Out.Header[name] = v
		}
	}
}

// plainFailure turns what a round trip failed with into a refusal.
func plainFailure(err error) error {
	var r *egress.Refusal
	var timed net.Error
	if errors.As(err, &r) {
		return r
	}
	r = egress.Refuse(egress.UpstreamUnreachable, "the site's answer could not be read")
	if errors.As(err, &timed) && timed.Timeout() {
		r = egress.Refuse(egress.UpstreamTimeout, "the site did not answer in time")
	}
	r.Cause = err
	return r
}

func answerRefusal(w http.ResponseWriter, r *egress.Refusal) {
	w.Header().Set(egress.ReasonHeader, string(r.Reason))
	http.Error(w, r.Detail, statuses[r.Reason])
}

// counted counts whole messages, heads included, as they go upstream.
type counted struct {
	net.Conn
	c *client
}

func (u *counted) Read(p []byte) (int, error) {
	n, err := u.Conn.Read(p)
	u.c.meter.Via(egress.None).Down(int64(n))
	return n, err
}

func (u *counted) Write(p []byte) (int, error) {
	n, err := u.Conn.Write(p)
	u.c.meter.Via(egress.None).Up(int64(n))
	return n, err
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
