package session

import (
	"context"
	"fmt"
	"io"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/hostd/pool"
	"github.com/berth-dev/berth/shared/agentlink"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/event"
	"github.com/berth-dev/berth/shared/hostlink"
	"github.com/berth-dev/berth/shared/session"
)

// world is one host with its disk and machines, which outlive its hostd, and
// the other hosts that it can reach.
type world struct {
	t      *testing.T
	name   string
	keeps  bool   // the driver keeps memory
	made   string // hash of the template of today, where it keeps memory
	cut    *cut
	book   *memBook
	events *memEvents
	snaps  *memSnapshots
	others map[string]*world
	ways   fakeWays

	host *Host
	pool *pool.Pool

	mu     sync.Mutex
	guests []*fakeGuest // guarded by mu
}

// worlds makes hosts that know each other.
func worlds(t *testing.T, keeps bool, names ...string) []*world {
	all := map[string]*world{}
	var list []*world
	for _, name := range names {
		w := &world{t: t, name: name, keeps: keeps, made: "template", cut: &cut{}, book: newMemBook(), events: newMemEvents(), snaps: newMemSnapshots(), others: all}
		w.book.cut, w.snaps.cut, w.events.cut = w.cut, w.cut, w.cut
		all[name] = w
		list = append(list, w)
		w.start()
	}
	return list
}

// fakeKeeper is a driver of which only the templates count.
type fakeKeeper struct {
	machine.Keeper
	made  string // of the one recipe
	snaps *memSnapshots
}

// unpacked is layers for a machine that is to come.
type unpacked struct{ layers int }

func (k fakeKeeper) AddLayers(_ context.Context, layers []machine.Layer) (func() error, error) {
	u := &unpacked{len(layers)}
	err := k.snaps.cut.do("unpack layers", func() error {
		k.snaps.mu.Lock()
		defer k.snaps.mu.Unlock()
		k.snaps.open[u] = true
		return nil
	})
	return func() error { return k.snaps.close(u) }, err
}

func (fakeKeeper) Name() string                                               { return "fake" }
func (fakeKeeper) CPUClass() string                                           { return "c" }
func (fakeKeeper) Recipe(machine.Spec) (string, error)                        { return "recipe", nil }
func (k fakeKeeper) Made(string) string                                       { return k.made }
func (fakeKeeper) HasTemplate(string) bool                                    { return true }
func (fakeKeeper) Template(_ context.Context, s machine.Spec) (string, error) { return s.Template, nil }

// start is hostd's: it sweeps what the book does not know and adopts the rest.
func (w *world) start() {
	w.t.Helper()
	for _, f := range w.alive() {
		w.book.mu.Lock()
		_, known := w.book.machines[f.id]
		w.book.mu.Unlock()
		if !known {
			_ = f.Stop(context.Background())
		}
	}
	w.pool = pool.New(pool.Config{MaxTotal: 8, Parallel: 1}, w.boot, quiet())
	cfg := Config{Name: w.name, Pool: w.pool, Book: w.book, Events: w.events, Snapshots: w.snaps, Rebuild: w.rebuild, Log: quiet(),
		Peers:  func(addr string) Peer { return peer{w.others[addr]} },
		Egress: w.ways.way}
	if w.keeps {
		cfg.Keeper = fakeKeeper{made: w.made, snaps: w.snaps}
	}
	w.host = NewHost(cfg)
	if err := w.host.Adopt(w.t.Context(), w.revive, func(machine.Spec) bool { return true }); err != nil {
		w.t.Fatal(err)
	}
}

// restart is hostd's death and next start.
func (w *world) restart() {
	w.t.Helper()
	w.host.Close()
	w.cut.revive()
	w.snaps.mu.Lock()
	clear(w.snaps.open) // leftovers that the next hostd sweeps
	w.snaps.mu.Unlock()
	w.start()
}

// end stops hostd and then the machines that it leaves running.
func (w *world) end() {
	w.host.Close()
	for _, f := range w.alive() {
		f.kill()
	}
}

func (w *world) guest(f *fakeGuest) *pool.Guest {
	var g *pool.Guest
	if w.keeps {
		g = keptGuest{f}.guest()
	} else {
		g = f.guest()
	}
	g.Forget = func() error { return w.book.DeleteMachine(f.id) }
	return g
}

// add makes a machine; what it is made from comes into it before it shows.
func (w *world) add(step string, h machine.Handle, set func(*fakeGuest)) (*fakeGuest, error) {
	f := newFakeGuest(h.Spec.ID, h.Spec.Kind)
	f.cut = w.cut
	set(f)
	err := w.book.PutMachine(h)
	if err == nil {
		err = w.cut.do(step, func() error {
			w.mu.Lock()
			defer w.mu.Unlock()
			w.guests = append(w.guests, f)
			return nil
		})
	}
	if err != nil {
		_ = w.book.DeleteMachine(h.Spec.ID)
	}
	return f, err
}

