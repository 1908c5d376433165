package pool

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/berth-dev/berth/hostd/control"
	"github.com/berth-dev/berth/hostd/machine"
	"github.com/berth-dev/berth/shared/apierr"
	"github.com/berth-dev/berth/shared/session"
)

// guest is a machine and slot that count what is done to them.
type guest struct {
	id     string
	done   chan struct{}
	once   sync.Once
	mu     sync.Mutex
	stops  int // guarded by mu
	closes int // guarded by mu
}

func (g *guest) ID() string                                        { return g.id }
func (g *guest) Handle() machine.Handle                            { return machine.Handle{} }
func (g *guest) Dial(context.Context) (net.Conn, error)            { return nil, errors.New("no agent") }
func (g *guest) Promote(context.Context) error                     { return nil }
func (g *guest) Done() <-chan struct{}                             { return g.done }
func (g *guest) Info() machine.Slot                                { return machine.Slot{} }
func (g *guest) SetEgress(func(context.Context) (net.Conn, error)) {}
func (g *guest) die()                                              { g.once.Do(func() { close(g.done) }) }
func (g *guest) Close(context.Context) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closes++
	return nil
}
func (g *guest) Stop(context.Context) error {
	g.die()
	g.mu.Lock()
	defer g.mu.Unlock()
	g.stops++
	return nil
}

// yard boots guests, each in bootTime, unless told to fail.
type yard struct {
	mu     sync.Mutex
	all    []*guest // guarded by mu
	now    int      // boots under way, guarded by mu
	most   int      // guarded by mu
	fail   error    // guarded by mu
	failed int      // guarded by mu
}

const bootTime = time.Second

func (y *yard) boot(ctx context.Context, kind session.Kind) (*Guest, error) {
	y.mu.Lock()
	y.now++
	y.most = max(y.most, y.now)
	fail := y.fail
	y.mu.Unlock()
	defer func() { y.mu.Lock(); y.now--; y.mu.Unlock() }()
	select {
	case <-time.After(bootTime): // the bubble's clock
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	y.mu.Lock()
	defer y.mu.Unlock()
	if fail != nil {
		y.failed++
		return nil, fail
	}
	g := &guest{id: fmt.Sprint(len(y.all)), done: make(chan struct{})}
	y.all = append(y.all, g)
	return &Guest{Machine: g, Slot: g, Agent: control.New(g.Dial), Kind: kind, Born: time.Now()}, nil
}

func (y *yard) guest(i int) *guest { y.mu.Lock(); defer y.mu.Unlock(); return y.all[i] }

// balanced checks that whatever was stopped was stopped once, and how many live.
func (y *yard) balanced(t *testing.T, live int) {
	t.Helper()
	y.mu.Lock()
	defer y.mu.Unlock()
	for _, g := range y.all {
		g.mu.Lock()
		if g.stops > 1 || g.closes != g.stops {
			t.Errorf("machine %s: %d stops, %d closes", g.id, g.stops, g.closes)
		}
		if g.stops == 0 {
			live--
		}
		g.mu.Unlock()
	}
	if live != 0 {
		t.Errorf("%d machines more or less than expected", -live)
	}
}

func start(t *testing.T, cfg Config) (*Pool, *yard, func()) { return startOn(t, &yard{}, cfg) }

// startOn is start on a yard that is as a test wants it from the first boot on.
func startOn(t *testing.T, y *yard, cfg Config) (*Pool, *yard, func()) {
	p := New(cfg, y.boot, slog.New(slog.DiscardHandler))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); _ = p.Run(ctx) }()
	return p, y, func() { cancel(); <-done }
}

func TestPoolFillsToItsTargetsAndNoFurther(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Target: map[session.Kind]int{session.Browser: 3, session.Shell: 1}, Parallel: 2, MaxTotal: 10})
		time.Sleep(time.Minute)
		r, free := p.Ready(), p.Free()
		stop()
		y.mu.Lock()
		if r[session.Browser] != 3 || r[session.Shell] != 1 || y.most != 2 || free != 10 {
			t.Errorf("ready %v, %d at once, %d free", r, y.most, free)
		}
		y.mu.Unlock()
		y.balanced(t, 4)
	})
}

