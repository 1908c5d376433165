package hostlink

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/trust"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func client(t *testing.T, handle http.HandlerFunc) *Client {
	srv := httptest.NewServer(handle)
	c := NewClient(strings.TrimPrefix(srv.URL, "http://"), trust.New())
	t.Cleanup(func() {
		c.Close()
		srv.CloseClientConnections()
		srv.Close()
	})
	return c
}

func TestHostThatIsAway(t *testing.T) {
	ln, err := net.Listen("tcp", "127.71.3.8:0") // where nobody else listens, so that the port stays free
	if err != nil {
		t.Fatal(err)
	}
	ln.Close()
	c := NewClient(ln.Addr().String(), trust.New())
	defer c.Close()
	if _, err := c.Inventory(t.Context()); !apierr.Is(err, apierr.Unavailable) || apierr.From(err).RetryAfter == 0 {
		t.Errorf("Inventory: %v", err)
	}
	if _, err := c.Tunnel(t.Context(), "s", 1); !apierr.Is(err, apierr.Unavailable) {
		t.Errorf("Tunnel: %v", err)
	}
	for _, err := range c.Watch(t.Context()) {
		if !apierr.Is(err, apierr.Unavailable) {
			t.Errorf("Watch: %v", err)
		}
	}
}

func TestAnswersThatAreNotTheContract(t *testing.T) {
	for name, handle := range map[string]http.HandlerFunc{
		"not JSON": func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, "<html>") },
		"cut": func(w http.ResponseWriter, _ *http.Request) {
			fmt.Fprint(w, `{"host":`)
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		},
		"an error": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "<html>", http.StatusBadGateway) },
		"new code": func(w http.ResponseWriter, _ *http.Request) {
			http.Error(w, `{"error":{"code":"x"}}`, http.StatusConflict)
		},
		"long body": func(w http.ResponseWriter, _ *http.Request) { http.Error(w, strings.Repeat("x", 1<<20), 500) },
	} {
		c := client(t, handle)
		if _, err := c.Inventory(t.Context()); err == nil || apierr.From(err).Code != apierr.Internal || len(err.Error()) > 500 {
			t.Errorf("%s: %v", name, err)
		}
		if conn, err := c.Tunnel(t.Context(), "s", 1); err == nil {
			conn.Close()
			t.Errorf("%s: a tunnel", name)
		}
		for _, err := range follow[Notice](t.Context(), c, "/", 0) {
			if err == nil {
				t.Errorf("%s: a notice", name)
			}
		}
	}
}

func TestSilentHostCountsAsBroken(t *testing.T) {
	c := client(t, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, `{"ping":true}`)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	var last error
	n := 0
	for _, err := range follow[Notice](t.Context(), c, "/", 3*time.Second) {
		n, last = n+1, err
	}
	if n != 2 || last == nil || !strings.Contains(last.Error(), "silent") {
		t.Errorf("%d items, then %v", n, last)
	}
}

func TestCancelledCallsSayWhy(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	defer cancel(nil)
	why := errors.New("the client left")
	c := client(t, func(_ http.ResponseWriter, r *http.Request) {
		cancel(why)
		<-r.Context().Done()
	})
	if _, err := c.Inventory(ctx); !errors.Is(err, why) {
		t.Errorf("Inventory: %v", err)
	}
	tctx, tcancel := context.WithCancelCause(t.Context())
	defer tcancel(nil)
	cancel = tcancel
	if _, err := c.Tunnel(tctx, "s", 1); !errors.Is(err, why) {
		t.Errorf("Tunnel: %v", err)
	}
}

func TestTunnelWhoseAgentSpeaksFirst(t *testing.T) {
	c := client(t, func(w http.ResponseWriter, _ *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer conn.Close()
		fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\nearly", TunnelProtocol)
	})
	if conn, err := c.Tunnel(t.Context(), "s", 1); err == nil {
		conn.Close()
		t.Error("bytes of the agent would be lost")
	}
}
