package egress

import (
	"encoding/json"
	"io"
	"net"
	"testing"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/event"
)

// reasons are those that a session's network events give so far.
func reasons(t *testing.T, c *testenv.Client, id string) (out []string) {
	t.Helper()
	for _, e := range c.Events(id) {
		var data struct{ ProxyError string }
		if e.Type == event.Network && json.Unmarshal(e.Data, &data) == nil && data.ProxyError != "" {
			out = append(out, data.ProxyError)
		}
	}
	return out
}

// answering is a proxy on a port of a web host that answers always the same and
// ends the connection; with no answer it is silent until its client leaves.
func answering(t *testing.T, web *site, port int, answer string) {
	t.Helper()
	ln := web.Listen(t, port)
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			go answerOnce(conn, answer)
		}
	}()
}

func answerOnce(conn net.Conn, answer string) {
	defer conn.Close()
	buf := make([]byte, 4096)
	_, _ = conn.Read(buf)
	_, _ = io.WriteString(conn, answer)
	_, _ = io.Copy(io.Discard, conn)
}
