package proxies

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/gateway/accounts"
	"github.com/berth-dev/berth/gateway/placement"
	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/gossip"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// proxyd is a control address over rows in memory, as package proxylink says.
type proxyd struct {
	t    *testing.T
	addr string
	srv  *http.Server

	mu    sync.Mutex // guards what follows
	rows  map[rowKey]proxylink.Row
	acked map[rowKey]proxylink.Row
	asked int
	quiet bool // streams say only that nothing changed
}

func startProxyd(t *testing.T, addr string) *proxyd {
	t.Helper()
	d := &proxyd{t: t, rows: map[rowKey]proxylink.Row{}, acked: map[rowKey]proxylink.Row{}}
	d.listen(addr)
	t.Cleanup(func() { d.kill() })
	return d
}

func (d *proxyd) listen(addr string) {
	d.t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		d.t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/ledger", func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(d.open(true)) })
	mux.HandleFunc("POST /v1/ledger/acks", d.acknowledge)
	mux.HandleFunc("GET /v1/ledger/stream", d.stream)
	srv := &http.Server{Handler: mux}
	d.addr, d.srv = ln.Addr().String(), srv
	go func() { _ = srv.Serve(ln) }()
}

// kill breaks all connections, as the death of the process does.
func (d *proxyd) kill() { _ = d.srv.Close() }

// carry counts bytes of a session.
func (d *proxyd) carry(session, incarnation string, at time.Time, up, down int64) {
	d.mu.Lock()
	defer d.mu.Unlock()
	r := proxylink.Row{SessionID: session, ProjectID: "p", Type: egress.Residential, Hour: at.Unix() / 3600, Incarnation: incarnation}
	known := d.rows[keyOf(r)]
	r.Up, r.Down = known.Up+up, known.Down+down
	d.rows[keyOf(r)] = r
}

func (d *proxyd) put(r proxylink.Row) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.rows[keyOf(r)] = r
}

// open gives the rows that are not acknowledged.
func (d *proxyd) open(asked bool) (l proxylink.Ledger) {
	d.mu.Lock()
	defer d.mu.Unlock()
	l.Rows = []proxylink.Row{}
	if asked {
		d.asked++
	} else if d.quiet {
		return l
	}
	for k, r := range d.rows {
		if a := d.acked[k]; a.Up < r.Up || a.Down < r.Down {
			l.Rows = append(l.Rows, r)
		}
	}
	return l
}

func (d *proxyd) acknowledge(w http.ResponseWriter, r *http.Request) {
	var l proxylink.Ledger
	if err := json.NewDecoder(r.Body).Decode(&l); err != nil {
		d.t.Error(err)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, r := range l.Rows {
		d.acked[keyOf(r)] = r
	}
	w.WriteHeader(http.StatusNoContent)
}

func (d *proxyd) stream(w http.ResponseWriter, r *http.Request) {
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		if json.NewEncoder(w).Encode(d.open(false)) != nil || http.NewResponseController(w).Flush() != nil {
			return
		}
		select {
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}

// dials listens where a killed one was, serves nobody, and tells of who came.
func dials(t *testing.T, addr string) <-chan struct{} {
	t.Helper()
	ln, err := net.Listen("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	came, ended := make(chan struct{}, 1000), make(chan struct{})
	go func() {
		defer close(ended)
		for conn, err := ln.Accept(); err == nil; conn, err = ln.Accept() {
			conn.Close()
			came <- struct{}{}
		}
	}()
	t.Cleanup(func() { ln.Close(); <-ended })
	return came
}

func (d *proxyd) allAcked() bool { return len(d.open(false).Rows) == 0 }

// town is gossip.
type town struct {
	mu      sync.Mutex
	members []gossip.Member
	changed chan struct{}
}

func newTown(all ...gossip.Member) *town { return &town{members: all, changed: make(chan struct{})} }

func (w *town) Members(role gossip.Role) (all []gossip.Member) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range w.members {
		if m.Role == role {
			all = append(all, m)
		}
	}
	return all
}

func (w *town) Changed() <-chan struct{} {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.changed
}

func (w *town) set(all ...gossip.Member) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.members = all
	close(w.changed)
	w.changed = make(chan struct{})
}

func member(name string, d *proxyd) gossip.Member {
	return gossip.Member{Name: name, Meta: gossip.Meta{Role: gossip.Proxyd, Region: "local", Addr: "127.0.0.1:1", Control: d.addr}}
}

// book is a real record that can be told not to lead, or to refuse.
type book struct {
	*placement.Record
	mu       sync.Mutex
	follower bool               // guarded by mu
	refuse   error              // guarded by mu
	hold     chan chan struct{} // guarded by mu: nil, or told of each booking, which waits for what it is given
}

func (b *book) set(follower bool, refuse error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.follower, b.refuse = follower, refuse
}

func (b *book) Leader() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return !b.follower && b.Record.Leader()
}

func (b *book) RecordUsage(ctx context.Context, rows []proxylink.Row) error {
	b.mu.Lock()
	err, hold := b.refuse, b.hold
	b.mu.Unlock()
	if hold != nil {
		goOn := make(chan struct{})
		select {
		case hold <- goOn:
			select {
			case <-goOn:
			case <-ctx.Done():
			}
		case <-ctx.Done():
		}
	}
	if err != nil {
		return err
	}
	return b.Record.RecordUsage(ctx, rows)
}

func (b *book) platform() int64 { return b.View().PlatformBytes("p", now) }

func record(t *testing.T) *book {
	t.Helper()
	r, err := placement.Open(placement.Config{Name: "gw", Home: t.TempDir(), Addr: "127.0.0.1:0", Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = r.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := r.WaitLeader(ctx); err != nil {
		t.Fatal(err)
	}
	if err := r.SetPlans(ctx, accounts.DefaultPlans()); err != nil {
		t.Fatal(err)
	}
	return &book{Record: r}
}

// run starts following; the result is the view.
func run(t *testing.T, w *town, b *book) *Proxies { return runAs(t, trust.New(), w, b) }

func runAs(t *testing.T, secret *trust.Secret, w *town, b *book) *Proxies {
	t.Helper()
	p := New(w, secret, b, slog.New(slog.NewTextHandler(io.Discard, nil)))
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() { defer close(ended); _ = p.Run(ctx) }()
	t.Cleanup(func() { cancel(); <-ended })
	return p
}

func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s does not come about", what)
		}
	}
}

var now = time.Date(2026, 11, 21, 10, 30, 0, 0, time.UTC)
