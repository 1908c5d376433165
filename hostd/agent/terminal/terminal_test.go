package terminal

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/hostd/agent/account"
	"github.com/berth-dev/berth/shared/ws"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a terminal behind a real server.
type rig struct {
	*Terminal
	t   *testing.T
	url string
}

func newRig(t *testing.T, stall time.Duration) *rig {
	t.Helper()
	who := account.Current()
	dir := t.TempDir()
	if os.Getuid() == 0 {
		who = account.Account{Name: "user", Home: "/", UID: 1000, GID: 1000}
		dir = "/"
	}
	term := New(Config{Account: who, Workspace: dir, Stall: stall})
	server := httptest.NewServer(term)
	t.Cleanup(func() {
		term.Close()
		server.Close()
	})
	return &rig{term, t, strings.Replace(server.URL, "http", "ws", 1)}
}

// user is a client of the terminal and what it has seen.
type user struct {
	t    *testing.T
	conn *ws.Conn
	seen strings.Builder
}

func (r *rig) connect() *user {
	r.t.Helper()
	conn, err := ws.Dial(r.t.Context(), r.url)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.CloseNow() })
	return &user{t: r.t, conn: conn}
}

func (u *user) send(text string) {
	u.t.Helper()
	if err := u.conn.Write(u.t.Context(), ws.Text, []byte(text)); err != nil {
		u.t.Fatal(err)
	}
}

func (u *user) input(text string) {
	u.t.Helper()
	data, _ := json.Marshal(text)
	u.send(`{"type":"input","data":` + string(data) + `}`)
}

// sees reads until what was seen contains text.
func (u *user) sees(text string) {
	u.t.Helper()
	ctx, cancel := context.WithTimeout(u.t.Context(), 30*time.Second)
	defer cancel()
	for !strings.Contains(u.seen.String(), text) {
		kind, p, err := u.conn.Read(ctx)
		if err != nil || kind != ws.Binary {
			u.t.Fatalf("waiting for %q: %v, %v; seen %q", text, kind, err, u.seen.String())
		}
		u.seen.Write(p)
	}
}

// closes reads until the close and checks it.
func (u *user) closes(code ws.StatusCode, reason string) {
	u.t.Helper()
	ctx, cancel := context.WithTimeout(u.t.Context(), 30*time.Second)
	defer cancel()
	for {
		_, p, err := u.conn.Read(ctx)
		if err == nil {
			u.seen.Write(p)
			continue
		}
		if ws.CloseStatus(err) != code || !strings.Contains(err.Error(), reason) {
			u.t.Errorf("closed with %v, want %d %q", err, code, reason)
		}
		return
	}
}

func TestTerminal(t *testing.T) {
	r := newRig(t, 0)
	r.SetEnv(map[string]string{"MINE": "own"})
	u := r.connect()
	u.input("PS1=; stty -echo; echo \"<$TERM $MINE $(stty size) $(tty | cut -d/ -f3) $(id -u)>\"\n")
	u.sees(fmt.Sprintf("<xterm-256color own 24 80 pts %d>", r.cfg.Account.UID))
	u.send(`{"type":"resize","cols":123,"rows":45}`)
	u.input("echo \"<$(stty size)>\"; echo ok >$(tty)\n")
	u.sees("<45 123>")
	u.sees("ok")
	// One process tells and then sleeps: told, it has the terminal, and not bash.
	u.input("sh -c 'echo go-$((1+1)); exec sleep 1000'\n")
	u.sees("go-2")
	u.input("\x03")
	u.input("echo after $((6*7)) ünï\n")
	u.sees("after 42 ünï")
}

func TestSharedAndReplayed(t *testing.T) {
	r := newRig(t, 0)
	a := r.connect()
	a.input("PS1=; stty -echo; x=kept; seq -f 'line %g' 20000; echo mark-$((1+1))\n")
	a.sees("mark-2")
	b := r.connect()
	b.sees("mark-2")
	if n := b.seen.Len(); n > replaySize+200 || n < replaySize-200 {
		t.Errorf("replay of %d bytes", n)
	}
	b.input("echo both-$((2+2))\n")
	a.sees("both-4")
	b.sees("both-4")
	a.conn.CloseNow()
	b.conn.CloseNow()
	c := r.connect()
	c.input("echo $x-$((3+3))\n")
	c.sees("kept-6")
}

