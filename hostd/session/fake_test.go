package session

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"sync"

	"github.com/berth-dev/berth/hostd/control"
	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/session"
)

// fakeGuest is a machine whose agent answers from this process, over pipes.
type fakeGuest struct {
	id   string
	kind session.Kind
	done chan struct{}
	die  sync.Once

	mu      sync.Mutex
	started agentlink.Start
	notices []agentlink.Notice
	more    chan struct{}
	stops   int
	closed  int
	egress  bool
	dial    func(context.Context) (net.Conn, error)
	proxy   agentlink.Proxy // what the agent was told
	told    int             // how often
	deaf    bool            // the agent refuses to be told
	clients int
	had     bool
	hang    bool          // the agent takes connections and never answers
	refuse  bool          // the agent refuses Start
	slow    chan struct{} // Stop waits for it

	cut    *cut   // every effect goes through it
	state  string // what a capture keeps
	still  bool   // the processors are stopped
	frozen bool   // the agent has frozen the customer's processes
	fresh  bool   // a portable state went in
	layers int
	stay   []int // of each call of AddLayer
	old    bool  // of a monitor that is no more: nothing could restore its memory
}

func newFakeGuest(id string, kind session.Kind) *fakeGuest {
	return &fakeGuest{id: id, kind: kind, done: make(chan struct{}), more: make(chan struct{})}
}

func (f *fakeGuest) ID() string { return f.id }
func (f *fakeGuest) Handle() machine.Handle {
	return machine.Handle{Spec: machine.Spec{ID: f.id, Kind: f.kind}}
}
func (f *fakeGuest) Promote(context.Context) error { return f.cut.do("promote", nothing) }
func (f *fakeGuest) Done() <-chan struct{}         { return f.done }
func (f *fakeGuest) kill()                         { f.die.Do(func() { close(f.done) }) }

func (f *fakeGuest) Stop(context.Context) error {
	if f.slow != nil {
		<-f.slow
	}
	return f.cut.do("stop machine", func() error {
		f.kill()
		f.mu.Lock()
		defer f.mu.Unlock()
		f.stops++
		return nil
	})
}

// ended counts the calls of Stop.
func (f *fakeGuest) ended() int { f.mu.Lock(); defer f.mu.Unlock(); return f.stops }

func (f *fakeGuest) set(change func(*fakeGuest)) { f.mu.Lock(); defer f.mu.Unlock(); change(f) }

func (f *fakeGuest) Info() machine.Slot { return machine.Slot{} }
func (f *fakeGuest) SetEgress(dial func(context.Context) (net.Conn, error)) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.egress, f.dial = true, dial
}

// take is the agent's part in an order about the shell's proxy. Callers hold mu.
func (f *fakeGuest) take(p agentlink.Proxy) {
	if p.Version >= f.proxy.Version {
		f.proxy = p
	}
}

func (f *fakeGuest) Close(context.Context) error {
	return f.cut.do("close slot", func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.closed++
		return nil
	})
}

// tell appends a notice, as the agent would.
func (f *fakeGuest) tell(n agentlink.Notice) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n.N = uint64(len(f.notices) + 1)
	if n.Clients != nil {
		f.clients = *n.Clients
		f.had = f.had || f.clients > 0
	}
	f.notices = append(f.notices, n)
	close(f.more)
	f.more = make(chan struct{})
}

// Dial serves one connection of the agent.
func (f *fakeGuest) Dial(context.Context) (net.Conn, error) {
	select {
	case <-f.done:
		return nil, errors.New("machine is down")
	default:
	}
	f.mu.Lock()
	still := f.still
	f.mu.Unlock()
	if still || f.cut.isDead() {
		return nil, errors.New("nobody answers")
	}
	near, far := net.Pipe()
	go func() {
		preface := make([]byte, 1)
		if _, err := io.ReadFull(far, preface); err != nil || preface[0] != agentlink.PrefaceControl {
			far.Close()
			return
		}
		one := &oneConn{conn: far, closed: make(chan struct{})}
		srv := &http.Server{Handler: f}
		go func() { <-f.done; srv.Close() }()
		_ = srv.Serve(one)
	}()
	return near, nil
}

// oneConn is a listener with a single connection.
type oneConn struct {
	conn   net.Conn
	once   sync.Once
	closed chan struct{}
}

func (o *oneConn) Accept() (c net.Conn, err error) {
	err = net.ErrClosed
	o.once.Do(func() { c, err = o.conn, nil })
	if err != nil {
		<-o.closed
	}
	return c, err
}
func (o *oneConn) Close() error {
	select {
	case <-o.closed:
	default:
		close(o.closed)
	}
	return nil
}
func (o *oneConn) Addr() net.Addr { return o.conn.LocalAddr() }

