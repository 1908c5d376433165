package api

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"

	"github.com/berth-dev/berth/gateway/sessions"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/wsframe"
)

// book is the record of one session and what resumes it. The zero value knows
// no session.
type book struct {
	mu      sync.Mutex // guards what follows
	s       *session.Session
	changed chan struct{}
	seen    int          // how often it was watched since the last change
	awake   func() error // what Awake does to a session that is paused
	woken   int
}

func (b *book) set(status session.Status, op *session.Operation, memory bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := testView().Session
	s.Status, s.Op, s.Snapshot = status, op, &session.Snapshot{ID: "x", Memory: memory}
	b.s, b.seen = &s, 0
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}

func (b *book) runs()   { b.set(session.Running, nil, true) }
func (b *book) asleep() { b.set(session.Paused, nil, true) }
func (b *book) gone()   { b.set(session.Paused, nil, false) }

// operationTime is what an operation has until the leader undoes it.
const operationTime = 10 * time.Minute

func (b *book) open(kind session.OpKind) {
	status := session.Running
	if kind == session.Resume {
		status = session.Paused
	}
	b.set(status, &session.Operation{ID: "o", Kind: kind, Deadline: time.Now().Add(operationTime)}, true)
}

// rotated is what RotateURLs with disconnect does.
func (b *book) rotated() {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := *b.s
	s.URLKeyVersion++
	s.CutBelow, b.s = s.URLKeyVersion, &s
}

func (b *book) onAwake(f func() error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.awake = f
}

func (b *book) times() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.woken
}

func (b *book) watch() (session.Session, bool, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	if b.s == nil {
		return session.Session{}, false, b.changed
	}
	return *b.s, true, b.changed
}

func (f *fakeService) Watch(string) (session.Session, bool, <-chan struct{}) {
	defer f.book.saw()
	return f.book.watch()
}

func (b *book) saw() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.seen++
}

// noticed waits until every relay has seen the last change.
func (b *book) noticed() {
	for end := time.Now().Add(patience); time.Now().Before(end); time.Sleep(time.Millisecond) {
		b.mu.Lock()
		seen := b.seen
		b.mu.Unlock()
		if int64(seen) >= openSockets.Load() {
			return
		}
	}
}

func (f *fakeService) Awake(ctx context.Context, s session.Session) (session.Session, error) {
	for {
		now, ok, changed := f.book.watch()
		switch {
		case !ok:
			return s, nil
		case stands(now) == runs:
			return now, nil
		case stands(now) != held:
			f.book.mu.Lock()
			f.book.woken++
			awake := f.book.awake
			f.book.mu.Unlock()
			if awake == nil {
				return s, errors.New("nobody said what a resume does")
			}
			if err := awake(); err != nil {
				return s, err
			}
			continue
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return s, context.Cause(ctx)
		}
	}
}

// valve is a transport's way to the agent, which a machine that stands still
// closes. Streams over it are the session link's.
type valve struct {
	r     *rig
	mu    sync.Mutex // guards what follows
	agent *link.Listener
	shut  bool
	over  bool
	conns []net.Conn

	servers []func() // of the machines: what ends them
	done    sync.WaitGroup
}

// linked puts a session link between the gateway and the agent.
func (r *rig) linked(t *testing.T) *valve {
	v := &valve{r: r}
	v.machine("one")
	r.fake.link = func(ctx context.Context) (net.Conn, error) {
		return link.Dial(ctx, v.dial, link.Options{Place: func() (bool, <-chan struct{}) {
			s, ok, changed := r.fake.book.watch()
			return ok && stands(s) != runs, changed
		}})
	}
	t.Cleanup(v.end)
	return v
}

// machine makes another machine with the fake's agent in it.
func (v *valve) machine(lineage string) {
	var id [16]byte
	copy(id[:], lineage)
	l := link.Listen(link.Options{Lineage: id})
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { v.r.fake.agent.ServeHTTP(w, r) })}
	v.done.Go(func() { _ = srv.Serve(l) })
	v.mu.Lock()
	defer v.mu.Unlock()
	v.agent = l
	v.servers = append(v.servers, func() { _ = srv.Close(); _ = l.Close() })
}

// end ends the machines, and with them all streams: dialling fails for good.
func (v *valve) end() {
	v.mu.Lock()
	v.over = true
	v.mu.Unlock()
	v.stop()
	v.r.fake.book.runs()
	for _, end := range v.servers {
		end()
	}
	v.done.Wait()
}