func TestFilledSaysWhatIsMissing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		y := &yard{fail: errors.New("no image")}
		p, y, stop := startOn(t, y, Config{Target: map[session.Kind]int{session.Browser: 1, session.Both: 1}, Parallel: 1, MaxTotal: 10})
		defer stop()
		want := func(after time.Duration, parts ...string) {
			t.Helper()
			time.Sleep(after)
			got := fmt.Sprint(p.Filled())
			for _, part := range parts {
				if !strings.Contains(got, part) {
					t.Errorf("%q does not say %q", got, part)
				}
			}
		}
		want(bootTime/2, "first machine of kind browser is being made")
		want(4*bootTime, "kind browser", "no image")
		y.mu.Lock()
		y.fail = nil
		y.mu.Unlock()
		want(3*bootTime, "kind both")
		want(4*bootTime, "<nil>")
		y.guest(0).die() // what is missing later is a matter of seconds
		want(2*time.Second, "<nil>")
	})
}

func TestAFullHostIsAsFilledAsItGets(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, _, stop := start(t, Config{Target: map[session.Kind]int{session.Browser: 2, session.Both: 1}, Parallel: 1, MaxTotal: 1})
		defer stop()
		time.Sleep(bootTime / 2)
		if p.Filled() == nil {
			t.Error("filled before anything waits")
		}
		time.Sleep(bootTime)
		if err := p.Filled(); err != nil {
			t.Error(err)
		}
	})
}

func TestMinimumComesFirstAndUnpaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Target: map[session.Kind]int{session.Browser: 4, session.Shell: 1}, Parallel: 1, Pace: time.Minute, MaxTotal: 10,
			Minimum: map[session.Kind]int{session.Browser: 2, session.Shell: 1}})
		time.Sleep(3*bootTime + bootTime/2)
		if r := p.Ready(); r[session.Browser] != 2 || r[session.Shell] != 1 {
			t.Errorf("the minimum waited for the pace: %v", r)
		}
		time.Sleep(50 * time.Second)
		if r := p.Ready(); r[session.Browser] != 2 {
			t.Errorf("the rest did not wait for the pace: %v", r)
		}
		time.Sleep(3 * time.Minute)
		if r := p.Ready(); r[session.Browser] != 4 {
			t.Errorf("the rest never came: %v", r)
		}
		stop()
		y.balanced(t, 5)
	})
}

func TestTakeIsWarmThenCold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Target: map[session.Kind]int{session.Browser: 1}, Parallel: 1, Pace: time.Hour, MaxTotal: 10})
		time.Sleep(2 * time.Second)
		begin := time.Now()
		a, warm, err := p.Take(t.Context(), session.Browser)
		if err != nil || !warm || time.Since(begin) != 0 {
			t.Errorf("warm %v after %s, %v", warm, time.Since(begin), err)
		}
		b, warm, err := p.Take(t.Context(), session.Browser)
		if err != nil || warm || time.Since(begin) != bootTime {
			t.Errorf("warm %v after %s, %v", warm, time.Since(begin), err)
		}
		if p.Free() != 8 {
			t.Errorf("%d free", p.Free())
		}
		for _, g := range []*Guest{a, b} {
			if err := p.Destroy(g); err != nil {
				t.Error(err)
			}
		}
		stop()
		if p.Free() != 10 {
			t.Errorf("%d free after all were destroyed", p.Free())
		}
		y.balanced(t, 0)
	})
}

func TestDeadAndOldMachinesAreReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Target: map[session.Kind]int{session.Shell: 2}, Parallel: 1, MaxAge: time.Hour, MaxTotal: 10})
		time.Sleep(10 * time.Second)
		y.guest(0).die()
		g, warm, err := p.Take(t.Context(), session.Shell)
		if err != nil || !warm || g.Machine == machine.Machine(y.guest(0)) {
			t.Errorf("took a dead machine: %v %v", warm, err)
		}
		time.Sleep(2 * time.Hour)
		if p.Ready()[session.Shell] != 2 {
			t.Errorf("ready %v", p.Ready())
		}
		stop()
		y.balanced(t, 3)
	})
}

