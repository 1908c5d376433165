package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// region is a gossip pool that a test fills.
type region struct {
	mu      sync.Mutex
	proxyds []gossip.Member // guarded by mu
	changed chan struct{}   // guarded by mu
}

func (r *region) Members(role gossip.Role) []gossip.Member {
	r.mu.Lock()
	defer r.mu.Unlock()
	if role != gossip.Proxyd {
		return nil
	}
	return append([]gossip.Member(nil), r.proxyds...)
}

func (r *region) Changed() <-chan struct{} { r.mu.Lock(); defer r.mu.Unlock(); return r.changed }

func (r *region) set(addrs ...string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.proxyds = nil
	for _, a := range addrs {
		r.proxyds = append(r.proxyds, gossip.Member{Meta: gossip.Meta{Region: "local", Addr: a}})
	}
	if r.changed != nil {
		close(r.changed)
	}
	r.changed = make(chan struct{})
}

// proxyd accepts connections and gives their hellos; it keeps them open.
func proxyd(t *testing.T) (addr string, hellos chan proxylink.Hello) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	hellos = make(chan proxylink.Hello, 100)
	var open sync.WaitGroup
	t.Cleanup(func() { ln.Close(); open.Wait() })
	open.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			open.Go(func() {
				defer c.Close()
				if h, err := proxylink.ReadHello(c); err == nil {
					hellos <- h
					_, _ = io.Copy(c, c)
				}
			})
		}
	})
	return ln.Addr().String(), hellos
}

