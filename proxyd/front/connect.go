package front

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"github.com/berth-dev/berth/shared/egress"
)

// maxHead bounds the head of a request, bytes.
const maxHead = 64 << 10

// connect serves CONNECT (RFC 9110 9.3.6) as a connection's first request where
// a loop could not: of a session's first connection, or when it came in pieces.
func (s *Server) connect(c *client) {
	text, err := readConnect(c.r)
	switch {
	case errors.Is(err, errHead):
		writeAnswer(c, http.StatusBadRequest, "", "this is no CONNECT request that can be read")
	case errors.Is(err, errLong):
		writeAnswer(c, http.StatusRequestHeaderFieldsTooLarge, "", "the request's head is too long")
	case err != nil:
		c.Close()
		return
	default:
		s.tunnel(c, text, nil)
		return
	}
	c.lingerClose()
}

// established is the answer to CONNECT.
const established = "HTTP/1.1 200 Connection established\r\n\r\n"

// tunnel connects to a target and relays until the end; it closes c. ahead is
// what somebody else read of the client's bytes behind the request.
func (s *Server) tunnel(c *client, text string, ahead []byte) {
	w, r := s.reach(c, http.MethodConnect, text, func() (egress.Target, *egress.Refusal) { return egress.ParseTarget(text) })
	if r != nil {
		c.answer(r)
		return
	}
	s.carry(c, w, ahead)
}

// carry answers a CONNECT whose connection is made, relays and closes.
func (s *Server) carry(c *client, w way, ahead []byte) {
	w.flow.Down(int64(len(w.early)))
	if _, err := c.Write(append([]byte(established), w.early...)); err != nil {
		w.conn.Close()
		c.Close()
		return
	}
	s.relay(c, w, ahead)
	c.Close()
}

var (
	errHead = errors.New("not a CONNECT request")
	errLong = errors.New("a CONNECT request with too long a head")
)

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
			return "", errLong
		}
		if text := strings.TrimRight(string(line), "\r\n"); start && text == "" && !full {
			return target, nil
		}
		start = !full // the next slice begins a line
	}
}

// cutConnect reads a whole CONNECT request; rest is what follows it.
func cutConnect(b []byte) (target string, rest []byte, ok bool) {
	in := readers.Get().(*bufio.Reader)
	defer readers.Put(in)
	whole := bytes.NewReader(b)
	in.Reset(whole)
	defer in.Reset(nil)
	target, err := readConnect(in)
	return target, b[len(b)-whole.Len()-in.Buffered():], err == nil
}

// statuses are the HTTP statuses of refusals. None is 407: a browser would ask
// its user for a login.
var statuses = map[egress.Reason]int{
	egress.TargetRestricted:     http.StatusForbidden,
	egress.PortBlocked:          http.StatusForbidden,
	egress.ProxyNotPublic:       http.StatusForbidden,
	egress.ProxyAuthFailed:      http.StatusBadGateway,
	egress.ProxyTypeUnavailable: http.StatusServiceUnavailable,
	egress.UpstreamTimeout:      http.StatusGatewayTimeout,
	egress.UpstreamUnreachable:  http.StatusBadGateway,
	egress.UpstreamError:        http.StatusBadGateway,
	egress.TooManyConnections:   http.StatusServiceUnavailable,
	egress.BadTarget:            http.StatusForbidden,
	egress.BadRoute:             http.StatusBadGateway,
	egress.TokenInvalid:         http.StatusForbidden,
}

// answer answers CONNECT with a refusal and closes.
func (c *client) answer(r *egress.Refusal) {
	writeAnswer(c, statuses[r.Reason], r.Reason, r.Detail)
	c.lingerClose()
}

// writeAnswer answers CONNECT with anything but 200; the connection closes after it.
func writeAnswer(w io.Writer, status int, reason egress.Reason, detail string) {
	field := ""
	if reason != "" {
		field = egress.ReasonHeader + ": " + string(reason) + "\r\n"
	}
	_, _ = fmt.Fprintf(w, "HTTP/1.1 %d %s\r\n%sContent-Type: text/plain; charset=utf-8\r\n"+
		"Content-Length: %d\r\nConnection: close\r\n\r\n%s\n",
		status, http.StatusText(status), field, len(detail)+1, detail)
}