var errValve = errors.New("the machine stands still")

// errOver ends a stream for good.
type errOver struct{ error }

func (errOver) Permanent() bool { return true }

func (v *valve) dial(context.Context) (net.Conn, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	switch {
	case v.over:
		return nil, errOver{errValve}
	case v.shut:
		return nil, errValve
	}
	near, far := net.Pipe()
	v.conns = append(v.conns, near)
	agent := v.agent
	v.done.Go(func() { agent.Serve(far) })
	return near, nil
}

// stop cuts what there is.
func (v *valve) stop() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.shut = true
	for _, c := range v.conns {
		c.Close()
	}
	v.conns = nil
}

func (v *valve) goOn() {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.shut = false
}

// freeze and thaw are what the gateway sees of an operation.
func (v *valve) freeze(kind session.OpKind) {
	v.r.fake.book.open(kind)
	v.r.fake.book.noticed()
	v.stop()
}

func (v *valve) thaw() {
	v.goOn()
	v.r.fake.book.runs()
}

// pinged sends a ping by hand and waits for its one pong.
func pinged(t *testing.T, c net.Conn, br *bufio.Reader, text string) {
	t.Helper()
	if _, err := c.Write(wsframe.AppendPing(nil, []byte(text), true)); err != nil {
		t.Fatal(err)
	}
	want := string(wsframe.AppendPong(nil, []byte(text), false))
	got := make([]byte, len(want))
	if _, err := io.ReadFull(br, got); err != nil || string(got) != want {
		t.Fatalf("%q for %q, %v", got, want, err)
	}
}

// A move with the memory is a pause and nothing else: what the client sends
// waits, its pings are answered, and nothing is closed, lost or doubled.
func TestSocketSurvivesMoves(t *testing.T) {
	r := newRig(t)
	v := r.linked(t)
	r.fake.serve(echoAgent(make(chan error, 9)))
	ws := r.dialWS(connectPath, nil)
	c, br := r.rawSocket("")
	for i := range 20 {
		echo(t, ws, []byte("hello"))
		v.freeze(session.Move)
		if err := ws.Write(t.Context(), websocket.MessageText, fmt.Append(nil, i)); err != nil {
			t.Fatal(err)
		}
		pinged(t, c, br, fmt.Sprint("ping ", i))
		v.thaw()
		if _, got, err := ws.Read(t.Context()); err != nil || string(got) != fmt.Sprint(i) {
			t.Fatalf("%q, %v", got, err)
		}
	}
	pinged(t, c, br, "and by the agent again")
	if n := r.fake.book.times(); n != 0 {
		t.Errorf("resumed %d times", n)
	}
}

// Frames split at any byte, with pings between, over moves at any moment: the
// agent gets the messages, whole and in order, and each ping has one answer.
func TestSiftedFrames(t *testing.T) {
	for seed := range uint64(20) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) { siftFrames(t, seed) })
	}
}

func siftFrames(t *testing.T, seed uint64) {
	rng := rand.New(rand.NewPCG(seed, 1))
	r := newRig(t)
	v := r.linked(t)
	r.fake.serve(echoAgent(make(chan error, 9)))
	c, br := r.rawSocket("")
	var sent []byte
	var messages, pings []string
	for i := range 60 {
		if rng.IntN(2) == 0 {
			pings = append(pings, fmt.Sprint("p", i))
			sent = append(sent, wsframe.AppendPing(nil, []byte(pings[len(pings)-1]), true)...)
			continue
		}
		text := strings.Repeat("x", rng.IntN(300)) + fmt.Sprint(i)
		messages = append(messages, text)
		half := rng.IntN(len(text)) // a ping may come between the fragments of a message
		sent = append(sent, dataFrame(1, false, text[:half])...)
		pings = append(pings, fmt.Sprint("q", i))
		sent = append(sent, wsframe.AppendPing(nil, []byte(pings[len(pings)-1]), true)...)
		sent = append(sent, dataFrame(0, true, text[half:])...)
	}
	got := make(chan error, 1)
	go func() { got <- expectFrames(br, messages, pings) }()
	for len(sent) > 0 {
		n := min(len(sent), 1+rng.IntN(400))
		switch rng.IntN(6) {
		case 0:
			v.freeze(session.Move)
		case 1:
			v.thaw()
		}
		if _, err := c.Write(sent[:n]); err != nil {
			t.Fatal(err)
		}
		sent = sent[n:]
	}
	v.thaw()
	if err := <-got; err != nil {
		t.Fatal(err)
	}
}

