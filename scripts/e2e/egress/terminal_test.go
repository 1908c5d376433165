package egress

import (
	"context"
	"encoding/json"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/scripts/testenv"
	"github.com/berth-dev/berth/shared/api"
	"github.com/berth-dev/berth/shared/ws"
)

// terminal is an open terminal of a session.
type terminal struct {
	t    *testing.T
	conn *ws.Conn

	mu   sync.Mutex
	said strings.Builder // guarded by mu
}

func openTerminal(t *testing.T, env *testenv.Env, s api.Session) *terminal {
	t.Helper()
	conn, err := ws.Dial(within(t, time.Minute), strings.Replace(env.BaseURL, "http://", "ws://", 1)+*s.TerminalUrl)
	if err != nil {
		t.Fatal(err)
	}
	x := &terminal{t: t, conn: conn}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			_, b, err := conn.Read(context.Background())
			if err != nil {
				return
			}
			x.mu.Lock()
			x.said.Write(b)
			x.mu.Unlock()
		}
	}()
	t.Cleanup(func() { conn.CloseNow(); <-done })
	return x
}

func (x *terminal) enter(line string) {
	x.t.Helper()
	b, _ := json.Marshal(testenv.Fields{"type": "input", "data": line + "\r"}) // texts
	if err := x.conn.Write(within(x.t, time.Minute), ws.Text, b); err != nil {
		x.t.Fatal(err)
	}
}

func (x *terminal) wait(text string) {
	x.t.Helper()
	testenv.Wait(x.t, 30*time.Second, "the terminal says "+text, func() bool {
		x.mu.Lock()
		defer x.mu.Unlock()
		return strings.Contains(x.said.String(), text)
	})
}