func deadAddr(t *testing.T) string {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func wayTo(r *region, secret *trust.Secret) *way {
	return newProxyds(r, "local", "h1", secret.Proof(), slog.New(slog.DiscardHandler)).way("s", 5).(*way)
}

// dialled opens a connection that the test closes.
func dialled(t *testing.T, w *way) net.Conn {
	t.Helper()
	c, err := w.Dial(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

func TestEgressTakesAnotherProxydAndWaitsForOne(t *testing.T) {
	good, hellos := proxyd(t)
	secret, r := trust.New(), &region{}
	w := wayTo(r, secret)
	w.Show([]byte("pass"))
	r.set(deadAddr(t), deadAddr(t), good)
	for range 5 { // whatever the order of tries
		dialled(t, w).Close()
		if h := <-hellos; h.SessionID != "s" || h.Epoch != 5 || h.Host != "h1" || string(h.Pass) != "pass" || !secret.Check(h.Proof) {
			t.Errorf("hello %+v", h)
		}
	}
	r.set(deadAddr(t))
	done := make(chan error)
	go func() {
		c, err := w.Dial(t.Context())
		if err == nil {
			c.Close()
		}
		done <- err
	}()
	r.set(good)
	if err := <-done; err != nil {
		t.Errorf("it did not wait: %v", err)
	}
}

func TestEgressWithoutProxyd(t *testing.T) {
	r := &region{}
	r.set()
	r.proxyds = []gossip.Member{{Meta: gossip.Meta{Region: "elsewhere", Addr: "127.0.0.1:1"}}}
	why := apierr.New(apierr.ProxyUnavailable, "none")
	ctx, cancel := context.WithTimeoutCause(t.Context(), 50*time.Millisecond, why)
	defer cancel()
	w := wayTo(r, trust.New())
	w.Show(nil)
	_, err := w.Dial(ctx)
	if !apierr.Is(err, apierr.ProxyUnavailable) || strings.Contains(err.Error(), "%!") {
		t.Errorf("%v", err)
	}
}

// A pass replaced while connections are open is the next ones' alone, long as
// it may be; open ones go on.
func TestEgressPassReplaced(t *testing.T) {
	addr, hellos := proxyd(t)
	r := &region{}
	r.set(addr)
	w := wayTo(r, trust.New())
	if _, err := w.Dial(t.Context()); !errors.Is(err, errShut) {
		t.Errorf("before the first pass: %v", err)
	}
	var open []net.Conn
	for _, pass := range []string{"one", strings.Repeat("p", 64<<10-1), "three"} {
		clear(w.met) // nobody is told but by connections
		w.Show([]byte(pass))
		open = append(open, dialled(t, w))
		if h := <-hellos; string(h.Pass) != pass {
			t.Errorf("showed %d bytes, want %d", len(h.Pass), len(pass))
		}
	}
	w.Shut()
	if _, err := w.Dial(t.Context()); !errors.Is(err, errShut) {
		t.Errorf("shut: %v", err)
	}
	for i, c := range open {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		if _, err := io.WriteString(c, "x"); err != nil {
			t.Error(err)
		}
		if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
			t.Errorf("connection %d was disturbed: %v", i, err)
		}
	}
	w.Show([]byte(strings.Repeat("p", 64<<10))) // longer than any pass: what was shown before stays
	if _, err := w.Dial(t.Context()); !errors.Is(err, errShut) {
		t.Errorf("a pass too long: %v", err)
	}
}

// A connection that waits for a proxyd shows what is the newest pass when there
// is one, and fails at once when the session stands still or ends.
func TestEgressWaiting(t *testing.T) {
	addr, hellos := proxyd(t)
	r := &region{}
	r.set(deadAddr(t))
	w := wayTo(r, trust.New())
	w.Show([]byte("old"))
	done := make(chan error)
	dial := func() {
		c, err := w.Dial(t.Context())
		if err == nil {
			c.Close()
		}
		done <- err
	}
	go dial()
	w.Show([]byte("new"))
	r.set(addr)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if h := <-hellos; string(h.Pass) != "new" {
		t.Errorf("it showed %q", h.Pass)
	}
	r.set()
	began := time.Now()
	go dial()
	w.Shut()
	if err := <-done; !errors.Is(err, errShut) || time.Since(began) > proxydWait/2 {
		t.Errorf("%v after %s", err, time.Since(began))
	}
}

// A proxyd that could not be reached is not the first to be tried for a while.
func TestEgressShunsWhoFailed(t *testing.T) {
	good, _ := proxyd(t)
	bad := deadAddr(t)
	r := &region{}
	r.set(bad, good)
	w := wayTo(r, trust.New())
	w.Show(nil)
	w.note(bad, errors.New("refused"))
	for range 20 {
		if all := w.addrs("s"); len(all) != 2 || all[0] != good {
			t.Fatalf("order %q", all)
		}
	}
	w.note(bad, nil)
	first := map[string]bool{}
	for i := 0; len(first) < 2; i++ { // both come first for some session, or this never ends
		id := fmt.Sprint("s", i)
		all := w.addrs(id)
		first[all[0]] = true
		r.set(all[1], all[0], deadAddr(t))
		if again := w.addrs(id); slices.Index(again, all[0]) > slices.Index(again, all[1]) {
			t.Errorf("session %s: order %q, then %q", id, all, again)
		}
		r.set(bad, good)
	}
}

// A proxyd that knows a session's pass is told of a new one ahead of any connection.
func TestEgressTellsOfANewPass(t *testing.T) {
	addr, hellos := proxyd(t)
	r := &region{}
	r.set(addr)
	w := wayTo(r, trust.New())
	w.Show([]byte("one"))
	dialled(t, w)
	for deadline := time.Now().Add(20 * time.Second); ; {
		w.Show([]byte("two")) // it may not come through in time on a busy computer
		if h := <-hellos; string(h.Pass) == "two" && h.SessionID == "s" {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the proxyd was not told")
		}
	}
}

// A proxyd that is told of a pass and neither answers nor is there keeps nobody.
func TestEgressTellsOnlyWhoListens(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0") // nobody accepts
	if err != nil {
		t.Fatal(err)
	}
	r := &region{}
	r.set(ln.Addr().String())
	w := wayTo(r, trust.New())
	w.Show([]byte("one"))
	dialled(t, w)
	began := time.Now()
	w.Show([]byte("two"))
	if took := time.Since(began); took < proxydTell/2 || len(w.met) != 1 {
		t.Errorf("it did not wait for the proxyd that is there: %s", took)
	}
	ln.Close()
	for deadline := time.Now().Add(20 * time.Second); len(w.met) != 0; w.Show([]byte("three")) {
		if time.Now().After(deadline) {
			t.Fatal("a proxyd that is gone is remembered")
		}
	}
}

func BenchmarkEgressDial(b *testing.B) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer ln.Close()
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	r := &region{}
	r.set(ln.Addr().String())
	w := wayTo(r, trust.New())
	w.Show(make([]byte, 2000))
	b.ReportAllocs()
	for b.Loop() {
		c, err := w.Dial(context.Background())
		if err != nil {
			b.Fatal(err)
		}
		c.Close()
	}
}
