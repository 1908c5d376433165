package hosts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/link"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

// book is a record with at most one session. The zero value knows none.
type book struct {
	mu      sync.Mutex // guards what follows
	s       *session.Session
	changed chan struct{}
	behind  *session.Session // what Fresh brings
	stale   error            // of Fresh
}

func (b *book) WatchSession(id string) (session.Session, bool, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.changed == nil {
		b.changed = make(chan struct{})
	}
	if b.s == nil || b.s.ID != id {
		return session.Session{}, false, b.changed
	}
	return *b.s, true, b.changed
}

func (b *book) Fresh(context.Context, uint64) error {
	b.mu.Lock()
	behind, err := b.behind, b.stale
	b.behind = nil
	b.mu.Unlock()
	if behind != nil {
		b.set(*behind)
	}
	return err
}

func (b *book) set(s session.Session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.s = &s
	if b.changed != nil {
		close(b.changed)
		b.changed = nil
	}
}

// hostd is a host with tunnels to at most one machine, whose agent is a
// link.Listener.
type hostd struct {
	addr string

	mu      sync.Mutex // guards what follows
	agent   *link.Listener
	epoch   uint64
	refusal *apierr.Error // without an agent
	tunnels []net.Conn
	asked   int
	serving sync.WaitGroup
}

func startHostd(t *testing.T) *hostd {
	h := &hostd{refusal: apierr.New(apierr.NotFound, "no such session")}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/sessions/{id}/tunnel", h.tunnel)
	srv := httptest.NewServer(mux)
	h.addr = strings.TrimPrefix(srv.URL, "http://")
	t.Cleanup(func() {
		h.hold(nil)
		srv.CloseClientConnections()
		srv.Close()
		h.serving.Wait()
	})
	return h
}

// run lets the machine go on with the given agent.
func (h *hostd) run(agent *link.Listener, epoch uint64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.agent, h.epoch = agent, epoch
}

// hold cuts the tunnels and answers with refusal.
func (h *hostd) hold(refusal *apierr.Error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.agent, h.refusal = nil, refusal
	for _, c := range h.tunnels {
		c.Close()
	}
	h.tunnels = nil
}

func (h *hostd) dials() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.asked
}

func (h *hostd) tunnel(w http.ResponseWriter, r *http.Request) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.asked++
	refusal := h.refusal
	if h.agent != nil && r.FormValue("epoch") != fmt.Sprint(h.epoch) {
		refusal = apierr.New(apierr.SessionNotRunning, "another epoch")
	} else if h.agent != nil {
		refusal = nil
	}
	if refusal != nil {
		w.WriteHeader(refusal.Status())
		_ = json.NewEncoder(w).Encode(refusal)
		return
	}
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", hostlink.TunnelProtocol)
	h.tunnels = append(h.tunnels, conn)
	agent := h.agent
	h.serving.Go(func() { agent.Serve(conn) })
}

// newAgent is an agent with another memory each time; it answers with its name.
func newAgent(t *testing.T, name string) *link.Listener {
	var lineage [16]byte
	copy(lineage[:], name)
	l := link.Listen(link.Options{Lineage: lineage})
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body) // a test that cuts it sees so
		fmt.Fprintf(w, "%s %s", name, b)
	})}
	served := make(chan struct{})
	go func() { defer close(served); _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close(); <-served })
	return l
}

// rig is two hosts, a record and the session s on the first.
type rig struct {
	t    *testing.T
	h    *Hosts
	book *book
	a, b *hostd
	s    session.Session
}

func newRig(t *testing.T, agent *link.Listener) *rig {
	r := &rig{t: t, book: &book{}, a: startHostd(t), b: startHostd(t),
		s: session.Session{ID: "s", Host: "a", Epoch: 1, Status: session.Running}}
	w := &town{}
	w.set(host("a", r.a.addr), host("b", r.b.addr))
	r.h = New(w, trust.New(), r.book)
	t.Cleanup(func() {
		r.h.Close()
		r.s.Status, r.s.Epoch = session.Completed, 9 // with their session all streams end, broken ones too
		r.book.set(r.s)
	})
	r.a.run(agent, 1)
	r.book.set(r.s)
	return r
}

var held = apierr.New(apierr.Unavailable, "held")

// open begins a move to b: the source's machine stops.
func (r *rig) open() {
	now := r.s
	now.Op = &session.Operation{Kind: session.Move, From: "a", To: "b", Epoch: 2}
	r.book.set(now)
	r.a.hold(held)
}