func (w *world) handle(kind session.Kind) machine.Handle {
	w.mu.Lock()
	defer w.mu.Unlock()
	return machine.Handle{Spec: machine.Spec{ID: fmt.Sprintf("%s%d-%d", w.name, len(w.guests), w.cut.steps()), Kind: kind}}
}

func (w *world) boot(_ context.Context, kind session.Kind) (*pool.Guest, error) {
	f, err := w.add("boot", w.handle(kind), func(*fakeGuest) {})
	if err != nil {
		return nil, err
	}
	return w.guest(f), nil
}

func (w *world) rebuild(_ context.Context, kind session.Kind, c machine.Capture, first func(machine.Handle) error) (*pool.Guest, error) {
	h := w.handle(kind)
	if err := first(h); err != nil {
		return nil, err
	}
	f, err := w.add("rebuild", h, func(f *fakeGuest) {
		f.state, f.still, f.frozen, f.started.SessionID = c.(*ahead).Capture.(*fakeCapture).state, true, true, "s"
		f.notices = []agentlink.Notice{{N: 1}, {N: 2}, {N: 3}} // its memory has what begin made it tell
	})
	if err != nil {
		return nil, err
	}
	return w.guest(f), nil
}

func (w *world) revive(_ context.Context, h machine.Handle) (*pool.Guest, error) {
	for _, f := range w.alive() {
		if f.id == h.Spec.ID {
			return w.guest(f), nil
		}
	}
	return nil, machine.ErrGone
}

func (w *world) alive() (some []*fakeGuest) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, f := range w.guests {
		select {
		case <-f.done:
		default:
			some = append(some, f)
		}
	}
	return some
}

// peer reaches another host, unless its hostd is dead.
type peer struct{ w *world }

func (p peer) Close() {}
func (p peer) down() error {
	if p.w.cut.isDead() {
		return apierr.New(apierr.Unavailable, "no answer")
	}
	return nil
}

func (p peer) Baggage(ctx context.Context, id, snapshot string) (hostlink.Baggage, error) {
	if err := p.down(); err != nil {
		return hostlink.Baggage{}, err
	}
	return p.w.host.Baggage(ctx, id, snapshot)
}

func (p peer) Events(_ context.Context, id string, after uint64, _ []event.Type, _ int) (hostlink.EventPage, error) {
	all := p.w.events.all(id)[after:]
	all = all[:min(2, len(all))]
	return hostlink.EventPage{Data: all, NextAfter: after + uint64(len(all))}, p.down()
}

func (p peer) Snapshot(ctx context.Context, id string, have ...string) (io.ReadCloser, error) {
	if err := p.down(); err != nil {
		return nil, err
	}
	return p.w.host.OpenSnapshot(ctx, id, have)
}

func (p peer) Parts(_ context.Context, id string) ([]string, error) {
	return p.w.host.Parts(id), p.down()
}

func (p peer) Ahead(ctx context.Context, id, opID string, in io.Reader) error {
	if err := p.down(); err != nil {
		return err
	}
	return p.w.host.Ahead(ctx, id, opID, in)
}

func (p peer) TemplateOf(_ context.Context, id string) (hostlink.TemplateOf, error) {
	if err := p.down(); err != nil {
		return hostlink.TemplateOf{}, err
	}
	return p.w.host.TemplateOf(id)
}

func (p peer) Template(context.Context, string) (io.ReadCloser, error) {
	return nil, apierr.New(apierr.NotFound, "no template")
}

// try gives an order as a gateway does: a dead hostd is started again and
// asked again, one that cannot just now is asked again if patient.
func (w *world) try(patient bool, order func() error) (err error) {
	for range 3 {
		err = order()
		dead := w.cut.isDead()
		if dead {
			w.restart()
		}
		if err == nil || !dead && !(patient && apierr.Is(err, apierr.Unavailable)) {
			return err
		}
		time.Sleep(time.Second)
	}
	return err
}

// begin gives w the session "s", which has lived a little.
func (w *world) begin() {
	w.t.Helper()
	if _, _, err := w.host.Acquire(w.t.Context(), order1("s", session.Shell, time.Hour)); err != nil {
		w.t.Fatal(err)
	}
	f := w.alive()[0]
	f.set(func(f *fakeGuest) { f.state = "counter 17" })
	for i := range 3 {
		f.tell(noticeOf(event.Event{Type: event.Exec, Text: fmt.Sprint(i)}))
	}
	synctest.Wait()
}
