package server

import (
	"context"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fake is the sessions and logs of a host. Fields are set before use.
type fake struct {
	acquired chan struct{} // closed when Acquire has begun; nil: nobody waits
	release  chan struct{} // Acquire waits for it, whatever its context says
	err      error         // of every method
	notices  chan hostlink.Notice
	agent    net.Conn // the far end of the next tunnel
	follow   iter.Seq2[event.Event, error]
	body     io.Reader // of snapshots; nil: their names

	mu    sync.Mutex // guards what follows
	ended []hostlink.Tombstone
	acked []string
	set   hostlink.Settings
	after uint64
	types []event.Type
	limit int
}

func (f *fake) Acquire(_ context.Context, a hostlink.Acquire) (hostlink.Status, bool, error) {
	if f.acquired != nil {
		close(f.acquired)
		<-f.release
	}
	return hostlink.Status{SessionID: a.SessionID, Epoch: a.Epoch, Warm: true}, true, f.err
}

func (f *fake) Patch(_ context.Context, id string, set hostlink.Settings) (hostlink.Status, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.set = set
	return hostlink.Status{SessionID: id, Version: set.Version}, f.err
}

func (f *fake) End(_ context.Context, t hostlink.Tombstone) (hostlink.Tombstone, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = append(f.ended, t)
	return t, f.err
}

func (f *fake) Inventory(context.Context) (hostlink.Inventory, error) {
	return hostlink.Inventory{Host: "h", Sessions: []hostlink.Status{{SessionID: "s"}}}, f.err
}

func (f *fake) Ack(ids []string) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.acked = append(f.acked, ids...)
	return f.err
}

func (f *fake) Watch() (<-chan hostlink.Notice, func()) { return f.notices, func() {} }

func (f *fake) Tunnel(_ context.Context, id string, epoch uint64) (net.Conn, func(), error) {
	if f.err != nil {
		return nil, nil, f.err
	}
	if id != "s" || epoch != 3 {
		return nil, nil, apierr.New(apierr.NotFound, "no %s at %d", id, epoch)
	}
	near, far := net.Pipe()
	f.agent = far
	return near, func() { near.Close() }, nil
}

func (f *fake) Page(_ string, after uint64, types []event.Type, limit int) (hostlink.EventPage, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.after, f.types, f.limit = after, types, limit
	return hostlink.EventPage{Data: []event.Event{{Seq: after + 1}}, NextAfter: after + 1}, f.err
}

func (f *fake) Follow(context.Context, string, uint64, []event.Type) iter.Seq2[event.Event, error] {
	return f.follow
}

// serve gives a client of a server over f.
func serve(t *testing.T, f *fake) (*hostlink.Client, *httptest.Server) {
	secret := trust.New()
	mux := http.NewServeMux()
	New(mux, secret, f, f, slog.New(slog.DiscardHandler))
	srv := httptest.NewServer(mux)
	c := hostlink.NewClient(strings.TrimPrefix(srv.URL, "http://"), secret)
	t.Cleanup(func() {
		c.Close()
		srv.CloseClientConnections()
		srv.Close()
	})
	return c, srv
}

func acquire() hostlink.Acquire {
	return hostlink.Acquire{SessionID: "s", Epoch: 3, Kind: session.Both, Settings: hostlink.Settings{Version: 1, ExpiresAt: time.Now().Add(time.Hour)}}
}

func TestEveryOrderArrives(t *testing.T) {
	f := &fake{}
	c, _ := serve(t, f)
	ctx := t.Context()
	if st, err := c.Acquire(ctx, acquire()); err != nil || st.SessionID != "s" || st.Epoch != 3 || !st.Warm {
		t.Errorf("Acquire: %+v %v", st, err)
	}
	if inv, err := c.Inventory(ctx); err != nil || inv.Host != "h" || len(inv.Sessions) != 1 {
		t.Errorf("Inventory: %+v %v", inv, err)
	}
	if st, err := c.Patch(ctx, "s", hostlink.Settings{Version: 7, KeepAlive: true}); err != nil || st.Version != 7 || !f.set.KeepAlive {
		t.Errorf("Patch: %+v %v", st, err)
	}
	want := hostlink.Tombstone{SessionID: "s", Epoch: 3, Error: "It broke: 100 % & more."}
	if got, err := c.End(ctx, want); err != nil || got.Error != want.Error || got.Epoch != 3 || got.EndedAt.IsZero() {
		t.Errorf("End: %+v %v", got, err)
	}
	if err := c.Ack(ctx, []string{"a", "b"}); err != nil || len(f.acked) != 2 {
		t.Errorf("Ack: %v %v", f.acked, err)
	}
	p, err := c.Events(ctx, "s", 41, []event.Type{event.Exec, event.Error}, 9)
	if err != nil || p.NextAfter != 42 || f.after != 41 || len(f.types) != 2 || f.limit != 9 {
		t.Errorf("Events: %+v %v; asked %d %v %d", p, err, f.after, f.types, f.limit)
	}
}

