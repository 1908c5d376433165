package refusals

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// proxyd serves a feed as the contract says; tests write its lines.
type proxyd struct {
	*httptest.Server
	secret *trust.Secret
	lines  chan string   // "" is a heartbeat, "cut" breaks the stream, "bad" ends it with half a line
	opened chan struct{} // one for each stream
}

func newProxyd(t *testing.T, secret *trust.Secret) *proxyd {
	p := &proxyd{secret: secret, lines: make(chan string), opened: make(chan struct{}, 100)}
	p.Server = httptest.NewServer(p)
	t.Cleanup(p.Server.Close)
	return p
}

func (p *proxyd) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet || r.URL.Path != "/v1/refusals" || r.FormValue("host") != "h1" || !p.secret.Check(r.Header.Get(trust.Header)) {
		http.Error(w, "no", http.StatusForbidden)
		return
	}
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	p.opened <- struct{}{}
	for {
		select {
		case <-r.Context().Done():
			return
		case line := <-p.lines:
			if line == "cut" {
				panic(http.ErrAbortHandler)
			}
			if line == "bad" {
				fmt.Fprintln(w, `{"not": "finished"`)
				return
			}
			fmt.Fprintln(w, line)
			w.(http.Flusher).Flush()
		}
	}
}

func (p *proxyd) addr() string { return strings.TrimPrefix(p.URL, "http://") }

// tell writes a refusal into the feed.
func (p *proxyd) tell(r proxylink.Refused) {
	b, err := json.Marshal(r)
	if err != nil {
		panic(err)
	}
	p.lines <- string(b)
}

// pool is a gossip pool that a test fills.
type pool struct {
	mu      sync.Mutex
	members []gossip.Member
	changed chan struct{}
}

func newPool() *pool { return &pool{changed: make(chan struct{})} }

func (p *pool) Members(role gossip.Role) []gossip.Member {
	p.mu.Lock()
	defer p.mu.Unlock()
	if role != gossip.Proxyd {
		return nil
	}
	return append([]gossip.Member(nil), p.members...)
}
func (p *pool) Changed() <-chan struct{} { p.mu.Lock(); defer p.mu.Unlock(); return p.changed }

func (p *pool) set(members ...gossip.Member) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.members = members
	close(p.changed)
	p.changed = make(chan struct{})
}

func member(region, control string) gossip.Member {
	return gossip.Member{Meta: gossip.Meta{Role: gossip.Proxyd, Region: region, Addr: "127.0.0.1:1", Control: control}}
}

// sessions has one, "s" in epoch 2.
type sessions struct {
	mu     sync.Mutex
	events []event.Event
	more   chan struct{} // one for each event
	block  chan struct{} // Record waits for it, if not nil
}

func newSessions() *sessions { return &sessions{more: make(chan struct{}, 10_000)} }

func (s *sessions) Record(ctx context.Context, id string, epoch uint64, e event.Event) bool {
	if s.block != nil {
		select {
		case <-s.block:
		case <-ctx.Done():
			return false
		}
	}
	if id != "s" || epoch != 2 {
		return false
	}
	s.mu.Lock()
	s.events = append(s.events, e)
	s.mu.Unlock()
	s.more <- struct{}{}
	return true
}

func (s *sessions) all() []event.Event {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]event.Event(nil), s.events...)
}

// await waits for n events in all.
func (s *sessions) await(t *testing.T, n int) []event.Event {
	t.Helper()
	deadline := time.After(30 * time.Second)
	for {
		if all := s.all(); len(all) >= n {
			return all
		}
		select {
		case <-s.more:
		case <-deadline:
			t.Fatalf("%d events, want %d", len(s.all()), n)
		}
	}
}

// start runs the package until the test ends, and tells of each feed that is
// let go.
func start(t *testing.T, secret *trust.Secret, members *pool, s Sessions) (closed chan string) {
	closed = make(chan string, 100)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		Run(ctx, Config{Host: "h1", Region: "local", Members: members, Sessions: s, Log: slog.New(slog.DiscardHandler),
			Open: func(addr string) Feed { return closing{proxylink.NewClient(addr, secret), closed} }})
	}()
	t.Cleanup(func() { cancel(); <-done })
	return closed
}

