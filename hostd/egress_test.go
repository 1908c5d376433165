package main

import (
	"context"
	"net"
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

// proxyd accepts connections and gives their hellos.
func proxyd(t *testing.T) (addr string, hellos chan proxylink.Hello) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	hellos = make(chan proxylink.Hello, 10)
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			if h, err := proxylink.ReadHello(c); err == nil {
				hellos <- h
			}
			c.Close()
		}
	}()
	return ln.Addr().String(), hellos
}

func deadAddr(t *testing.T) string {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	return ln.Addr().String()
}

func TestEgressTakesAnotherProxydAndWaitsForOne(t *testing.T) {
	good, hellos := proxyd(t)
	secret, r := trust.New(), &region{}
	dial := egressVia(r, "local", secret)("s", 5)
	r.set(deadAddr(t), deadAddr(t), good)
	for range 5 { // whatever the order of tries
		c, err := dial(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		if h := <-hellos; h.SessionID != "s" || h.Epoch != 5 || !secret.Check(h.Proof) {
			t.Errorf("hello %+v", h)
		}
	}
	r.set(deadAddr(t))
	done := make(chan error)
	go func() {
		c, err := dial(t.Context())
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
	_, err := dialProxyd(ctx, r, "local", proxylink.Hello{SessionID: "s"})
	if !apierr.Is(err, apierr.ProxyUnavailable) || strings.Contains(err.Error(), "%!") {
		t.Errorf("%v", err)
	}
}