// moved is the session after the commit.
func (r *rig) moved() session.Session {
	now := r.s
	now.Host, now.Epoch, now.Moves = "b", 2, 1
	return now
}

func (r *rig) get() (string, error) { return r.send(http.MethodGet, "") }

func (r *rig) send(method, body string) (string, error) {
	req, err := http.NewRequestWithContext(r.t.Context(), method, "/", strings.NewReader(body))
	if err != nil {
		r.t.Fatal(err)
	}
	resp, err := r.h.RoundTrip(r.s, req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	return strings.TrimSpace(string(b)), err
}

// pingPong is a stream whose agent's end echoes.
func (r *rig) pingPong(agent *link.Listener) net.Conn {
	c, err := r.h.DialAgent(r.t.Context(), r.s)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(c.(*link.Conn).Abort)
	far, err := agent.Accept()
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(far.(*link.Conn).Abort)
	go func() { _, _ = io.Copy(far, far) }()
	echo(r.t, c, "before")
	return c
}

func echo(t *testing.T, c net.Conn, text string) {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.WriteString(c, text); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, len(text))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != text {
		t.Fatalf("%q, %v", got, err)
	}
}

// TestStreamFollowsMove: an open stream goes on at the target in the moment its
// host lets it in, and meanwhile nobody is asked.
func TestStreamFollowsMove(t *testing.T) {
	gap := time.Hour
	for tries := 0; tries < 5 && gap > time.Second; tries++ { // a computer that is busy adds to it now and then
		gap = streamFollowsMove(t)
		t.Logf("from the commit to the next byte: %v", gap)
	}
	if gap > time.Second {
		t.Errorf("the gap was %v", gap)
	}
}

func streamFollowsMove(t *testing.T) (gap time.Duration) {
	agent := link.Listen(link.Options{})
	defer agent.Close()
	r := newRig(t, agent)
	c := r.pingPong(agent)
	r.open()
	asked := r.a.dials()
	wrote := make(chan error, 1)
	go func() {
		_, err := io.WriteString(c, "while it moves")
		wrote <- err
	}()
	time.Sleep(300 * time.Millisecond) // how long the move takes: long enough for a backoff to show
	if n := r.a.dials() + r.b.dials() - asked; n > 1 {
		t.Errorf("dialled %d times while the machine stood still", n)
	}
	r.b.run(agent, 2)
	thawed := time.Now()
	r.book.set(r.moved())
	got := make([]byte, len("while it moves"))
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "while it moves" {
		t.Fatalf("%q, %v", got, err)
	}
	gap = time.Since(thawed)
	if err := <-wrote; err != nil {
		t.Error(err)
	}
	echo(t, c, "after")
	return gap
}

// TestNewStreamWaits: a stream opened to a machine that stands still waits for
// it, but no longer than its caller.
func TestNewStreamWaits(t *testing.T) {
	r := newRig(t, newAgent(t, "one"))
	r.open()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if _, err := r.h.DialAgent(ctx, r.s); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("while it moves: %v", err)
	}
	got := make(chan string, 1)
	go func() {
		text, err := r.get()
		got <- fmt.Sprint(text, err)
	}()
	r.b.run(newAgent(t, "two"), 2)
	r.book.set(r.moved())
	if text := <-got; text != "two<nil>" {
		t.Error(text)
	}
}

// TestDialToLeftPlace: a dial that hangs at the old host ends when the record
// names the new one.
func TestDialToLeftPlace(t *testing.T) {
	r := newRig(t, nil)
	silent, err := net.Listen("tcp", "127.0.0.1:0") // takes connections and says nothing
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	r.h.members.(*town).set(host("a", silent.Addr().String()), host("b", r.b.addr))
	r.b.run(newAgent(t, "two"), 2)
	got := make(chan string, 1)
	began := time.Now()
	go func() {
		text, err := r.get()
		got <- fmt.Sprint(text, err)
	}()
	c, err := silent.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	r.book.set(r.moved())
	if text := <-got; text != "two<nil>" || time.Since(began) > 5*time.Second {
		t.Errorf("%s after %v", text, time.Since(began))
	}
}

