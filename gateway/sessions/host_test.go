package sessions

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
	"github.com/berth-dev/berth/shared/trust"
)

// fakeHost speaks the host link and keeps what it was told.
type fakeHost struct {
	name   string
	server *httptest.Server

	mu       sync.Mutex // guards all below; tests use with
	running  map[string]hostlink.Status
	tombs    map[string]hostlink.Tombstone // not yet acknowledged
	settings map[string]hostlink.Settings
	acquires int
	patches  int
	// inventories counts those that were asked for or sent.
	inventories int
	down        bool                          // answers nobody
	atEnd       func()                        // called for each end, before it; nil: nothing
	refuse      error                         // of Acquire
	hold        chan struct{}                 // Acquire waits for it
	watchers    map[chan hostlink.Notice]bool // each with room
	events      http.HandlerFunc              // the stream of events

	// Of operations, see operate_host_test.go.
	targets   map[string]hostlink.Status // restored and held, by session
	snapshots map[string]bool
	gaveTo    string                   // whom the last capture was to be given ahead
	deleted   []string                 // snapshots, as session/id
	durable   bool                     // whatever is captured reaches the blob store
	full      bool                     // refuses restores
	world     *world                   // nil: nobody looks
	fault     func(step string) *fault // nil: none
}

func newFakeHost(t *testing.T, name string) *fakeHost {
	h := &fakeHost{name: name, targets: map[string]hostlink.Status{}, snapshots: map[string]bool{}, running: map[string]hostlink.Status{}, tombs: map[string]hostlink.Tombstone{},
		settings: map[string]hostlink.Settings{}, watchers: map[chan hostlink.Notice]bool{}}
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v1/sessions", h.acquire)
	mux.HandleFunc("GET /v1/sessions", func(w http.ResponseWriter, _ *http.Request) { answer(w, 200, h.inventory()) })
	mux.HandleFunc("PATCH /v1/sessions/{id}", h.patch)
	mux.HandleFunc("DELETE /v1/sessions/{id}", h.end)
	mux.HandleFunc("POST /v1/acks", h.ack)
	mux.HandleFunc("GET /v1/sessions/{id}/events/stream", h.streamEvents)
	mux.HandleFunc("GET /v1/watch", h.watch)
	h.serveOperations(mux)
	h.server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var down bool
		if h.with(func() { down = h.down }); down {
			panic(http.ErrAbortHandler)
		}
		mux.ServeHTTP(w, r)
	}))
	t.Cleanup(func() {
		h.server.CloseClientConnections()
		h.server.Close()
	})
	return h
}