// closing tells that a feed is not followed any more.
type closing struct {
	*proxylink.Client
	closed chan string
}

func (c closing) Close() {
	c.Client.Close()
	c.closed <- "closed"
}

func opened(t *testing.T, p *proxyd) {
	t.Helper()
	select {
	case <-p.opened:
	case <-time.After(30 * time.Second):
		t.Fatal("the feed was not followed")
	}
}

func refused(target string) proxylink.Refused {
	return proxylink.Refused{SessionID: "s", Epoch: 2, At: time.Now(), Method: "CONNECT", Target: target, Reason: egress.PortBlocked, Detail: "port 25 is closed"}
}

func TestRefusalsBecomeEvents(t *testing.T) {
	secret, members, s := trust.New(), newPool(), newSessions()
	p := newProxyd(t, secret)
	start(t, secret, members, s)
	members.set(member("elsewhere", "127.0.0.1:1"), member("local", ""), member("local", p.addr()))
	opened(t, p)
	late, other := refused("late:1"), refused("other:1")
	late.Epoch, other.SessionID = 1, "other"
	p.lines <- ""
	for _, r := range []proxylink.Refused{late, other, refused("a.example:25")} {
		p.tell(r)
	}
	all := s.await(t, 1)
	want := `{"method":"CONNECT","url":"a.example:25","status":0,"resourceType":"other","errorText":"port 25 is closed","proxyError":"port_blocked","bytesIn":0,"bytesOut":0}`
	if e := all[0]; len(all) != 1 || e.Type != event.Network || e.Level != "warn" || e.At.IsZero() ||
		e.Text != "A connection to a.example:25 was refused: port 25 is closed." || string(e.Data) != want {
		t.Errorf("events %+v, data %s", all, all[0].Data)
	}
}

// A feed that breaks is followed again; a proxyd that leaves the pool is heard
// until its feed breaks, and one that comes back is heard again.
func TestFeedCutAndBack(t *testing.T) {
	secret, members, s := trust.New(), newPool(), newSessions()
	a, b := newProxyd(t, secret), newProxyd(t, secret)
	members.set(member("local", a.addr()), member("local", b.addr()))
	closed := start(t, secret, members, s)
	opened(t, a)
	opened(t, b)
	a.tell(refused("one:1"))
	s.await(t, 1)
	a.lines <- "cut"
	b.tell(refused("two:1")) // nobody waits for the other
	s.await(t, 2)
	opened(t, a)
	a.lines <- "bad"
	opened(t, a)
	a.tell(refused("three:1"))
	s.await(t, 3)

	members.set(member("local", b.addr()))
	a.tell(refused("four:1")) // it drains
	s.await(t, 4)
	a.lines <- "cut"
	select {
	case <-closed:
	case <-time.After(30 * time.Second):
		t.Fatal("a proxyd that is gone is still followed")
	}
	members.set(member("local", a.addr()), member("local", b.addr()))
	opened(t, a)
	a.tell(refused("five:1"))
	all := s.await(t, 5)
	for i, target := range []string{"one", "two", "three", "four", "five"} {
		if !strings.Contains(all[i].Text, " "+target+":1 ") {
			t.Errorf("event %d: %s", i, all[i].Text)
		}
	}
}

