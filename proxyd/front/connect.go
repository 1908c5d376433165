package front

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/berth-dev/berth/shared/egress"
)

// maxHead bounds the head of a request, bytes.
const maxHead = 64 << 10

// connect serves CONNECT (RFC 9110 9.3.6) as a connection's first request, the
// way of nearly all browser traffic: no net/http, no goroutine more.
func (s *Server) connect(c *client) {
	text, err := readConnect(c.r)
	if err != nil {
		c.Close()
		return
	}
	s.tunnel(c, text, nil)
}

// tunnel connects to a target and relays until the end; it closes c. ahead is
// what somebody else read of the client's bytes behind the request.
func (s *Server) tunnel(c *client, text string, ahead []byte) {
	upstream, err := s.connectTo(c, func() (egress.Target, *egress.Refusal) { return egress.ParseTarget(text) })
	if err != nil {
		writeRefusal(c, err)
		c.lingerClose()
		return
	}
	if _, err := io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		upstream.Close()
		c.Close()
		return
	}
	s.relay(c, upstream, ahead)
	c.Close()
}

var errHead = errors.New("not a CONNECT request")

// readConnect reads the request up to its empty line and gives the target.
// Header fields are for the proxy alone and none of them matters.
func readConnect(r *bufio.Reader) (target string, err error) {
	line, err := r.ReadSlice('\n')
	if err != nil && !errors.Is(err, bufio.ErrBufferFull) {
		return "", err
	}
	method, rest, _ := strings.Cut(strings.TrimRight(string(line), "\r\n"), " ")
	target, version, _ := strings.Cut(rest, " ")
	tooLong := err != nil // a target that fills the buffer; ParseTarget refuses it
	if method != "CONNECT" || !tooLong && version != "HTTP/1.1" && version != "HTTP/1.0" {
		return "", errHead
	}
	read, start := len(line), err == nil
	for {
		line, err := r.ReadSlice('\n')
		full := errors.Is(err, bufio.ErrBufferFull)
		if err != nil && !full {
			return "", err
		}
		if read += len(line); read > maxHead {
			return "", errHead
		}
		if text := strings.TrimRight(string(line), "\r\n"); start && text == "" && !full {
			return target, nil
		}
		start = !full // the next slice begins a line
	}
}

// statuses are the HTTP statuses of refusals.
var statuses = map[egress.Reason]int{
	egress.BadTarget:           http.StatusForbidden,
	egress.PortBlocked:         http.StatusForbidden,
	egress.TooManyConnections:  http.StatusServiceUnavailable,
	egress.UpstreamUnreachable: http.StatusBadGateway,
	egress.UpstreamTimeout:     http.StatusGatewayTimeout,
}

// writeRefusal answers CONNECT with a refusal; the connection closes after it.
func writeRefusal(w io.Writer, err error) {
	var r *egress.Refusal
	if !errors.As(err, &r) {
		return
	}
	status, body := statuses[r.Reason], r.Detail+"\n"
	_, _ = fmt.Fprintf(w, "HTTP/1.1 %d %s\r\n%s: %s\r\nContent-Type: text/plain; charset=utf-8\r\n"+
		"Content-Length: %d\r\nConnection: close\r\n\r\n%s",
		status, http.StatusText(status), egress.ReasonHeader, r.Reason, len(body), body)
}