func TestExit(t *testing.T) {
	r := newRig(t, 0)
	a, b := r.connect(), r.connect()
	a.input("x=old; sleep 5 & echo bye; exit 3\n")
	a.closes(ws.StatusNormal, "exit:3")
	b.closes(ws.StatusNormal, "exit:3")
	if !strings.Contains(b.seen.String(), "bye") {
		t.Errorf("output before the exit is lost: %q", b.seen.String())
	}
	c := r.connect()
	c.input("echo \"<${x-new}>\"\n")
	c.sees("<new>")
	c.input("kill -9 $$\n")
	c.closes(ws.StatusNormal, "exit:137")
}

func TestBadFrames(t *testing.T) {
	r := newRig(t, 0)
	for text, reason := range map[string]string{
		"no json":                                "JSON object",
		`{"type":"dance"}`:                       "type must be input or resize",
		`{"type":"input"}`:                       "data must be a string",
		`{"type":"input","data":5}`:              "JSON object",
		`{"type":"resize","cols":0,"rows":5}`:    "1 to 1000",
		`{"type":"resize","cols":80}`:            "1 to 1000",
		`{"type":"resize","cols":1001,"rows":5}`: "1 to 1000",
	} {
		u := r.connect()
		u.send(text)
		u.closes(ws.StatusUnsupported, reason)
	}
	u := r.connect()
	if err := u.conn.Write(t.Context(), ws.Binary, []byte(`{"type":"input","data":"x"}`)); err != nil {
		t.Fatal(err)
	}
	u.closes(ws.StatusUnsupported, "text frames")
}

// TestSlowClient: one that reads nothing holds the others up for stall at
// most, and alone it only stops the program.
func TestSlowClient(t *testing.T) {
	r := newRig(t, 300*time.Millisecond)
	slow, quick := r.connect(), r.connect()
	quick.input("PS1=; stty -echo; head -c 40000000 /dev/zero | tr '\\0' x; echo; echo end-$((1+1))\n")
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for tail := ""; !strings.Contains(tail, "end-2"); {
		_, p, err := quick.conn.Read(ctx)
		if err != nil {
			t.Fatalf("the quick client: %v", err)
		}
		tail = (tail + string(p))
		tail = tail[max(0, len(tail)-100):]
	}
	slow.conn.CloseNow()
}

func TestClose(t *testing.T) {
	r := newRig(t, 0)
	u := r.connect()
	u.input("echo on-$((1+1))\n")
	u.sees("on-2")
	go r.Close()
	u.closes(ws.StatusGoingAway, "closing")
	if _, err := ws.Dial(t.Context(), r.url); err == nil || !strings.Contains(err.Error(), "503") {
		t.Errorf("connect after Close: %v", err)
	}
}

func FuzzFrame(f *testing.F) {
	f.Add([]byte(`{"type":"input","data":"x"}`))
	f.Add([]byte(`{"type":"resize","cols":80,"rows":24}`))
	f.Fuzz(func(t *testing.T, p []byte) {
		frame, err := parseFrame(ws.Text, p)
		switch {
		case err != nil:
			if len(err.Error()) > 123 {
				t.Errorf("reason too long for a close frame: %q", err)
			}
		case frame.Type == "input" && frame.Data == nil, frame.Type == "resize" && (!size(*frame.Cols) || !size(*frame.Rows)):
			t.Errorf("accepted %q", p)
		}
	})
}

// A terminal has the proxy that was there when it began; the next one has
// today's.
func TestTerminalAndProxy(t *testing.T) {
	r := newRig(t, 0)
	r.SetEnv(map[string]string{"http_proxy": "given"})
	r.SetProxy(true)
	u := r.connect()
	u.input("PS1=; stty -echo; echo \"<$HTTPS_PROXY $http_proxy>\"\n")
	u.sees("<http://169.254.77.1:78 given>")
	r.SetProxy(false)
	u.input("echo \"<still $HTTPS_PROXY>\"; exit\n")
	u.sees("<still http://169.254.77.1:78>")
	u.closes(ws.StatusNormal, "exit:0")
	u = r.connect()
	u.input("PS1=; stty -echo; echo \"<now ${HTTPS_PROXY-none}>\"\n")
	u.sees("<now none>")
}
