package e2e

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/ws"
)

// terminal is one client of a terminal WebSocket.
type terminal struct {
	t    testing.TB
	conn *ws.Conn
	done chan struct{} // closed with the connection; err is set then

	mu  sync.Mutex
	out strings.Builder // guarded by mu
	err error
}

func openTerminal(t *testing.T, env *testenv.Env, url string) *terminal {
	t.Helper()
	conn, err := ws.Dial(within(t, 20*time.Second), strings.Replace(env.BaseURL, "http://", "ws://", 1)+url)
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{t: t, conn: conn, done: make(chan struct{})}
	go func() {
		defer close(x.done)
		for {
			kind, b, err := conn.Read(context.Background())
			if err != nil {
				x.err = err
				return
			}
			if kind != ws.Binary {
				t.Errorf("a text frame: %s", b)
			}
			x.mu.Lock()
			x.out.Write(b)
			x.mu.Unlock()
		}
	}()
	t.Cleanup(func() { conn.CloseNow(); <-x.done })
	return x
}

func (x *terminal) send(f testenv.Fields) {
	x.t.Helper()
	b, _ := json.Marshal(f) // strings and numbers
	if err := x.conn.Write(within(x.t, 10*time.Second), ws.Text, b); err != nil {
		x.t.Fatal(err)
	}
}

func (x *terminal) input(s string) { x.t.Helper(); x.send(testenv.Fields{"type": "input", "data": s}) }

func (x *terminal) shows(text string) {
	x.t.Helper()
	testenv.Wait(x.t, 15*time.Second, "the terminal shows "+text, func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return strings.Contains(x.out.String(), text)
	})
}

func TestTerminal(t *testing.T) {
	env := stack.Start(t)
	c := env.Client(t, "Scale")
	s := c.Shell()
	x := openTerminal(t, env, *s.TerminalUrl)
	x.send(testenv.Fields{"type": "resize", "cols": 101, "rows": 33})
	x.input("stty size; pwd; echo tty=$(tty) $((40+2))\r")
	x.shows("33 101")
	x.shows("/workspace")
	x.shows("tty=/dev/pts/")
	x.input("echo now''sleeping; sleep 1000\r")
	x.shows("nowsleeping")
	x.input("\x03") // Ctrl-C reaches the program in front
	x.input("echo after=$?\r")
	x.shows("after=130")
	x.conn.CloseNow()
	<-x.done

	again := openTerminal(t, env, *s.TerminalUrl)
	again.shows("after=130") // the screen is replayed
	second := openTerminal(t, env, *s.TerminalUrl)
	again.input("echo both-$((1+1))\r")
	again.shows("both-2")
	second.shows("both-2")
	again.input("exit 5\r")
	for _, x := range []*terminal{again, second} {
		select {
		case <-x.done:
			if ws.CloseStatus(x.err) != ws.StatusNormal || !strings.Contains(x.err.Error(), "exit:5") {
				t.Errorf("closed with %v, want 1000 exit:5", x.err)
			}
		case <-time.After(10 * time.Second):
			t.Fatal("exit left the terminal open")
		}
	}
	openTerminal(t, env, *s.TerminalUrl).input("echo new\r")
}
