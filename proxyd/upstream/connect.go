package upstream

import (
	"context"
	"errors"
	"net"
	"net/http"
	"slices"
	"time"

	"github.com/berth-dev/berth/shared/egress"
)

// connect asks p for a tunnel to t and gives what came behind its answer.
func (u *Upstreams) connect(ctx context.Context, p proxy, conn net.Conn, t egress.Target) ([]byte, *failure) {
	ctx, cancel := context.WithTimeout(ctx, u.timeouts.Answer)
	defer cancel()
	deadline, _ := ctx.Deadline()
	_ = conn.SetDeadline(deadline)
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	a, early, err := exchange(conn, connectRequest(t, p.auth))
	if !stop() { // also where the answer was quicker: that old deadline may come at any moment
		err = context.Cause(ctx)
	}
	if err != nil {
		return nil, p.noAnswer(err)
	}
	if failed := p.judge(a); failed != nil {
		return nil, failed
	}
	_ = conn.SetDeadline(time.Time{})
	return early, nil
}

func exchange(conn net.Conn, request []byte) (answer, []byte, error) {
	if _, err := conn.Write(request); err != nil {
		return answer{}, nil, err
	}
	return readAnswer(conn)
}

// connectRequest is RFC 9110 9.3.6; many proxies want a Host.
func connectRequest(t egress.Target, auth string) []byte {
	to := t.String()
	b := make([]byte, 0, 128+2*len(to)+len(auth))
	b = append(b, "CONNECT "+to+" HTTP/1.1\r\nHost: "+to+"\r\n"...)
	if auth != "" {
		b = append(b, "Proxy-Authorization: "+auth+"\r\n"...)
	}
	return append(b, "\r\n"...)
}

func (p proxy) noAnswer(err error) *failure {
	switch {
	case errors.Is(err, errAnswer):
		return &failure{because(egress.UpstreamError, err, "the answer of %s is not one of an HTTP proxy", p.called()), doubtful}
	case timedOut(err):
		return &failure{p.late(err), doubtful}
	}
	return &failure{because(egress.UpstreamError, err, "%s ended the connection without an answer", p.called()), doubtful}
}

// judge is nil for an answer of 2xx. A login that a provider refuses may be the
// place's fault: some answer 407 to a country they do not have.
func (p proxy) judge(a answer) *failure {
	switch {
	case a.status/100 == 2:
		return nil
	case slices.ContainsFunc(p.restricted, func(r Pattern) bool { return r.matches(a.status, a.header) }):
		return &failure{egress.Refuse(egress.TargetRestricted, "the provider of %s proxies does not serve this site", p.kind), restricted}
	case a.status == http.StatusProxyAuthRequired, a.tunnel && a.status == http.StatusUnauthorized: // tinyproxy's word for a wrong login
		return &failure{egress.Refuse(egress.ProxyAuthFailed, "%s refused the user name or password", p.called()), doubtful}
	case a.status >= 500:
		return &failure{egress.Refuse(egress.UpstreamError, "%s answered with status %d", p.called(), a.status), doubtful}
	}
	return &failure{egress.Refuse(egress.UpstreamError, "%s answered with status %d", p.called(), a.status), fine}
}