func answer(w http.ResponseWriter, status int, v any) {
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

// with does something with what the host's lock guards.
func (h *fakeHost) with(do func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	do()
}

func (h *fakeHost) streamEvents(w http.ResponseWriter, r *http.Request) {
	var events http.HandlerFunc
	h.with(func() { events = h.events })
	events(w, r)
}

func (h *fakeHost) inventory() hostlink.Inventory {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.inventories++
	inv := hostlink.Inventory{Host: h.name}
	for _, machines := range []map[string]hostlink.Status{h.running, h.targets} {
		for _, s := range machines {
			inv.Sessions = append(inv.Sessions, s)
		}
	}
	for id := range h.snapshots {
		inv.Snapshots = append(inv.Snapshots, id)
		if h.durable {
			inv.Durable = append(inv.Durable, id)
		}
	}
	for _, t := range h.tombs {
		inv.Tombstones = append(inv.Tombstones, t)
	}
	return inv
}

func (h *fakeHost) acquire(w http.ResponseWriter, r *http.Request) {
	var a hostlink.Acquire
	_ = json.NewDecoder(r.Body).Decode(&a)
	h.mu.Lock()
	h.acquires++
	hold, refuse := h.hold, h.refuse
	h.mu.Unlock()
	if hold != nil {
		select {
		case <-hold:
		case <-r.Context().Done():
			return
		}
	}
	if refuse != nil {
		e := apierr.From(refuse)
		answer(w, e.Status(), e)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	st := hostlink.Status{SessionID: a.SessionID, Epoch: a.Epoch, Since: time.Now(), Version: a.Version, PassExpires: a.PassExpires}
	h.running[a.SessionID], h.settings[a.SessionID] = st, a.Settings
	answer(w, 201, st)
}

func (h *fakeHost) patch(w http.ResponseWriter, r *http.Request) {
	var s hostlink.Settings
	_ = json.NewDecoder(r.Body).Decode(&s)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.patches++
	id := r.PathValue("id")
	machines := h.running
	if st, ok := h.targets[id]; ok && st.Epoch == s.PassEpoch {
		machines = h.targets
	}
	st, ok := machines[id]
	if !ok {
		e := apierr.New(apierr.SessionNotRunning, "no such machine")
		answer(w, e.Status(), e)
		return
	}
	if st.Epoch == s.PassEpoch && s.Version >= st.Version {
		st.Version, st.PassExpires = s.Version, s.PassExpires
		machines[id], h.settings[id] = st, s
	}
	answer(w, 200, st)
}

func (h *fakeHost) end(w http.ResponseWriter, r *http.Request) {
	epoch, _ := strconv.ParseUint(r.FormValue("epoch"), 10, 64)
	var atEnd func()
	if h.with(func() { atEnd = h.atEnd }); atEnd != nil {
		atEnd()
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	t := hostlink.Tombstone{SessionID: r.PathValue("id"), Epoch: epoch, EndedAt: time.Now().UTC(), Reason: session.EndReason(r.FormValue("reason"))}
	if h.running[t.SessionID].Epoch <= epoch {
		delete(h.running, t.SessionID)
	}
	if h.targets[t.SessionID].Epoch <= epoch {
		delete(h.targets, t.SessionID)
	}
	h.tombs[t.SessionID] = t
	answer(w, 200, t)
}

func (h *fakeHost) ack(w http.ResponseWriter, r *http.Request) {
	var a hostlink.Acks
	_ = json.NewDecoder(r.Body).Decode(&a)
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range a.SessionIDs {
		delete(h.tombs, id)
	}
	w.WriteHeader(204)
}

func (h *fakeHost) watch(w http.ResponseWriter, r *http.Request) {
	ch := make(chan hostlink.Notice, 100)
	inv := h.inventory()
	ch <- hostlink.Notice{Inventory: &inv}
	h.mu.Lock()
	h.watchers[ch] = true
	h.mu.Unlock()
	ping := time.NewTicker(20 * time.Millisecond)
	defer ping.Stop()
	for enc := json.NewEncoder(w); ; {
		select {
		case <-ping.C:
			_ = enc.Encode(hostlink.Notice{Ping: true})
			w.(http.Flusher).Flush()
		case n := <-ch:
			_ = enc.Encode(n)
			w.(http.Flusher).Flush()
		case <-r.Context().Done():
			return
		}
	}
}

func (h *fakeHost) tell(n hostlink.Notice) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for ch := range h.watchers {
		ch <- n
	}
}

func (h *fakeHost) has(id string) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	_, ok := h.running[id]
	return ok
}

func (h *fakeHost) acquired() (n int)    { h.with(func() { n = h.acquires }); return n }
func (h *fakeHost) watched() (some bool) { h.with(func() { some = len(h.watchers) > 0 }); return some }
func (h *fakeHost) refuseWith(err error) { h.with(func() { h.refuse = err }) }
func (h *fakeHost) setFull()             { h.with(func() { h.full = true }) }

// breakDown lets the host answer nobody from now on. It keeps its port, for
// another test's host might get it.
func (h *fakeHost) breakDown() {
	h.with(func() { h.down = true })
	h.server.CloseClientConnections()
}

// told gives the settings that the host was told last.
func (h *fakeHost) told(id string) (s hostlink.Settings) {
	h.with(func() { s = h.settings[id] })
	return s
}

// run puts a machine there of which no gateway knows.
func (h *fakeHost) run(st hostlink.Status) { h.with(func() { h.running[st.SessionID] = st }) }

// bury lets a machine end by itself.
func (h *fakeHost) bury(t hostlink.Tombstone) {
	h.with(func() {
		delete(h.running, t.SessionID)
		h.tombs[t.SessionID] = t
	})
}

// fakeHosts is the hosts of a gateway: named fakes, each reachable or not.
type fakeHosts struct {
	secret *trust.Secret

	mu      sync.Mutex // guards all below
	hosts   map[string]*fakeHost
	away    map[string]bool
	class   map[string]string // CPU class by host
	region  map[string]string // by host; else local
	changed chan struct{}
	prefer  string // host with the most warm machines; empty: the longest name
	forgot  map[string]int
	dial    func(context.Context) (net.Conn, error)
	trip    func(*http.Request) (*http.Response, error)
}

// warm is called with the lock held.
func (f *fakeHosts) warm(name string) int {
	if name == f.prefer {
		return 100
	}
	return len(name)
}

func (f *fakeHosts) List() (out []placement.Host) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for name := range f.hosts {
		if !f.away[name] {
			out = append(out, placement.Host{Name: name, Region: cmp.Or(f.region[name], "local"), Driver: "fake", CPUClass: f.class[name], Addr: strings.TrimPrefix(f.hosts[name].server.URL, "http://"),
				Free: 10, Warm: map[session.Kind]int{session.Browser: f.warm(name)}})
		}
	}
	return out
}

func (f *fakeHosts) Changed() <-chan struct{} { f.mu.Lock(); defer f.mu.Unlock(); return f.changed }

func (f *fakeHosts) setAway(name string, away bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.away[name] = away
	close(f.changed)
	f.changed = make(chan struct{})
}

// fake gives a host by its name, whether it can be reached or not.
func (f *fakeHosts) fake(name string) *fakeHost {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.hosts[name]
}

func (f *fakeHosts) add(h *fakeHost) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hosts[h.name] = h
}

