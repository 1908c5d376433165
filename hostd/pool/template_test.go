package pool

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/session"
)

// keeper is a yardDriver that keeps memory; its templates take a minute.
type keeper struct {
	*yardDriver
	mu     sync.Mutex
	builds int               // guarded by mu
	fail   error             // of the next build, guarded by mu
	made   map[string]string // templates by recipe, guarded by mu
	agent  net.Listener
}

func (k *keeper) Template(ctx context.Context, spec machine.Spec) (string, error) {
	if spec.ID == "" || spec.Slot.Index != 7 {
		return "", errors.New("a build has no id and slot of its own")
	}
	k.mu.Lock()
	k.builds++
	fail := k.fail
	k.fail = nil
	k.mu.Unlock()
	select {
	case <-time.After(time.Minute):
		return "hash", fail
	case <-ctx.Done():
		return "", ctx.Err()
	}
}

func (k *keeper) CPUClass() string                      { return "c" }
func (k *keeper) Recipe(s machine.Spec) (string, error) { return string(s.Kind), nil }
func (k *keeper) Made(recipe string) string             { k.mu.Lock(); defer k.mu.Unlock(); return k.made[recipe] }
func (k *keeper) SetMade(recipe, hash string) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.made[recipe] = hash
	return nil
}
func (k *keeper) HasTemplate(string) bool                              { return true }
func (k *keeper) OpenTemplate(string) (io.ReadCloser, error)           { return nil, errors.New("none") }
func (k *keeper) AddTemplate(context.Context, string, io.Reader) error { return nil }
func (k *keeper) AddLayers(context.Context, []machine.Layer) (func() error, error) {
	return func() error { return nil }, nil
}
func (k *keeper) PruneTemplates(_ context.Context, keep func(string) bool, _ time.Duration) (removed []string, err error) {
	for _, hash := range []string{"a", "b", "c", "d"} {
		if !keep(hash) {
			removed = append(removed, hash)
		}
	}
	return removed, nil
}
func (k *keeper) built() int { k.mu.Lock(); defer k.mu.Unlock(); return k.builds }
func (k *keeper) Restore(ctx context.Context, spec machine.Spec, _ machine.Capture, persist func(machine.Handle) error) (machine.Kept, error) {
	if _, err := k.Start(ctx, spec, persist); err != nil {
		return nil, err
	}
	return kept{k}, nil
}

// Dial reaches an agent that notes what it is asked.
func (k *keeper) Dial(ctx context.Context) (net.Conn, error) {
	return (&net.Dialer{}).DialContext(ctx, "tcp", k.agent.Addr().String())
}

func (k *keeper) Start(ctx context.Context, spec machine.Spec, persist func(machine.Handle) error) (machine.Machine, error) {
	_, err := k.yardDriver.Start(ctx, spec, persist)
	return kept{k}, err
}

type kept struct{ *keeper }

func (kept) Restorable() error                                      { return nil }
func (kept) TemplateHash() string                                   { return "" }
func (kept) AddLayer(context.Context, int) ([]machine.Layer, error) { return nil, nil }
func (kept) Freeze(context.Context) error                           { return nil }
func (kept) Thaw(context.Context) error                             { return nil }
func (kept) Frozen() bool                                           { return true }
func (kept) Capture(context.Context) (machine.Capture, error)       { return nil, errors.New("none") }

func newKeeper() *keeper { return &keeper{yardDriver: &yardDriver{}, made: map[string]string{}} }

// alone is a host without siblings.
func alone() []Sibling { return nil }

func (k *keeper) slot(context.Context) (Slot, error) { return yardSlot{k.yardDriver}, nil }

func TestTemplateIsBuiltOnceWhoeverLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKeeper()
		ts := NewTemplates(k, k.slot, alone)
		defer ts.Close()
		spec := machine.Spec{Kind: session.Shell}
		short, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if err := ts.Ready(short, spec); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("who waits a second: %v", err)
		}
		var all sync.WaitGroup
		for range 5 {
			all.Go(func() {
				if err := ts.Ready(t.Context(), spec); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		if k.built() != 1 {
			t.Errorf("%d builds", k.built())
		}
		if !slices.Equal(k.steps, []string{"close slot"}) {
			t.Errorf("steps %q", k.steps)
		}
	})
}

func TestTemplateThatFailedIsTriedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		k := newKeeper()
		k.fail = errors.New("no memory")
		ts := NewTemplates(k, k.slot, alone)
		spec := machine.Spec{Kind: session.Shell}
		if err := ts.Ready(t.Context(), spec); err == nil || !strings.Contains(err.Error(), "no memory") {
			t.Errorf("a build that failed: %v", err)
		}
		if err := ts.Ready(t.Context(), spec); err != nil || k.built() != 2 {
			t.Errorf("the next: %v, %d builds", err, k.built())
		}
		go func() {
			if err := ts.Ready(t.Context(), machine.Spec{Kind: session.Browser}); err == nil {
				t.Error("a build that hostd's end cut")
			}
		}()
		synctest.Wait()
		ts.Close()
		if err := ts.Ready(t.Context(), machine.Spec{Kind: session.Both}); err == nil {
			t.Error("a build after the end")
		}
		synctest.Wait()
	})
}

// answering gives a keeper an agent that notes its requests.
func (k *keeper) answering(t *testing.T) (asked func() []string) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	k.agent = ln
	var mu sync.Mutex
	var all []string
	srv := &http.Server{Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		mu.Lock()
		defer mu.Unlock()
		all = append(all, r.URL.Path+" "+string(b))
		_, _ = io.WriteString(w, `{"ready":true}`)
	})}
	go func() { _ = srv.Serve(unprefaced{ln}) }()
	t.Cleanup(func() { srv.Close() })
	return func() []string { mu.Lock(); defer mu.Unlock(); return slices.Clone(all) }
}

// unprefaced takes the first byte of each connection off.
type unprefaced struct{ net.Listener }

func (u unprefaced) Accept() (net.Conn, error) {
	c, err := u.Listener.Accept()
	if err == nil {
		_, _ = io.ReadFull(c, make([]byte, 1))
	}
	return c, err
}

// A clone must be made one of its own kind before anything else is asked of it.
func TestCloneIsFreshBeforeItIsReady(t *testing.T) {
	k := newKeeper()
	asked := k.answering(t)
	b := k.bootstrap()
	b.Driver = k
	b.Templates = &Templates{builds: map[machine.Spec]*build{}}
	done := &build{done: make(chan struct{})}
	close(done.done)
	b.Templates.builds[b.spec(session.Shell)] = done
	g, err := b.Boot(t.Context(), session.Shell)
	if err != nil {
		t.Fatal(err)
	}
	g.Agent.Close()
	got := slices.Compact(asked()) // a look at the clock that was slow is taken again
	if len(got) != 3 || got[0] != "/control/clock " || !strings.HasPrefix(got[1], "/control/thaw ") || !strings.Contains(got[1], `"fresh":true`) || !strings.HasPrefix(got[2], "/control/state ") {
		t.Errorf("the agent was asked %q", got)
	}
}

// A restored machine is frozen: nobody there could answer.
func TestRestoreAsksTheAgentNothing(t *testing.T) {
	k := newKeeper()
	asked := k.answering(t)
	b := k.bootstrap()
	b.Driver = k
	first := ""
	g, err := b.Restore(t.Context(), session.Shell, nil, func(h machine.Handle) error {
		first = strings.Join(k.steps, ",")
		return nil
	})
	if err != nil || first != "slot" || len(asked()) != 0 {
		t.Errorf("%v; first was called after %q, the agent was asked %q", err, first, asked())
	}
	if g != nil {
		g.Agent.Close()
	}
	k.steps = nil
	broken := errors.New("disk full")
	if _, err := b.Restore(t.Context(), session.Shell, nil, func(machine.Handle) error { return broken }); !errors.Is(err, broken) {
		t.Error(err)
	}
	if want := []string{"slot", "forget", "close slot"}; !slices.Equal(k.steps, want) {
		t.Errorf("did %q, want %q", k.steps, want)
	}
	plain := (&yardDriver{}).bootstrap()
	if _, err := plain.Restore(t.Context(), session.Shell, nil, nil); err == nil {
		t.Error("a driver without memory restored one")
	}
}

func TestTwoThawsShareNoEntropy(t *testing.T) {
	a, b := Thaw(true), Thaw(true)
	if len(a.Entropy) < 64 || slices.Equal(a.Entropy, b.Entropy) {
		t.Errorf("%d bytes, equal %v", len(a.Entropy), slices.Equal(a.Entropy, b.Entropy))
	}
}