func TestFullHostMakesRoomFromWaitingMachines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Target: map[session.Kind]int{session.Browser: 2}, Parallel: 1, MaxTotal: 2})
		time.Sleep(10 * time.Second)
		for range 2 {
			if _, warm, err := p.Take(t.Context(), session.Shell); err != nil || warm {
				t.Errorf("take: %v %v", warm, err)
			}
		}
		if _, _, err := p.Take(t.Context(), session.Shell); !apierr.Is(err, apierr.NoCapacity) {
			t.Errorf("a third: %v", err)
		}
		stop()
		y.balanced(t, 2)
	})
}

func TestFailedBootsDoNotSpinNorLeak(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := startOn(t, &yard{fail: errors.New("broken image")},
			Config{Target: map[session.Kind]int{session.Shell: 1}, Parallel: 1, MaxTotal: 2})
		time.Sleep(time.Minute)
		y.mu.Lock()
		if y.failed < 5 || y.failed > 25 {
			t.Errorf("%d boots in a minute", y.failed)
		}
		y.mu.Unlock()
		if _, _, err := p.Take(t.Context(), session.Shell); err == nil {
			t.Error("a machine came from a broken image")
		}
		y.mu.Lock()
		y.fail = nil
		y.mu.Unlock()
		time.Sleep(10 * time.Second)
		if p.Free() != 2 || p.Ready()[session.Shell] != 1 {
			t.Errorf("%d free, ready %v", p.Free(), p.Ready())
		}
		stop()
		y.balanced(t, 1)
	})
}

func TestClientThatLeavesDuringAColdStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Parallel: 1, MaxTotal: 2})
		ctx, cancel := context.WithTimeout(t.Context(), bootTime/2)
		defer cancel()
		if _, _, err := p.Take(ctx, session.Shell); err == nil {
			t.Error("Take outlived its context")
		}
		if p.Free() != 2 {
			t.Errorf("%d free", p.Free())
		}
		stop()
		y.balanced(t, 0)
	})
}

func TestRefillWaitsForCalmButNotForEver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const calm = 250 * time.Millisecond
		p, y, stop := start(t, Config{Target: map[session.Kind]int{session.Browser: 20}, Parallel: 1, MaxTotal: 100, Calm: calm})
		begun := func() int { y.mu.Lock(); defer y.mu.Unlock(); return len(y.all) + y.now }
		time.Sleep(time.Minute)
		var taken []*Guest
		take := func() {
			g, warm, err := p.Take(t.Context(), session.Browser)
			if err != nil || !warm {
				t.Fatalf("warm %v, %v", warm, err)
			}
			taken = append(taken, g)
		}
		full := begun()
		take()
		time.Sleep(calm - time.Millisecond)
		if n := begun() - full; n != 0 {
			t.Errorf("%d boots begun before it was calm", n)
		}
		time.Sleep(2 * time.Millisecond)
		if n := begun() - full; n != 1 {
			t.Errorf("%d boots begun when it was calm, want 1", n)
		}
		time.Sleep(time.Minute)
		full = begun()
		for range 9 { // never calm
			take()
			if n := begun() - full; n != 0 {
				t.Errorf("%d boots begun while machines are taken", n)
			}
			time.Sleep(calm/2 - time.Millisecond) // the ninth take comes before four times calm, its pause ends after
		}
		if n := begun() - full; n != 1 {
			t.Errorf("%d boots begun in four times calm of steady use, want 1", n)
		}
		stop()
		for _, g := range taken {
			if err := p.Destroy(g); err != nil {
				t.Error(err)
			}
		}
		y.balanced(t, begun()-len(taken))
	})
}

func TestOldMachinesGoOneAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Target: map[session.Kind]int{session.Shell: 3}, Parallel: 3, MaxAge: time.Hour, MaxTotal: 10})
		time.Sleep(time.Minute)
		for range 2 * 3600 {
			time.Sleep(time.Second)
			if n := p.Ready()[session.Shell]; n < 2 {
				t.Fatalf("%d machines wait", n)
			}
		}
		y.mu.Lock()
		if len(y.all) < 6 {
			t.Errorf("%d machines in all: old ones stay", len(y.all))
		}
		y.mu.Unlock()
		stop()
		y.balanced(t, 3)
	})
}

