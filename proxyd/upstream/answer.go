package upstream

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/textproto"
	"slices"
	"strconv"
)

// maxAnswer bounds the head of a proxy's answer, bytes: squid's largest is 64 KiB.
const maxAnswer = 64 << 10

// maxInterim is how many 1xx answers may come before the answer.
const maxInterim = 8

var errAnswer = errors.New("not an HTTP answer")

// answer is the head of an answer.
type answer struct {
	status int
	header http.Header // for answers other than 2xx
	tunnel bool        // to CONNECT: surely the proxy's own
}

// readAnswer reads the head of an answer to CONNECT and gives what came behind
// it: of a 2xx answer those are the site's first bytes, whatever length the head
// claims (RFC 9110 9.3.6). Interim answers are passed over (RFC 9110 15.2).
func readAnswer(r io.Reader) (a answer, early []byte, err error) {
	buf := make([]byte, 0, 1024)
	for interim := 0; ; {
		if end := headEnd(buf); end > maxAnswer {
			return a, nil, errAnswer
		} else if end > 0 {
			if a, err = parseAnswer(buf[:end]); err != nil {
				return a, nil, err
			}
			buf = buf[end:]
			if a.status >= 200 {
				return a, buf, nil
			}
			if interim++; a.status == http.StatusSwitchingProtocols || interim > maxInterim {
				return a, nil, errAnswer
			}
			continue
		}
		if len(buf) >= maxAnswer || !bytes.HasPrefix(buf, []byte("HTTP/1.")[:min(len(buf), 7)]) {
			return a, nil, errAnswer
		}
		buf = slices.Grow(buf, 1)
		n, err := r.Read(buf[len(buf):cap(buf)])
		if buf = buf[:len(buf)+n]; n == 0 && err != nil {
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return a, nil, err
		}
	}
}

// headEnd is where the bytes behind the head's empty line begin, 0 when that is
// not there yet. A lone LF ends a line too (RFC 9112 2.2).
func headEnd(b []byte) int {
	for at := 0; ; {
		i := bytes.IndexByte(b[at:], '\n')
		if i < 0 {
			return 0
		}
		at += i + 1
		rest := b[at:]
		if bytes.HasPrefix(rest, []byte("\n")) {
			return at + 1
		}
		if bytes.HasPrefix(rest, []byte("\r\n")) {
			return at + 2
		}
	}
}

// parseAnswer reads a whole head. Fields matter only where the answer is a refusal.
func parseAnswer(head []byte) (answer, error) {
	line, rest, _ := bytes.Cut(head, []byte("\n"))
	line = bytes.TrimSuffix(line, []byte("\r"))
	// HTTP/1.x SP three digits, then SP and a reason, or nothing.
	if len(line) < len("HTTP/1.1 200") || string(line[:7]) != "HTTP/1." || line[8] != ' ' || len(line) > 12 && line[12] != ' ' {
		return answer{}, errAnswer
	}
	status, err := strconv.ParseUint(string(line[9:12]), 10, 16)
	if err != nil || status < 100 || status > 599 {
		return answer{}, errAnswer
	}
	a := answer{status: int(status), tunnel: true}
	if status/100 == 2 {
		return a, nil
	}
	// What is wrong in the fields changes nothing: this is no tunnel.
	fields, _ := textproto.NewReader(bufio.NewReader(bytes.NewReader(rest))).ReadMIMEHeader()
	a.header = http.Header(fields)
	return a, nil
}