func TestErrorsAreTheSameOnTheFarSide(t *testing.T) {
	f := &fake{err: apierr.New(apierr.NoCapacity, "full, 100%%").After(1500 * time.Millisecond)}
	c, _ := serve(t, f)
	_, err := c.Acquire(t.Context(), acquire())
	if e := apierr.From(err); e.Code != apierr.NoCapacity || e.Message != "full, 100%" || e.RetryAfter != 2*time.Second {
		t.Errorf("%+v", e)
	}
	if _, err := c.Tunnel(t.Context(), "s", 3); !apierr.Is(err, apierr.NoCapacity) {
		t.Errorf("Tunnel: %v", err)
	}
	f.err = errors.New("secret detail")
	if _, err := c.Inventory(t.Context()); !apierr.Is(err, apierr.Internal) || strings.Contains(err.Error(), "secret") {
		t.Errorf("Inventory: %v", err)
	}
}

func TestBadOrdersAreRefused(t *testing.T) {
	f := &fake{}
	c, srv := serve(t, f)
	for name, change := range map[string]func(*hostlink.Acquire){
		"no id":     func(a *hostlink.Acquire) { a.SessionID = "" },
		"path":      func(a *hostlink.Acquire) { a.SessionID = "a/b" },
		"kind":      func(a *hostlink.Acquire) { a.Kind = "car" },
		"no epoch":  func(a *hostlink.Acquire) { a.Epoch = 0 },
		"no expiry": func(a *hostlink.Acquire) { a.ExpiresAt = time.Time{} },
	} {
		a := acquire()
		change(&a)
		if _, err := c.Acquire(t.Context(), a); !apierr.Is(err, apierr.InvalidRequest) {
			t.Errorf("%s: %v", name, err)
		}
	}
	stranger := hostlink.NewClient(strings.TrimPrefix(srv.URL, "http://"), trust.New())
	defer stranger.Close()
	if _, err := stranger.Inventory(t.Context()); !apierr.Is(err, apierr.Unauthorized) {
		t.Errorf("another cluster: %v", err)
	}
	if _, err := stranger.Tunnel(t.Context(), "s", 3); !apierr.Is(err, apierr.Unauthorized) {
		t.Errorf("another cluster's tunnel: %v", err)
	}
	if _, err := c.Tunnel(t.Context(), "s", 2); !apierr.Is(err, apierr.NotFound) {
		t.Errorf("another epoch's tunnel: %v", err)
	}
}

func TestAcquireWhoseGatewayLeftIsTakenBack(t *testing.T) {
	f := &fake{acquired: make(chan struct{}), release: make(chan struct{})}
	c, srv := serve(t, f)
	ctx, leave := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { _, err := c.Acquire(ctx, acquire()); done <- err }()
	<-f.acquired
	leave()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	srv.CloseClientConnections() // the server has seen it once this returns and the context ends
	time.AfterFunc(50*time.Millisecond, func() { close(f.release) })
	deadline := time.Now().Add(5 * time.Second)
	for ended := 0; ended == 0; time.Sleep(time.Millisecond) {
		f.mu.Lock()
		ended = len(f.ended)
		f.mu.Unlock()
		if time.Now().After(deadline) {
			t.Fatal("the machine stays")
		}
	}
}

func TestStreamEndsCleanlyOnlyWithItsSession(t *testing.T) {
	three := func(end error) iter.Seq2[event.Event, error] {
		return func(yield func(event.Event, error) bool) {
			for i := range 3 {
				if !yield(event.Event{Seq: uint64(i), Type: event.Exec}, nil) { // the first, 0, is a sign of life
					return
				}
			}
			if end != nil {
				yield(event.Event{}, end)
			}
		}
	}
	for _, end := range []error{nil, errors.New("hostd stops")} {
		c, _ := serve(t, &fake{follow: three(end)})
		n := 0
		var last error
		for e, err := range c.FollowEvents(t.Context(), "s", 0, nil) {
			if last = err; err == nil && e.Seq > 0 {
				n++
			}
		}
		if n != 2 || (last != nil) != (end != nil) {
			t.Errorf("a stream that ended for %v gave %d events and then %v", end, n, last)
		}
	}
}

func TestWatch(t *testing.T) {
	f := &fake{notices: make(chan hostlink.Notice, 1)}
	c, _ := serve(t, f)
	f.notices <- hostlink.Notice{Ended: &hostlink.Tombstone{SessionID: "s"}}
	i := 0
	for n, err := range c.Watch(t.Context()) {
		if err != nil {
			t.Fatal(err)
		}
		if i == 0 && n.Inventory == nil || i == 1 && n.Ended == nil {
			t.Errorf("notice %d is %+v", i, n)
		}
		if i++; i == 2 {
			break
		}
	}
	close(f.notices) // too slow a watcher
	for _, err := range c.Watch(t.Context()) {
		if err != nil {
			t.Errorf("a cut watch: %v", err)
		}
	}
}

func TestTunnelCarriesBothWays(t *testing.T) {
	f := &fake{}
	c, _ := serve(t, f)
	conn, err := c.Tunnel(t.Context(), "s", 3)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		b := make([]byte, 4)
		_, _ = io.ReadFull(f.agent, b)
		_, _ = f.agent.Write(append(b, '!'))
		f.agent.Close()
	}()
	if _, err := conn.Write([]byte("ping")); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(conn); err != nil || string(b) != "ping!" {
		t.Errorf("%q %v", b, err)
	}
	conn.Close()
}