func (f *fakeHosts) setClass(name, class string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.class[name] = class
}

func (f *fakeHosts) setPrefer(name string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.prefer = name
}

func (f *fakeHosts) setRegion(name, region string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.region[name] = region
}

func (f *fakeHosts) Client(name string) (*hostlink.Client, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	h := f.hosts[name]
	if h == nil || f.away[name] {
		return nil, apierr.New(apierr.Unavailable, "host %s is away", name)
	}
	return hostlink.NewClient(strings.TrimPrefix(h.server.URL, "http://"), f.secret), nil
}

func (f *fakeHosts) Acquire(ctx context.Context, host string, a hostlink.Acquire) (hostlink.Status, error) {
	c, err := f.Client(host)
	if err != nil {
		return hostlink.Status{}, err
	}
	defer c.Close()
	return c.Acquire(ctx, a)
}

func (f *fakeHosts) End(ctx context.Context, host string, t hostlink.Tombstone) (hostlink.Tombstone, error) {
	c, err := f.Client(host)
	if err != nil {
		return t, err
	}
	defer c.Close()
	return c.End(ctx, t)
}

func (f *fakeHosts) DialAgent(ctx context.Context, _ session.Session) (net.Conn, error) {
	f.mu.Lock()
	dial := f.dial
	f.mu.Unlock()
	if dial == nil {
		return nil, errors.New("no agents here")
	}
	return dial(ctx)
}

func (f *fakeHosts) RoundTrip(_ session.Session, req *http.Request) (*http.Response, error) {
	f.mu.Lock()
	trip := f.trip
	f.mu.Unlock()
	if trip == nil {
		return nil, errors.New("no agents here")
	}
	return trip(req)
}

// setAgent says what becomes of streams and requests to agents.
func (f *fakeHosts) setAgent(dial func(context.Context) (net.Conn, error), trip func(*http.Request) (*http.Response, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.dial, f.trip = dial, trip
}

func (f *fakeHosts) Forget(id string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.forgot[id]++
}

func (f *fakeHosts) timesForgotten(id string) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.forgot[id]
}

// rig is a Service over a real record and fake hosts.
type rig struct {
	t      *testing.T
	home   string // of the record
	hosts  *fakeHosts
	host   *fakeHost // h1
	world  *world    // of twoHosts
	record *placement.Record
	use    *Service
	caller accounts.Caller

	proxyds fakeProxyds
}

// fakeProxyds answer everywhere but in some regions.
type fakeProxyds struct{ away sync.Map }

func (f *fakeProxyds) Reachable(region string) bool {
	_, away := f.away.Load(region)
	return !away
}

func newRig(t *testing.T) *rig {
	home := t.TempDir()
	record, err := placement.Open(placement.Config{Name: "g", Home: home, Addr: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler), Election: 20 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { record.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if err := errors.Join(record.WaitLeader(ctx), record.SetPlans(ctx, accounts.DefaultPlans())); err != nil {
		t.Fatal(err)
	}
	for _, project := range []string{"p", "other"} {
		if _, err := record.PutKey(ctx, placement.Project{ID: project, Name: project, Plan: "Free"}, placement.Key{Hash: project}); err != nil {
			t.Fatal(err)
		}
	}
	plan, _ := record.View().Plan("Free")
	host, secret := newFakeHost(t, "h1"), trust.New()
	r := &rig{t: t, home: home, host: host, record: record, caller: accounts.Caller{ProjectID: "p", Plan: plan},
		hosts: &fakeHosts{hosts: map[string]*fakeHost{"h1": host}, away: map[string]bool{}, class: map[string]string{}, region: map[string]string{}, changed: make(chan struct{}), secret: secret, forgot: map[string]int{}}}
	r.use = New(Config{PublicURL: "https://berth.example.com", Rates: accounts.Rates{Sizes: session.DefaultSizes, Prices: accounts.DefaultPrices()}, Proxyds: &r.proxyds,
		CreateDeadline: time.Minute, HostLostAfter: time.Hour, Name: "g", OperationDeadline: time.Minute, Secret: secret}, record, r.hosts, slog.New(slog.DiscardHandler))
	return r
}

func request() CreateRequest {
	return CreateRequest{Kind: session.Browser, Timeout: 300, Viewport: session.DefaultViewport, UserMetadata: json.RawMessage(`{}`), Captcha: "ask"}
}

func (r *rig) create() session.Session {
	r.t.Helper()
	v, _, err := r.use.Create(r.t.Context(), r.caller, request())
	if err != nil {
		r.t.Fatal(err)
	}
	return v.Session
}

// run starts reconciling for the rest of the test.
func (r *rig) run() {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); _ = r.use.Run(ctx) }()
	r.t.Cleanup(func() { cancel(); <-done })
}

// until waits for a condition of the world.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); {
		if time.Now().After(deadline) {
			t.Fatalf("never happened: %s", what)
		}
		time.Sleep(5 * time.Millisecond) // polling with a deadline
	}
}