// A flood becomes so many events a second, in order, and one for all others;
// nothing is lost in the sum, and another session is not disturbed.
func TestAFloodIsCounted(t *testing.T) {
	s := newSessions()
	r := newRecorder(s)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, q := range r.queues {
		wg.Go(func() { r.write(ctx, q) })
	}
	defer wg.Wait()
	defer cancel()
	const flood = 5000
	for i := range flood {
		r.take(refused(fmt.Sprintf("n%d:1", i)))
	}
	r.sum()
	all := s.await(t, perSecond+1)
	for i, e := range all[:perSecond] {
		if !strings.Contains(e.Text, fmt.Sprintf(" n%d:1 ", i)) {
			t.Errorf("event %d: %s", i, e.Text)
		}
	}
	want := fmt.Sprintf(`{"refused":%d,"proxyError":"port_blocked"}`, flood-perSecond)
	if last := all[perSecond]; string(last.Data) != want || !strings.Contains(last.Text, fmt.Sprintf("n%d:1", flood-1)) {
		t.Errorf("the sum: %s %s", last.Text, last.Data)
	}
	r.sum() // the next second begins anew
	r.take(refused("again:1"))
	if all := s.await(t, perSecond+2); !strings.Contains(all[perSecond+1].Text, "again:1") {
		t.Errorf("the next second: %+v", all[perSecond+1])
	}
	if len(r.second) != 1 {
		t.Errorf("%d sessions are remembered", len(r.second))
	}
}

// A log that is slow keeps nobody waiting: what does not fit is counted, and
// the count comes when there is room.
func TestASlowLogKeepsNobodyWaiting(t *testing.T) {
	s := newSessions()
	s.block = make(chan struct{})
	r := newRecorder(s)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for _, q := range r.queues {
		wg.Go(func() { r.write(ctx, q) })
	}
	defer wg.Wait()
	defer cancel()
	const seconds = queue/perSecond + 3
	for range seconds {
		for range perSecond {
			r.take(refused("x:1"))
		}
		r.sum()
	}
	close(s.block)
	total := func() (n int) {
		for _, e := range s.all() {
			var sum struct{ Refused int }
			_ = json.Unmarshal(e.Data, &sum)
			n += max(1, sum.Refused)
		}
		return n
	}
	for end := time.Now().Add(30 * time.Second); total() < seconds*perSecond; r.sum() {
		if time.Now().After(end) {
			t.Fatalf("%d refusals are in the log, want %d", total(), seconds*perSecond)
		}
		select {
		case <-s.more:
		case <-time.After(10 * time.Millisecond):
		}
	}
	if got := total(); got != seconds*perSecond {
		t.Errorf("%d refusals are in the log, want %d", got, seconds*perSecond)
	}
}

func TestAddress(t *testing.T) {
	for _, c := range []struct{ method, target, want string }{
		{"CONNECT", "a.example:443", "https://a.example/"},
		{"CONNECT", "a.example:80", "http://a.example/"},
		{"CONNECT", "a.example:8443", "a.example:8443"},
		{"CONNECT", "[2001:db8::1]:443", "https://[2001:db8::1]/"},
		{"SOCKS5", "a.example:443", "https://a.example/"},
		{"SOCKS5", "10.0.0.1:22", "10.0.0.1:22"},
		{"GET", "a.example:80", "http://a.example/"},
		{"POST", "a.example:8080", "http://a.example:8080/"},
		{"POST", "a.example:443", "http://a.example:443/"},
		{"CONNECT", "a.example", "a.example"},
		{"CONNECT", ":443", ":443"},
		{"CONNECT", "", ""},
		{"", "\x00<\"", "\x00<\""},
	} {
		if got := address(c.method, c.target); got != c.want {
			t.Errorf("%s %q: %q, want %q", c.method, c.target, got, c.want)
		}
	}
}

// Whatever a client wrote as its target, the event stays small and is JSON.
func TestEventsAreBounded(t *testing.T) {
	r := refused(strings.Repeat("\x01", 5000))
	r.Detail = strings.Repeat("<", 5000)
	for _, e := range []event.Event{describe(r), more(&count{more: 7, last: r})} {
		b, err := json.Marshal(e)
		if err != nil || len(b) > event.MaxEventBytes || !json.Valid(e.Data) {
			t.Errorf("%d bytes: %v", len(b), err)
		}
	}
	if e := describe(proxylink.Refused{Detail: "no"}); e.Text != "A connection to an unknown address was refused: no." {
		t.Error(e.Text)
	}
}