// dataFrame is a masked data frame of less than 64 KiB.
func dataFrame(op byte, fin bool, text string) []byte {
	b := []byte{op, 0x80 | 126, byte(len(text) >> 8), byte(len(text)), 0, 0, 0, 0}
	if fin {
		b[0] |= 0x80
	}
	return append(b, text...)
}

// expectFrames reads the echoes of all messages, in order, and pongs, in any.
func expectFrames(br *bufio.Reader, messages, pings []string) error {
	open := map[string]int{}
	for _, p := range pings {
		open[p]++
	}
	for n := len(messages) + len(pings); n > 0; n-- {
		var h [4]byte
		if _, err := io.ReadFull(br, h[:2]); err != nil {
			return fmt.Errorf("%d more: %w", n, err)
		}
		size := int(h[1])
		if size == 126 {
			if _, err := io.ReadFull(br, h[2:4]); err != nil {
				return err
			}
			size = int(h[2])<<8 | int(h[3])
		}
		body := make([]byte, size)
		if _, err := io.ReadFull(br, body); err != nil {
			return err
		}
		switch text := string(body); {
		case h[0] == 0x8a:
			if open[text]--; open[text] < 0 {
				return fmt.Errorf("pong %q twice, or of no ping", text)
			}
		case len(messages) == 0 || messages[0] != text:
			return fmt.Errorf("message %.40q out of turn", text)
		default:
			messages = messages[1:]
		}
	}
	return nil
}

// A pause with the memory keeps the socket; pings are answered and resume
// nothing; the first message does, and is delivered after.
func TestSleepAndWake(t *testing.T) {
	shortTimes(t)
	r := newRig(t)
	v := r.linked(t)
	r.fake.serve(echoAgent(make(chan error, 9)))
	r.fake.book.runs()
	c, br := r.rawSocket("")
	v.freeze(session.Pause)
	r.fake.book.asleep()
	until := time.Now().Add(3 * pingAfter)
	for i := 0; time.Now().Before(until); i++ {
		_, _ = c.Write(wsframe.AppendPing(nil, []byte("p"), true))
		skipPings(t, c, br, "\x8a\x01p")
	}
	if n := r.fake.book.times(); n != 0 {
		t.Fatalf("pings resumed it %d times", n)
	}
	r.fake.book.onAwake(func() error {
		r.fake.book.open(session.Resume)
		v.thaw()
		return nil
	})
	_, _ = c.Write(dataFrame(2, true, "good morning"))
	skipPings(t, c, br, "\x82\x0cgood morning")
	if n := r.fake.book.times(); n != 1 {
		t.Errorf("resumed %d times", n)
	}
}

// skipPings reads want, answering the gateway's pings before it.
func skipPings(t *testing.T, c net.Conn, br *bufio.Reader, want string) {
	t.Helper()
	for {
		if b, err := br.Peek(2); err != nil {
			t.Fatal(err)
		} else if b[0] != 0x89 {
			break
		}
		ping := make([]byte, 7)
		_, _ = io.ReadFull(br, ping) // peeked; a short one shows below
		_, _ = c.Write(wsframe.AppendPong(nil, ping[2:], true))
	}
	got := make([]byte, len(want))
	if _, err := io.ReadFull(br, got); err != nil || string(got) != want {
		t.Fatalf("%q for %q, %v", got, want, err)
	}
}

// A message that came while the machine was already stopping resumes it as soon
// as it is paused.
func TestMessageDuringPause(t *testing.T) {
	r := newRig(t)
	v := r.linked(t)
	r.fake.serve(echoAgent(make(chan error, 9)))
	r.fake.book.runs()
	r.fake.book.onAwake(func() error { v.thaw(); return nil })
	for _, late := range []bool{false, true} {
		ws := r.dialWS(connectPath, nil)
		echo(t, ws, []byte("hello"))
		if late { // the machine is gone before the record says why
			v.stop()
		} else {
			v.freeze(session.Pause)
		}
		if err := ws.Write(t.Context(), websocket.MessageText, []byte("too late")); err != nil {
			t.Fatal(err)
		}
		if late {
			time.Sleep(20 * time.Millisecond) // so that it is on its way to the agent
		}
		r.fake.book.asleep()
		if _, got, err := ws.Read(t.Context()); err != nil || string(got) != "too late" {
			t.Errorf("late %v: %q, %v", late, got, err)
		}
		ws.CloseNow()
	}
}

