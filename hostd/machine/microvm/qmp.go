package microvm

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// monitor is a connection to QEMU's control socket (QEMU, docs/interop/qmp-spec.txt).
// QEMU serves one client at a time: whoever connects later waits until the
// earlier one has left. Safe for concurrent use; one command runs at a time.
type monitor struct {
	conn    *net.UnixConn
	turn    chan struct{} // holds one token: whoever has it may write and wait
	answers chan answer   // of the command under way, from read
	closed  chan struct{} // closed by close
	ended   chan struct{} // closed when the connection is over
	close   func() error
}

type answer struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event string `json:"event"`
	ID    string `json:"id"`
}

// maxAnswer bounds one line from QEMU, which is in the guest's reach.
const maxAnswer = 1 << 20

// openMonitor takes the connection over and greets. On error it is closed.
func openMonitor(ctx context.Context, conn *net.UnixConn) (*monitor, error) {
	m := &monitor{conn: conn, turn: make(chan struct{}, 1), answers: make(chan answer), ended: make(chan struct{}),
		closed: make(chan struct{})}
	m.close = sync.OnceValue(func() error { close(m.closed); return conn.Close() })
	m.turn <- struct{}{}
	go m.read()
	if err := m.do(ctx, "qmp_capabilities", nil, nil); err != nil {
		return nil, errors.Join(err, m.Close())
	}
	return m, nil
}

// Close ends the connection and waits for its reader.
func (m *monitor) Close() error {
	err := m.close()
	<-m.ended
	return err
}

// read passes answers on. QEMU's greeting and events are dropped: state is
// asked for, since events of the time before a connection are lost anyway.
func (m *monitor) read() {
	defer close(m.ended)
	lines := bufio.NewScanner(m.conn)
	lines.Buffer(make([]byte, 4096), maxAnswer)
	for lines.Scan() {
		var a answer
		if json.Unmarshal(lines.Bytes(), &a) != nil {
			break // QEMU speaks JSON or is not QEMU any more
		}
		if a.Return == nil && a.Error == nil {
			continue
		}
		select {
		case m.answers <- a:
		case <-m.closed:
			return
		}
	}
}

var errMonitor = errors.New("QEMU has closed its control socket")

// do runs one command and decodes its result into out, which may be nil. Files
// go along as descriptors (add-fd). After an error of the context the
// connection is not used again: its answers would be another command's.
func (m *monitor) do(ctx context.Context, command string, args, out any, files ...*os.File) error {
	select {
	case <-m.turn:
	case <-ctx.Done():
		return fmt.Errorf("%s: %w", command, context.Cause(ctx))
	}
	defer func() { m.turn <- struct{}{} }()
	a, err := m.exchange(ctx, command, args, files)
	if err != nil {
		return fmt.Errorf("%s: %w", command, err)
	}
	if a.Error != nil {
		return fmt.Errorf("%s: QEMU: %s", command, a.Error.Desc)
	}
	if out != nil {
		if err := json.Unmarshal(a.Return, out); err != nil {
			return fmt.Errorf("%s: %w", command, err)
		}
	}
	return nil
}

func (m *monitor) exchange(ctx context.Context, command string, args any, files []*os.File) (answer, error) {
	id := newID()
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
		ID        string `json:"id"`
	}{command, args, id})
	if err != nil {
		return answer{}, err
	}
	if err := m.send(ctx, append(line, '\n'), files); err != nil {
		_ = m.close() // half a command may be out
		return answer{}, err
	}
	for {
		select {
		case a := <-m.answers:
			// QEMU gives a client also the answer that an earlier one did not wait for.
			if a.ID == id {
				return a, nil
			}
		case <-m.ended:
			return answer{}, errMonitor
		case <-ctx.Done():
			_ = m.close()
			return answer{}, context.Cause(ctx)
		}
	}
}

func (m *monitor) send(ctx context.Context, line []byte, files []*os.File) error {
	var fds []int
	for _, f := range files {
		fds = append(fds, int(f.Fd()))
	}
	var rights []byte
	if len(fds) > 0 {
		rights = unix.UnixRights(fds...)
	}
	deadline, _ := ctx.Deadline() // zero: none
	if err := m.conn.SetWriteDeadline(deadline); err != nil {
		return err
	}
	n, _, err := m.conn.WriteMsgUnix(line, rights, nil)
	if err == nil && n < len(line) {
		err = io.ErrShortWrite
	}
	return err
}

// status is QEMU's run state: "running", "paused", "inmigrate", "prelaunch", ...
func (m *monitor) status(ctx context.Context) (string, error) {
	var s struct {
		Status string `json:"status"`
	}
	err := m.do(ctx, "query-status", nil, &s)
	return s.Status, err
}

// load reads devices' state from a file that QEMU has as descriptor fd, and
// returns when it is in place.
func (m *monitor) load(ctx context.Context, fd int) error {
	if err := m.do(ctx, "migrate-incoming", map[string]string{"uri": fmt.Sprintf("fd:%d", fd)}, nil); err != nil {
		return err
	}
	for wait := time.Millisecond; ; wait = min(2*wait, 20*time.Millisecond) {
		var q struct {
			Status string `json:"status"`
			Desc   string `json:"error-desc"`
		}
		if err := m.do(ctx, "query-migrate", nil, &q); err != nil {
			return err
		}
		switch q.Status {
		case "completed":
			return nil
		case "failed":
			return fmt.Errorf("load devices' state: QEMU: %s", q.Desc)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("load devices' state: %w", context.Cause(ctx))
		case <-time.After(wait):
		}
	}
}

// saveDevices writes the state of all devices, without memory, into a file that
// it makes anew. The machine must be stopped. Despite the command's name it
// needs no Xen; with live a second call would abort QEMU.
func (m *monitor) saveDevices(ctx context.Context, path string) error {
	// QEMU takes a descriptor with just the rights that it opens a path with.
	f, err := os.OpenFile(path, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer f.Close()
	set, err := m.addFile(ctx, f)
	if err != nil {
		return err
	}
	err = m.do(ctx, "xen-save-devices-state", map[string]any{"filename": fdset(set), "live": false}, nil)
	return errors.Join(err, m.do(ctx, "remove-fd", map[string]any{"fdset-id": set}, nil))
}

// addFile gives QEMU a file and returns the number of its set.
func (m *monitor) addFile(ctx context.Context, f *os.File) (int, error) {
	var set struct {
		ID int `json:"fdset-id"`
	}
	err := m.do(ctx, "add-fd", nil, &set, f)
	return set.ID, err
}

// fdset is the file name under which QEMU knows files it was given: it opens
// none by itself, and there is none in its root that it could open.
func fdset(n int) string { return fmt.Sprintf("/dev/fdset/%d", n) }