func (f *fakeGuest) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	f.mu.Lock()
	hang, refuse := f.hang, f.refuse
	f.mu.Unlock()
	if hang {
		_, _ = io.Copy(io.Discard, r.Body) // before it the server does not see that the caller left
		<-r.Context().Done()
		return
	}
	switch r.URL.Path {
	case agentlink.ControlState:
		f.mu.Lock()
		defer f.mu.Unlock()
		_ = json.NewEncoder(w).Encode(agentlink.State{Ready: true, SessionID: f.started.SessionID, Clients: f.clients, HadClients: f.had, LastNotice: uint64(len(f.notices))})
	case agentlink.ControlStart:
		if refuse {
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		f.mu.Lock()
		defer f.mu.Unlock()
		_ = json.NewDecoder(r.Body).Decode(&f.started)
		f.take(f.started.Proxy)
		w.WriteHeader(http.StatusNoContent)
	case agentlink.ControlEvents:
		f.stream(w, r)
	case agentlink.ControlProxy: // no step of an operation
		f.mu.Lock()
		defer f.mu.Unlock()
		f.told++
		if f.deaf {
			http.Error(w, "no", http.StatusInternalServerError)
			return
		}
		var p agentlink.Proxy
		_ = json.NewDecoder(r.Body).Decode(&p)
		f.take(p)
		w.WriteHeader(http.StatusNoContent)
	default:
		if err := f.hold(w, r); errors.Is(err, errDead) {
			panic(http.ErrAbortHandler)
		} else if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
		}
	}
}

// hold answers what an operation asks of the agent.
func (f *fakeGuest) hold(w http.ResponseWriter, r *http.Request) error {
	if r.URL.Path == agentlink.ControlClock { // part of a thaw
		return json.NewEncoder(w).Encode(agentlink.Clock{Monotonic: 1})
	}
	return f.cut.do("agent "+r.URL.Path, func() error {
		f.mu.Lock()
		defer f.mu.Unlock()
		switch r.URL.Path {
		case agentlink.ControlFreeze:
			f.frozen = true
		case agentlink.ControlThaw:
			var t agentlink.Thaw
			_ = json.NewDecoder(r.Body).Decode(&t)
			if t.Proxy != nil {
				f.take(*t.Proxy)
			}
			f.frozen = false
		case agentlink.ControlExport:
			_, err := io.WriteString(w, f.state)
			return err
		case agentlink.ControlImport:
			b, err := io.ReadAll(r.Body)
			f.state, f.fresh = string(b), true
			return err
		}
		return nil
	})
}

func (f *fakeGuest) stream(w http.ResponseWriter, r *http.Request) {
	after, _ := strconv.ParseUint(r.FormValue("after"), 10, 64)
	w.WriteHeader(http.StatusOK)
	w.(http.Flusher).Flush()
	enc := json.NewEncoder(w)
	for {
		f.mu.Lock()
		todo, more := f.notices[min(int(after), len(f.notices)):], f.more
		f.mu.Unlock()
		for _, n := range todo {
			_ = enc.Encode(n)
			after = n.N
		}
		w.(http.Flusher).Flush()
		select {
		case <-more:
		case <-r.Context().Done():
			return
		case <-f.done:
			return
		}
	}
}

func (f *fakeGuest) guest() *pool.Guest {
	return &pool.Guest{Machine: f, Slot: f, Agent: control.New(f.Dial), Kind: f.kind}
}

// keptGuest is a fakeGuest whose driver keeps memory.
type keptGuest struct{ *fakeGuest }

func (k keptGuest) guest() *pool.Guest {
	g := k.fakeGuest.guest()
	g.Machine = k
	return g
}

func (k keptGuest) change(step string, change func()) error {
	return k.cut.do(step, func() error {
		k.mu.Lock()
		defer k.mu.Unlock()
		change()
		return nil
	})
}
func (k keptGuest) AddLayer(_ context.Context, stay int) (still []machine.Layer, err error) {
	err = k.change("add layer", func() {
		k.layers, k.stay = k.layers+1, append(k.stay, stay)
		still = make([]machine.Layer, k.layers)
	})
	return still, err
}
func (k keptGuest) Freeze(context.Context) error {
	return k.change("freeze", func() { k.still = true })
}
func (k keptGuest) Thaw(context.Context) error { return k.change("thaw", func() { k.still = false }) }
func (k keptGuest) TemplateHash() string       { return "template" }
func (k keptGuest) Restorable() error {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.old {
		return errors.New("started by another monitor")
	}
	return nil
}
func (k keptGuest) Frozen() bool { k.mu.Lock(); defer k.mu.Unlock(); return k.still }
func (k keptGuest) Capture(context.Context) (machine.Capture, error) {
	var c *fakeCapture
	err := k.change("capture", func() { c = &fakeCapture{state: k.state} })
	return c, err
}

// fakeCapture is a capture of which only the state counts.
type fakeCapture struct {
	machine.Capture
	state  string
	layers []machine.Layer
}

func (c *fakeCapture) Layers() []machine.Layer { return c.layers }

func (*fakeCapture) Close() error { return nil }

// Pages has none: what a memory holds is in state.
func (*fakeCapture) Pages() iter.Seq2[machine.Page, error] {
	return func(func(machine.Page, error) bool) {}
}

func quiet() *slog.Logger { return slog.New(slog.DiscardHandler) }