// How a socket closes whose machine does not come back as it was.
func TestClosesOfPausedSessions(t *testing.T) {
	noRoom := apierr.New(apierr.ConcurrencyLimit, "too many")
	for _, tt := range []struct {
		name  string
		short bool // sleepTime
		do    func(*rig, *valve, *websocket.Conn)
		code  websocket.StatusCode
		text  string
	}{
		{"portable pause", false, func(r *rig, v *valve, _ *websocket.Conn) {
			v.freeze(session.Pause)
			r.fake.book.gone()
		}, 4001, "paused"},
		{"long pause", true, func(r *rig, v *valve, _ *websocket.Conn) {
			v.freeze(session.Pause)
			r.fake.book.asleep()
		}, 4001, "paused"},
		{"no room to resume", false, func(r *rig, v *valve, ws *websocket.Conn) {
			v.freeze(session.Pause)
			r.fake.book.onAwake(func() error { return noRoom })
			r.fake.book.asleep()
			_ = ws.Write(context.Background(), websocket.MessageText, []byte("wake up"))
		}, 4001, "paused"},
		{"portable move", false, func(r *rig, v *valve, _ *websocket.Conn) {
			v.freeze(session.Move)
			v.machine("two")
			v.thaw()
		}, 1012, "moved"},
		{"portable move with a message", false, func(r *rig, v *valve, ws *websocket.Conn) {
			v.freeze(session.Move)
			_ = ws.Write(context.Background(), websocket.MessageText, []byte("hello?"))
			v.machine("two")
			v.thaw()
		}, 1012, "moved"},
		{"released while paused", false, func(r *rig, v *valve, _ *websocket.Conn) {
			v.freeze(session.Pause)
			r.fake.book.asleep()
			r.fake.ends <- sessions.Ended{CloseCode: 1000, Reason: "released", At: t0}
		}, 1000, "released"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			shortTimes(t)
			if tt.short {
				old := sleepTime
				sleepTime = 100 * time.Millisecond
				t.Cleanup(func() { sleepTime = old })
			}
			r := newRig(t)
			v := r.linked(t)
			r.fake.serve(echoAgent(make(chan error, 9)))
			r.fake.book.runs()
			ws := r.dialWS(connectPath, nil)
			echo(t, ws, []byte("hello"))
			tt.do(r, v, ws)
			if ce := closeOf(t, ws); ce.Code != tt.code || ce.Reason != tt.text {
				t.Errorf("the client saw %v", ce)
			}
			if tt.code == 1012 { // the same connectUrl works at once
				echo(t, r.dialWS(connectPath, nil), []byte("hello again"))
			}
		})
	}
}

// A socket closed after a long pause is no client that left: the agent hears so
// when the machine goes on.
func TestAgentHearsOfLongPause(t *testing.T) {
	shortTimes(t)
	old := sleepTime
	sleepTime = 50 * time.Millisecond
	t.Cleanup(func() { sleepTime = old })
	r := newRig(t)
	v := r.linked(t)
	closed := make(chan error, 9)
	r.fake.serve(echoAgent(closed))
	r.fake.book.runs()
	ws := r.dialWS(connectPath, nil)
	echo(t, ws, []byte("hello"))
	v.freeze(session.Pause)
	r.fake.book.asleep()
	if ce := closeOf(t, ws); ce.Code != 4001 {
		t.Errorf("the client saw %v", ce)
	}
	v.thaw()
	var ce websocket.CloseError
	if err := soon(t, "the agent's end", closed); !errors.As(err, &ce) || ce.Code != agentlink.PlatformClose {
		t.Errorf("the agent saw %v", err)
	}
}

// A client that closes while the machine stands still is answered at once.
func TestCloseDuringMove(t *testing.T) {
	longTimes(t)
	r := newRig(t)
	v := r.linked(t)
	closed := make(chan error, 9)
	r.fake.serve(echoAgent(closed))
	r.fake.book.runs()
	ws := r.dialWS(connectPath, nil)
	echo(t, ws, []byte("hello"))
	v.freeze(session.Move)
	if err := ws.Close(3000, "enough"); err != nil {
		t.Error(err)
	}
	v.thaw()
	var ce websocket.CloseError
	if err := soon(t, "the agent's end", closed); !errors.As(err, &ce) || ce.Code != 3000 {
		t.Errorf("the agent saw %v", err)
	}
}

