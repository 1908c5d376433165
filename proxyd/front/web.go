package front

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
	"github.com/berth-dev/berth/proxyd/upstream"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/proxylink"
)

// web is what plain HTTP keeps for one client connection. Connections to sites
// and proxies belong to it: nobody shares one with another session. Those
// through a proxy are kept by rule and carry requests to any site.
type web struct {
	s        *Server
	c        *client
	straight *http.Transport
	through  *http.Transport
	proxy    *httputil.ReverseProxy
}

func (s *Server) newWeb(c *client) *web {
	w := &web{s: s, c: c}
	w.straight = &http.Transport{
		DialContext:            w.dialSite,
		DisableCompression:     true, // the client's own Accept-Encoding goes through
		MaxIdleConns:           4,
		MaxIdleConnsPerHost:    2,
		IdleConnTimeout:        90 * time.Second,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: 1 << 20,
	}
	w.through = w.straight.Clone()
	w.through.DialContext = w.dialProxy
	w.through.Proxy = ruleURL
	w.through.ResponseHeaderTimeout = s.Upstreams.PlainTimeout()
	w.proxy = &httputil.ReverseProxy{
		Transport:     w,
		Rewrite:       rewrite,
		FlushInterval: -1,
		BufferPool:    buffers{},
		ErrorLog:      slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
		ErrorHandler:  w.fail,
	}
	return w
}

func (w *web) close() {
	if w != nil {
		w.straight.CloseIdleConnections()
		w.through.CloseIdleConnections()
	}
}

type routeKey struct{}

func (w *web) serve(rw http.ResponseWriter, r *http.Request, route *proxylink.Route) {
	w.proxy.ServeHTTP(rw, r.WithContext(context.WithValue(r.Context(), routeKey{}, route)))
}

// fail answers a request that came to nothing, unless the client left.
func (w *web) fail(rw http.ResponseWriter, r *http.Request, err error) {
	if r.Context().Err() == nil && w.c.spoiled.Load() {
		rw.Header().Set("Connection", "close")
		http.Error(rw, "the request's body cannot be read", http.StatusBadRequest)
	} else if r.Context().Err() == nil {
		refused := plainFailure(err)
		text, _, _ := plainTarget(r)
		w.s.refuse(w.c, r.Method, text, refused)
		answerRefusal(rw, refused)
	}
}

// RoundTrip makes a request by its route.
func (w *web) RoundTrip(r *http.Request) (*http.Response, error) {
	if r.Context().Value(routeKey{}).(*proxylink.Route) == nil {
		return w.straight.RoundTrip(r)
	}
	var on *counted
	resp, err := w.through.RoundTrip(r.WithContext(httptrace.WithClientTrace(r.Context(), &httptrace.ClientTrace{
		GotConn: func(got httptrace.GotConnInfo) { // before the request is written
			on = got.Conn.(*counted)
			on.head = true
		},
	})))
	if err != nil {
		return nil, throughFailure(err)
	}
	if refused := on.link.Judge(resp.StatusCode, resp.Header); refused != nil {
		resp.Body.Close()
		return nil, refused
	}
	return resp, nil
}

// ruleURL names a rule as the proxy of a request: connections are kept by it.
func ruleURL(r *http.Request) (*url.URL, error) {
	route := r.Context().Value(routeKey{}).(*proxylink.Route)
	pass := r.Context().Value(clientKey{}).(*client).pass
	for i := range pass.Routes {
		if route == &pass.Routes[i] {
			return &url.URL{Scheme: "http", Host: strconv.Itoa(i) + rulePort}, nil
		}
	}
	return nil, egress.Refuse(egress.BadRoute, "the rule is none of the session's")
}

// rulePort follows a rule's number where net/http wants host:port.
const rulePort = ".rule:1"

// dialProxy connects for the rule that addr names.
func (w *web) dialProxy(ctx context.Context, _, addr string) (net.Conn, error) {
	number, _ := strings.CutSuffix(addr, rulePort)
	i, err := strconv.Atoi(number)
	if err != nil || i >= len(w.c.pass.Routes) {
		return nil, egress.Refuse(egress.BadRoute, "the rule is none of the session's")
	}
	route := &w.c.pass.Routes[i]
	link, refused := w.s.Upstreams.Plain(ctx, route)
	if refused != nil {
		return nil, refused
	}
	u := &counted{Conn: link.Conn, flow: w.c.meter.Via(viaOf(route)), link: link}
	if link.Authorization != "" {
		u.login = "Proxy-Authorization: " + link.Authorization + "\r\n"
	}
	return u, nil
}

// dialSite connects to a site straight.
func (w *web) dialSite(ctx context.Context, _, addr string) (net.Conn, error) {
	target, refused := egress.ParseTarget(addr)
	if refused != nil {
		return nil, refused
	}
	conn, err := w.s.Guard.Dial(ctx, target)
	if err != nil {
		return nil, err
	}
	return &counted{Conn: conn, flow: w.c.meter.Via(egress.None)}, nil
}

// rewrite gives the request as the client sent it; ReverseProxy has removed
// the hop-by-hop fields (RFC 9110 7.6.1) with the client's Proxy-Authorization
// and, meant for other uses, fields and queries that are none of this proxy's
// business.
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
func plainFailure(err error) *egress.Refusal {
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

// throughFailure is plainFailure where a proxy was asked.
func throughFailure(err error) *egress.Refusal {
	r := plainFailure(err)
	if r.Cause == err && r.Reason == egress.UpstreamUnreachable {
		r.Reason, r.Detail = egress.UpstreamError, "the proxy's answer could not be read"
	} else if r.Cause == err {
		r.Detail = "the proxy did not answer in time"
	}
	return r
}

// counted is a connection of plain HTTP to a site or proxy. It counts whole
// messages, heads included, as they pass, and puts the proxy's login behind the
// first line of each request, uncounted. net/http's goroutines own its fields:
// head is set before a request is written, and used while it is.
type counted struct {
	net.Conn
	flow  *meter.Flow
	link  *upstream.Link // nil: straight to a site
	login string         // a field of a head with its end of line, or nothing
	head  bool           // a request's first line is under way
}

func (u *counted) Read(p []byte) (int, error) {
	n, err := u.Conn.Read(p)
	u.flow.Down(int64(n))
	return n, err
}

func (u *counted) Write(p []byte) (int, error) {
	n, err := u.write(p)
	u.flow.Up(int64(n))
	return n, err
}

// write gives how many bytes of p were written.
func (u *counted) write(p []byte) (int, error) {
	end := bytes.IndexByte(p, '\n') + 1
	if !u.head || end == 0 { // an endless first line comes in pieces
		return u.Conn.Write(p)
	}
	u.head = false
	if u.login == "" {
		return u.Conn.Write(p)
	}
	with := make([]byte, 0, len(p)+len(u.login))
	with = append(append(append(with, p[:end]...), u.login...), p[end:]...)
	n, err := u.Conn.Write(with)
	return min(n, end) + max(0, n-end-len(u.login)), err
}
