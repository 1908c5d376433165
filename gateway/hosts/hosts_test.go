package hosts

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// town is gossip as a test tells it.
type town struct {
	mu      sync.Mutex
	members []gossip.Member // guarded by mu
}

func (w *town) Members(role gossip.Role) (out []gossip.Member) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.members {
		if m.Role == role {
			out = append(out, m)
		}
	}
	return out
}

func (w *town) Changed() <-chan struct{} { return nil }

func (w *town) set(members ...gossip.Member) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.members = members
}

func host(name, addr string) gossip.Member {
	return gossip.Member{Name: name, Meta: gossip.Meta{Role: gossip.Hostd, Region: "local", Driver: "fake", Addr: addr, Free: 3, Warm: map[string]int{"shell": 2}}}
}

// newHostd is a host that answers with its name, and whose sessions have ended.
func newHostd(t *testing.T, name string) (addr string) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sessions", func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(hostlink.Status{SessionID: name})
	})
	mux.HandleFunc("GET /v1/sessions/{id}/tunnel", refuseTunnel)
	server := httptest.NewServer(mux)
	t.Cleanup(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return strings.TrimPrefix(server.URL, "http://")
}

func refuseTunnel(w http.ResponseWriter, _ *http.Request) {
	e := apierr.New(apierr.SessionNotRunning, "it has ended")
	w.WriteHeader(e.Status())
	_ = json.NewEncoder(w).Encode(e)
}

func TestHostsAreThoseOfGossip(t *testing.T) {
	w := &town{}
	h := New(w, trust.New(), &book{})
	defer h.Close()
	one := newHostd(t, "one")
	two := newHostd(t, "two")
	w.set(host("h", one), gossip.Member{Name: "p", Meta: gossip.Meta{Role: gossip.Proxyd}})
	list := h.List()
	if len(list) != 1 || list[0].Name != "h" || list[0].Free != 3 || list[0].Warm[session.Shell] != 2 {
		t.Errorf("%+v", list)
	}
	for _, addr := range []string{one, two} { // the second: it came back elsewhere
		w.set(host("h", addr))
		want := map[string]string{one: "one", two: "two"}[addr]
		if st, err := h.Acquire(t.Context(), "h", hostlink.Acquire{}); err != nil || st.SessionID != want {
			t.Errorf("at %s: %+v %v", addr, st, err)
		}
	}
	w.set()
	if _, err := h.Acquire(t.Context(), "h", hostlink.Acquire{}); !apierr.Is(err, apierr.Unavailable) || apierr.From(err).RetryAfter == 0 {
		t.Errorf("a host that has left: %v", err)
	}
	if _, err := h.End(t.Context(), "h", hostlink.Tombstone{}); !apierr.Is(err, apierr.Unavailable) {
		t.Errorf("a host that has left: %v", err)
	}
}

func TestAgentOfAnEndedSession(t *testing.T) {
	w := &town{}
	h := New(w, trust.New(), &book{})
	defer h.Close()
	addr := newHostd(t, "one")
	w.set(host("h", addr))
	s := session.Session{ID: "s", Host: "h", Epoch: 1}
	begin := time.Now()
	if _, err := h.DialAgent(t.Context(), s); !apierr.Is(err, apierr.SessionNotRunning) {
		t.Errorf("dial: %v", err)
	}
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, agentlink.PathFiles, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.RoundTrip(s, req); !apierr.Is(err, apierr.SessionNotRunning) {
		t.Errorf("round trip: %v", err)
	}
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("a refusal for good took %s", took)
	}
	ctx, cancel := context.WithCancelCause(t.Context())
	left := errors.New("the client left")
	cancel(left)
	if _, err := h.RoundTrip(s, req.WithContext(ctx)); !errors.Is(err, left) {
		t.Errorf("a client that left: %v", err)
	}
}

func TestStreamsOfEndedSessionsDoNotGather(t *testing.T) {
	h := New(&town{}, trust.New(), &book{})
	defer h.Close()
	for i := range 3 {
		h.transport(session.Session{ID: fmt.Sprint(i)})
	}
	h.Forget("0")
	h.agents["1"].used = time.Now().Add(-time.Hour) // made after its session's end
	h.transport(session.Session{ID: "2"})
	h.transport(session.Session{ID: "3"})
	if len(h.agents) != 2 || h.agents["2"] == nil || h.agents["3"] == nil {
		t.Errorf("kept %v", h.agents)
	}
}
