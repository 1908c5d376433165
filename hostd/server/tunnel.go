package server

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
)

// writeTime is what a reader of a stream has to take a line in; after it the
// connection counts as dead, long before TCP would say so.
const writeTime = 30 * time.Second

// lines writes NDJSON, each line sent at once.
type lines struct {
	w   http.ResponseWriter
	enc *json.Encoder
	ctl *http.ResponseController
}

func newLines(w http.ResponseWriter) lines {
	w.Header().Set("Content-Type", "application/x-ndjson")
	l := lines{w, json.NewEncoder(w), http.NewResponseController(w)}
	_ = l.ctl.Flush() // the head, so that the caller knows the stream stands
	return l
}

func (l lines) line(v any) error {
	l.hurry()
	if err := l.enc.Encode(v); err != nil {
		return err
	}
	return l.ctl.Flush()
}

func (l lines) blank() error {
	l.hurry()
	if _, err := io.WriteString(l.w, "\n"); err != nil {
		return err
	}
	return l.ctl.Flush()
}

// done leaves the connection to other requests.
func (l lines) done() { _ = l.ctl.SetWriteDeadline(time.Time{}) }

func (l lines) hurry() {
	_ = l.ctl.SetWriteDeadline(time.Now().Add(writeTime)) // unsupported only by tests' recorders
}

// tunnel joins the gateway's connection and one to the session's agent. Both
// are bare sockets then, so that the kernel may splice between them. A stop of
// hostd does not cut it: the machine lives on, so the tunnel ends with the
// process, as late as can be, and the session link resumes over the next one.
func (s *Server) tunnel(w http.ResponseWriter, r *http.Request) error {
	if r.Header.Get("Upgrade") != hostlink.TunnelProtocol {
		return apierr.New(apierr.InvalidRequest, "upgrade: must be %s", hostlink.TunnelProtocol)
	}
	epoch, err := strconv.ParseUint(r.FormValue("epoch"), 10, 64)
	if err != nil {
		return apierr.Wrap(err, apierr.InvalidRequest, "epoch: must be a number")
	}
	agent, done, err := s.sessions.Tunnel(r.Context(), r.PathValue("id"), epoch)
	if err != nil {
		return err
	}
	defer done()
	conn, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return fmt.Errorf("tunnel: %w", err)
	}
	defer conn.Close()
	if _, err := fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", hostlink.TunnelProtocol); err != nil {
		return nil // the gateway is gone
	}
	if n := buffered.Reader.Buffered(); n > 0 {
		if _, err := io.CopyN(agent, buffered.Reader, int64(n)); err != nil {
			return nil
		}
	}
	join(conn, agent)
	return nil
}

// join copies both ways until both directions have ended. A direction's end is
// passed on as a half close, a failure cuts both.
func join(a, b net.Conn) {
	var both sync.WaitGroup
	both.Add(2)
	pass := func(dst, src net.Conn) {
		defer both.Done()
		if _, err := io.Copy(dst, src); err != nil {
			a.Close()
			b.Close()
			return
		}
		if half, ok := dst.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite() // already closed: the other direction saw why
		}
	}
	go pass(a, b)
	go pass(b, a)
	both.Wait()
}
