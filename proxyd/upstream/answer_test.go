package upstream

import (
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

func TestReadAnswer(t *testing.T) {
	for name, c := range map[string]struct {
		wire   string
		status int // 0: refused
		early  string
	}{
		"usual":                 {"HTTP/1.1 200 Connection established\r\n\r\n", 200, ""},
		"1.0, no reason":        {"HTTP/1.0 200\r\n\r\n", 200, ""},
		"fields, early bytes":   {"HTTP/1.1 200 OK\r\nVia: x\r\nContent-Length: 3\r\n\r\nabcdef", 200, "abcdef"}, // the length means nothing
		"chunked means nothing": {"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nSSH-2.0", 200, "SSH-2.0"},
		"lone line feeds":       {"HTTP/1.1 200 OK\nA: b\n\nearly", 200, "early"},
		"early line ends":       {"HTTP/1.1 200 OK\r\n\r\n\r\n\r\n", 200, "\r\n\r\n"},
		"201":                   {"HTTP/1.1 201 Made\r\n\r\n", 201, ""},
		"interim":               {"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\n\r\nz", 200, "z"},
		"refusal":               {"HTTP/1.1 403 Forbidden\r\nX-Error: no\r\n\r\nbody", 403, "body"},
		"refusal, odd fields":   {"HTTP/1.1 407 x\r\n: :\r\n\r\n", 407, ""},
		"endless interim":       {strings.Repeat("HTTP/1.1 100 Continue\r\n\r\n", 20), 0, ""},
		"upgrade":               {"HTTP/1.1 101 Switching Protocols\r\n\r\n", 0, ""},
		"another protocol":      {"SSH-2.0-OpenSSH_9.2\r\n\r\n", 0, ""},
		"HTTP/2":                {"HTTP/2 200\r\n\r\n", 0, ""},
		"no status":             {"HTTP/1.1 OK\r\n\r\n", 0, ""},
		"status of four digits": {"HTTP/1.1 2000 OK\r\n\r\n", 0, ""},
		"status 099":            {"HTTP/1.1 099 OK\r\n\r\n", 0, ""},
		"status +20":            {"HTTP/1.1 +20 OK\r\n\r\n", 0, ""},
		"too long":              {"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", maxAnswer) + "\r\n\r\n", 0, ""},
		"cut":                   {"HTTP/1.1 200 OK\r\n", 0, ""},
		"nothing":               {"", 0, ""},
	} {
		for _, r := range []io.Reader{strings.NewReader(c.wire), iotest.OneByteReader(strings.NewReader(c.wire)), iotest.DataErrReader(strings.NewReader(c.wire))} {
			a, early, err := readAnswer(r)
			if c.status == 0 {
				if err == nil || !errors.Is(err, errAnswer) && !errors.Is(err, io.ErrUnexpectedEOF) {
					t.Errorf("%s: %+v %v", name, a, err)
				}
				continue
			}
			rest, _ := io.ReadAll(r)
			if err != nil || a.status != c.status || string(early)+string(rest) != c.early {
				t.Errorf("%s: %+v %q %q %v", name, a, early, rest, err)
			}
		}
	}
	a, _, err := readAnswer(strings.NewReader("HTTP/1.1 403 Forbidden\r\nX-Error: no\r\nx-error: really\r\n\r\n"))
	if err != nil || len(a.header.Values("X-Error")) != 2 {
		t.Errorf("%+v %v", a, err)
	}
}

// However the bytes come, the answer and what follows it are the same.
func FuzzReadAnswer(f *testing.F) {
	f.Add([]byte("HTTP/1.1 200 OK\r\nA: b\r\n\r\nearly"))
	f.Add([]byte("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.0 407\n\nx"))
	f.Fuzz(func(t *testing.T, wire []byte) {
		whole, slow := bytes.NewReader(wire), iotest.OneByteReader(bytes.NewReader(wire))
		a, early, err := readAnswer(whole)
		b, begin, slowErr := readAnswer(slow)
		if (err == nil) != (slowErr == nil) || a.status != b.status && err == nil {
			t.Fatalf("%+v %v, byte by byte %+v %v", a, err, b, slowErr)
		}
		if err != nil {
			return
		}
		rest, _ := io.ReadAll(whole)
		slowRest, _ := io.ReadAll(slow)
		if !bytes.Equal(append(early, rest...), append(begin, slowRest...)) {
			t.Fatal("bytes behind the answer were lost")
		}
		if a.status < 200 || a.status > 599 {
			t.Fatalf("status %d", a.status)
		}
	})
}