func TestCrowdOnAnEmptyPoolStartsAFewAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Parallel: 1, MaxTotal: 100})
		ctx, cancel := context.WithTimeout(t.Context(), 3*bootTime+bootTime/2)
		defer cancel()
		var all sync.WaitGroup
		var got, late atomic.Int32
		for range 10 {
			all.Go(func() {
				if _, _, err := p.Take(ctx, session.Shell); err == nil {
					got.Add(1)
				} else if errors.Is(err, context.DeadlineExceeded) {
					late.Add(1)
				}
			})
		}
		all.Wait()
		y.mu.Lock()
		if y.most != 2 || got.Load() != 6 || late.Load() != 4 {
			t.Errorf("%d at once; %d got one, %d were late", y.most, got.Load(), late.Load())
		}
		y.mu.Unlock()
		if p.Free() != 94 {
			t.Errorf("%d free", p.Free())
		}
		stop()
		y.balanced(t, 6)
	})
}

func TestCrowdTakesWhatTheRefillBrings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Parallel: 1, MaxTotal: 100})
		for range 2 {
			p.cold <- struct{}{} // two starts hang
		}
		done := make(chan bool)
		go func() { _, warm, err := p.Take(t.Context(), session.Shell); done <- warm && err == nil }()
		synctest.Wait()
		g, err := y.boot(t.Context(), session.Shell)
		if err != nil {
			t.Fatal(err)
		}
		p.Offer(g)
		if !<-done {
			t.Error("it did not take the machine that came")
		}
		stop()
		y.balanced(t, 1)
	})
}

func TestAdoptedMachinesWakeBeforeTheyWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, y, stop := start(t, Config{Parallel: 1, MaxTotal: 10})
		for _, err := range []error{nil, errors.New("asleep")} {
			g, errBoot := y.boot(t.Context(), session.Shell)
			if errBoot != nil {
				t.Fatal(errBoot)
			}
			p.Rejoin(g, func(context.Context, *Guest) error { time.Sleep(5 * bootTime); return err })
			if n := p.Ready()[session.Shell]; n != 0 {
				t.Errorf("%d wait before they are awake", n)
			}
		}
		time.Sleep(time.Minute)
		if n := p.Ready()[session.Shell]; n != 1 || p.Free() != 10 {
			t.Errorf("%d wait, %d free", n, p.Free())
		}
		stop()
		y.balanced(t, 1)
	})
}

// A machine that waits is whole; one that somebody waits for is not kept for that.
func TestWaitingMachinesAreFinished(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const finishTime = 10 * time.Second
		var fail atomic.Bool
		finished := 0
		p, y, stop := start(t, Config{Target: map[session.Kind]int{session.Browser: 1}, Parallel: 1, MaxTotal: 10,
			Finish: func(ctx context.Context, g *Guest) error {
				finished++
				if fail.Load() {
					return errors.New("no page")
				}
				time.Sleep(finishTime)
				return nil
			}})
		time.Sleep(bootTime + finishTime/2)
		if r := p.Ready()[session.Browser]; r != 0 {
			t.Errorf("%d machines wait before they are whole", r)
		}
		began := time.Now()
		g, warm, err := p.Take(t.Context(), session.Browser)
		if err != nil || warm || time.Since(began) != bootTime {
			t.Errorf("warm %v after %s, %v", warm, time.Since(began), err)
		}
		time.Sleep(finishTime)
		if r := p.Ready()[session.Browser]; r != 1 || finished != 1 {
			t.Errorf("%d machines wait, %d were finished", r, finished)
		}
		fail.Store(true)
		waiting, warm, err := p.Take(t.Context(), session.Browser)
		if err != nil || !warm {
			t.Fatal(warm, err)
		}
		time.Sleep(bootTime + time.Second)
		if r := p.Ready()[session.Browser]; r != 0 {
			t.Errorf("%d machines wait that are not whole", r)
		}
		stop()
		y.balanced(t, 2)
		_ = errors.Join(p.Destroy(g), p.Destroy(waiting))
	})
}