// TestStaleRecordIsNotBelieved: a host that has not the session any more is not
// the last word when this gateway's record is behind.
func TestStaleRecordIsNotBelieved(t *testing.T) {
	for _, what := range []string{"moved", "ended", "unknowable", "true"} {
		t.Run(what, func(t *testing.T) {
			r := newRig(t, nil) // a knows no such session
			r.b.run(newAgent(t, "two"), 2)
			fresh := r.moved()
			switch what {
			case "moved":
				r.book.behind = &fresh
			case "ended":
				fresh = r.s
				fresh.Status = session.Completed
				r.book.behind = &fresh
			case "unknowable":
				r.book.stale = apierr.New(apierr.Unavailable, "no leader")
				time.AfterFunc(100*time.Millisecond, func() { r.book.set(fresh) })
			}
			text, err := r.get()
			switch what {
			case "moved", "unknowable":
				if text != "two" || err != nil {
					t.Errorf("%q, %v", text, err)
				}
			case "ended":
				if !apierr.Is(err, apierr.SessionNotRunning) {
					t.Error(err)
				}
			case "true":
				if !apierr.Is(err, apierr.NotFound) {
					t.Error(err)
				}
			}
		})
	}
}

// TestRecordBehindCaller: the caller has the session from the leader's answer,
// this gateway's record knows an older epoch, or nothing.
func TestRecordBehindCaller(t *testing.T) {
	r := newRig(t, nil)
	r.b.run(newAgent(t, "two"), 2)
	old := r.s
	for _, known := range []session.Session{old, {ID: "another"}} {
		r.book.set(known)
		r.s = session.Session{ID: "s", Host: "b", Epoch: 2, Status: session.Running}
		if text, err := r.get(); text != "two" || err != nil {
			t.Errorf("%q, %v", text, err)
		}
	}
}

// tapped lets a test hear of writes to kept streams: those that begin when
// there is a function call it when they are done.
func (r *rig) tapped() *atomic.Pointer[func()] {
	var onWrite atomic.Pointer[func()]
	kept := r.h.transport(r.s)
	dial := kept.DialContext
	kept.DialContext = func(ctx context.Context, network, addr string) (net.Conn, error) {
		c, err := dial(ctx, network, addr)
		return tap{c, &onWrite}, err
	}
	return &onWrite
}

type tap struct {
	net.Conn
	onWrite *atomic.Pointer[func()]
}

func (c tap) Write(b []byte) (int, error) {
	call := c.onWrite.Load()
	n, err := c.Conn.Write(b)
	if call != nil {
		(*call)()
	}
	return n, err
}

// TestAnotherLineage: after a portable move kept streams lead nowhere. A request
// that only looks is sent again; one that may have done something is not.
func TestAnotherLineage(t *testing.T) {
	for _, method := range []string{http.MethodGet, http.MethodPost} {
		t.Run(method, func(t *testing.T) {
			r := newRig(t, newAgent(t, "one"))
			onWrite := r.tapped()
			if text, err := r.get(); text != "one" || err != nil {
				t.Fatalf("%q, %v", text, err)
			}
			r.open()
			r.b.run(newAgent(t, "two"), 2)
			got, wrote := make(chan error, 1), make(chan struct{})
			onWrite.Store(new(sync.OnceFunc(func() { close(wrote) })))
			go func() {
				text, err := r.send(method, map[string]string{http.MethodPost: "body"}[method])
				if err == nil && text != "two" {
					err = errors.New(text)
				}
				got <- err
			}()
			<-wrote // to the kept stream
			r.book.set(r.moved())
			err := <-got
			if method == http.MethodGet && err != nil || method == http.MethodPost && !errors.Is(err, link.ErrLineage) {
				t.Errorf("under way: %v", err)
			}
			if text, err := r.send(method, ""); text != "two" || err != nil {
				t.Errorf("the next one: %q, %v", text, err)
			}
		})
	}
}

// TestKeptStreamsSurviveMemory: with the memory, kept streams go on.
func TestKeptStreamsSurviveMemory(t *testing.T) {
	agent := newAgent(t, "one")
	r := newRig(t, agent)
	if text, err := r.get(); text != "one" || err != nil {
		t.Fatalf("%q, %v", text, err)
	}
	r.open()
	r.b.run(agent, 2)
	r.book.set(r.moved())
	if text, err := r.send(http.MethodPost, "body"); text != "one body" || err != nil {
		t.Errorf("%q, %v", text, err)
	}
	if n := agent.Streams(); n != 1 {
		t.Errorf("%d streams", n)
	}
}