// A client that takes no bytes because the machine stopped inside a message is
// not silent.
func TestStandstillInsideFrame(t *testing.T) {
	shortLife(t)
	r := newRig(t)
	v := r.linked(t)
	rest := make(chan struct{})
	r.fake.serve(func(w http.ResponseWriter, req *http.Request) {
		conn, rw, _ := w.(http.Hijacker).Hijack()
		defer conn.Close()
		fmt.Fprintf(rw, "HTTP/1.1 101 S\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n\x82\x08half")
		rw.Flush()
		<-rest
		fmt.Fprint(conn, "full")
		_, _ = io.Copy(io.Discard, conn)
	})
	r.fake.book.runs()
	_, br := r.rawSocket("")
	got := make([]byte, 6)
	if _, err := io.ReadFull(br, got); err != nil || string(got[2:]) != "half" {
		t.Fatalf("%q %v", got, err)
	}
	v.freeze(session.Move)
	time.Sleep(deadAfter + time.Second) // longer than a silent client is kept
	v.thaw()
	close(rest)
	if _, err := io.ReadFull(br, got[:4]); err != nil || string(got[:4]) != "full" {
		t.Errorf("%q %v", got, err)
	}
}

// What comes to a paused session: a new client and a request resume it, who
// only looks is told so.
func TestArrivals(t *testing.T) {
	r := newRig(t)
	v := r.linked(t)
	r.fake.serve(func(w http.ResponseWriter, req *http.Request) {
		if req.Header.Get("Upgrade") != "" {
			echoAgent(make(chan error, 9))(w, req)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	var resumed atomic.Int32
	r.fake.book.onAwake(func() error { resumed.Add(1); v.thaw(); return nil })
	sleep := func() { v.freeze(session.Pause); r.fake.book.asleep() }
	sleep()
	for _, path := range []string{"/live/" + goodID + "/cdp?token=l", "/live/" + goodID + "/terminal?token=l"} {
		a := r.do("GET", path, nil, "X-Api-Key", "", "Connection", "Upgrade", "Upgrade", "websocket", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ==", "Sec-WebSocket-Version", "13")
		if a.status != 409 || a.code() != "session_not_running" {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	if resumed.Load() != 0 {
		t.Errorf("looking resumed it")
	}
	for i, path := range []string{connectPath, sessionPath("/terminal?token=t")} {
		echo(t, r.dialWS(path, nil), []byte("hello"))
		if n := int(resumed.Load()); n != i+1 {
			t.Errorf("%s: resumed %d times", path, n)
		}
		sleep()
	}
	if a := r.do("DELETE", sessionPath("/files?path=a"), nil); a.status != 204 || resumed.Load() != 3 {
		t.Errorf("%d %s, resumed %d times", a.status, a.body, resumed.Load())
	}
}

// A viewer does not wait for ever for an operation that nobody undoes, nor when
// he has left.
func TestLookingEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		fake := &fakeService{}
		fake.book.open(session.Move)
		c := &call{srv: &Server{cfg: Config{Service: fake}}}
		began := time.Now()
		if _, err := c.looking(t.Context(), testView().Session); !apierr.Is(err, apierr.Unavailable) || time.Since(began) != operationTime+sessions.UndoTime {
			t.Errorf("after %s: %v", time.Since(began), err)
		}
		fake.book.open(session.Move)
		ctx, leave := context.WithTimeoutCause(t.Context(), time.Second, errors.New("left"))
		defer leave()
		if _, err := c.looking(ctx, testView().Session); err == nil || err.Error() != "left" {
			t.Errorf("left: %v", err)
		}
	})
}

// A viewer's messages resume nothing.
func TestViewerDoesNotWake(t *testing.T) {
	r := newRig(t)
	v := r.linked(t)
	r.fake.serve(echoAgent(make(chan error, 9)))
	r.fake.book.runs()
	ws := r.dialWS("/live/"+goodID+"/cdp?token=l", nil)
	echo(t, ws, []byte("hello"))
	v.freeze(session.Pause)
	r.fake.book.asleep()
	if err := ws.Write(t.Context(), websocket.MessageText, []byte("ack")); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond) // time to do what it must not
	if n := r.fake.book.times(); n != 0 {
		t.Errorf("resumed %d times", n)
	}
	v.thaw()
	if _, got, err := ws.Read(t.Context()); err != nil || string(got) != "ack" {
		t.Errorf("%q, %v", got, err)
	}
}

// An exec stream goes on over moves without a byte lost, and ends with an error
// line when the machine's memory is lost.
func TestExecStreamOverMoves(t *testing.T) {
	for _, portable := range []bool{false, true} {
		r := newRig(t)
		v := r.linked(t)
		next := make(chan struct{})
		r.fake.serve(func(w http.ResponseWriter, req *http.Request) {
			for i := range 10 {
				fmt.Fprintf(w, "{\"type\":\"stdout\",\"data\":\"%d %s\"}\n", i, strings.Repeat("x", 10000))
				w.(http.Flusher).Flush()
				select {
				case <-next:
				case <-req.Context().Done():
					return
				}
			}
		})
		r.fake.book.runs()
		resp, err := r.http.Do(r.request("POST", sessionPath("/exec"), `{"command":"x","stream":true}`))
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		in := bufio.NewReader(resp.Body)
		for i := range 10 {
			line, err := in.ReadString('\n')
			if err != nil || !strings.HasPrefix(line, fmt.Sprintf(`{"type":"stdout","data":"%d xxx`, i)) {
				t.Fatalf("line %d: %.60q %v", i, line, err)
			}
			v.freeze(session.Move)
			if portable && i == 5 {
				v.machine("two")
				v.thaw()
				break
			}
			v.thaw()
			next <- struct{}{}
		}
		rest, err := io.ReadAll(in)
		if failed := bytes.Contains(rest, []byte(`"type":"error"`)); err != nil || failed != portable {
			t.Errorf("portable %v: %q, %v", portable, rest, err)
		}
	}
}

// Requests under way do not wait for a machine that will not come back, nor for
// ever for one that may.
func TestRequestsOfPausedSessions(t *testing.T) {
	old := sleepTime
	sleepTime = 50 * time.Millisecond
	t.Cleanup(func() { sleepTime = old })
	for _, pause := range []func(*book){(*book).gone, (*book).asleep} {
		r := newRig(t)
		v := r.linked(t)
		under := make(chan struct{}, 1)
		r.fake.serve(func(_ http.ResponseWriter, req *http.Request) {
			under <- struct{}{}
			<-req.Context().Done()
		})
		r.fake.book.runs()
		got := make(chan answer, 1)
		go func() { got <- r.do("GET", sessionPath("/files/wait?pattern=x"), nil) }()
		<-under
		v.freeze(session.Pause)
		pause(&r.fake.book)
		if a := soon(t, "the answer", got); a.status != 409 || a.code() != "session_not_running" {
			t.Errorf("%d %s", a.status, a.body)
		}
	}
}

// The time that a client of a sleeping session has ends with the sleep: a
// resume under way may take longer than what is left of it.
func TestSleepEndsWithTheResume(t *testing.T) {
	old := sleepTime
	sleepTime = 2500 * time.Millisecond
	t.Cleanup(func() { sleepTime = old })
	r := newRig(t)
	v := r.linked(t)
	under, release := make(chan struct{}), make(chan struct{})
	r.fake.serve(func(w http.ResponseWriter, req *http.Request) {
		if req.URL.Path != agentlink.PathFilesWait {
			echoAgent(make(chan error, 9))(w, req)
			return
		}
		close(under)
		<-release
		_, _ = io.WriteString(w, `{"path":"x","size":1}`)
	})
	r.fake.book.runs()
	ws := r.dialWS(connectPath, nil)
	echo(t, ws, []byte("hello"))
	waits := make(chan answer, 1)
	go func() { waits <- r.do("GET", sessionPath("/files/wait?pattern=x"), nil) }()
	<-under
	v.freeze(session.Pause)
	r.fake.book.asleep()
	r.fake.book.noticed()
	v.freeze(session.Resume)
	r.fake.book.noticed()
	time.Sleep(sleepTime + 500*time.Millisecond) // a slow resume
	v.thaw()
	close(release)
	echo(t, ws, []byte("still here"))
	if a := soon(t, "the answer", waits); a.status != 200 {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// A socket is as old as the URL that opened it: URLs that were rotated while it
// waited for a resume cut it like the others.
func TestRotatedWhileItWaited(t *testing.T) {
	r := newRig(t)
	v := r.linked(t)
	r.fake.serve(echoAgent(make(chan error, 9)))
	v.freeze(session.Pause)
	r.fake.book.asleep()
	r.fake.book.onAwake(func() error {
		v.thaw()
		r.fake.book.rotated()
		return nil
	})
	if ce := closeOf(t, r.dialWS(connectPath, nil)); ce.Code != 1008 || ce.Reason != "rotated" {
		t.Errorf("the client saw %v", ce)
	}
}
