package link

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// ice is a machine that stands still now and then, and what the record says of
// it. Its transports break then, and its agent takes no others.
type ice struct {
	mu      sync.Mutex // guards what follows
	still   bool
	since   time.Time
	changed chan struct{}
	conns   []net.Conn
	err     error
}

func (i *ice) place() (bool, <-chan struct{}) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.changed == nil {
		i.changed = make(chan struct{})
	}
	return i.still, i.changed
}

// set freezes or thaws. The record says so first, as it does of an operation.
func (i *ice) set(still bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.still, i.since = still, time.Now()
	if i.changed != nil {
		close(i.changed)
		i.changed = nil
	}
	if still {
		for _, nc := range i.conns {
			nc.Close()
		}
		i.conns = nil
	}
}

// dialled refuses while the machine stands still, when nobody should dial but
// who asked the record a moment before.
func (i *ice) dialled() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if !i.still {
		return nil
	}
	if d := time.Since(i.since); d > time.Second {
		i.err = fmt.Errorf("dialled %v after the machine stood still", d)
	}
	return errNoWay
}

// took notes a transport; false: the machine stands still.
func (i *ice) took(nc net.Conn) bool {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.still {
		nc.Close()
		return false
	}
	i.conns = append(i.conns, nc)
	return true
}

func (i *ice) failed() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.err
}

// run freezes the machine of w as often as its plan says, each time for long.
func (i *ice) run(w *world, long time.Duration) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		for range w.plan.freezes {
			sleep(ctx, time.Duration(w.draw(int(200*time.Millisecond))))
			i.set(true)
			sleep(ctx, long)
			i.set(false)
		}
	}()
	return func() { cancel(); <-done }
}

func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
	case <-t.C:
	}
}

// TestChaosWithFreezes: the same property when the machine also stands still
// for three times Keep, again and again, in the middle of whatever goes on.
func TestChaosWithFreezes(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := &world{plan: drawPlan(rt, 100<<10, 20*time.Millisecond), pipe: netPipe}
		w.plan.freezes = rapid.IntRange(1, 5).Draw(rt, "freezes")
		var err error
		synctest.Test(t, func(*testing.T) {
			err = w.run()
			time.Sleep(time.Second) // chaos may still delay a read; virtual time
		})
		if err != nil {
			rt.Fatal(err)
		}
	})
}

// frozenPair is a stream over pipes whose machine i freezes. Time is virtual.
func frozenPair(t *testing.T, i *ice, place Place) (gw, ag *Conn) {
	l := Listen(Options{Keep: 365 * 24 * time.Hour})
	dial := func(context.Context) (net.Conn, error) {
		if err := i.dialled(); err != nil {
			return nil, err
		}
		near, far := net.Pipe()
		if !i.took(far) {
			return nil, errNoWay
		}
		go l.Serve(far)
		return near, nil
	}
	gw, err := Dial(context.Background(), dial, Options{Place: place})
	if err != nil {
		t.Fatal(err)
	}
	nc, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		gw.Abort()
		l.Close()
		time.Sleep(2 * time.Second) // each says so for a second at most
	})
	ag = nc.(*Conn)
	if _, err := gw.Write([]byte("a")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(ag, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return gw, ag
}

// TestStandstillOfDays: a stream outlives any pause and goes on in the moment
// the machine does; what both sides wrote meanwhile is there, once.
func TestStandstillOfDays(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var i ice
		gw, ag := frozenPair(t, &i, i.place)
		i.set(true)
		go gw.Write([]byte("from the gateway"))
		go ag.Write([]byte("from the agent"))
		time.Sleep(30 * 24 * time.Hour)
		thawed := time.Now()
		i.set(false)
		for c, want := range map[*Conn]string{gw: "from the agent", ag: "from the gateway"} {
			got := make([]byte, len(want))
			if _, err := io.ReadFull(c, got); err != nil || string(got) != want {
				t.Errorf("%q, %v", got, err)
			}
		}
		if d := time.Since(thawed); d > 0 {
			t.Errorf("the gap was %v longer than it had to be", d)
		}
		if err := i.failed(); err != nil {
			t.Error(err)
		}
	})
}

// TestKeepCountsAnew: when the machine should run again but cannot be reached,
// the stream has the whole Keep from then on, and no more.
func TestKeepCountsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var i ice
		var asleep atomic.Bool
		asleep.Store(true)
		gw, _ := frozenPair(t, &i, func() (bool, <-chan struct{}) {
			still, changed := i.place()
			return still && asleep.Load(), changed
		})
		time.Sleep(time.Minute)
		i.set(true)
		time.Sleep(time.Hour)
		asleep.Store(false)
		began := time.Now()
		i.set(true) // the record tells; dialling fails
		_, err := gw.Read(make([]byte, 1))
		if !errors.Is(err, ErrExpired) {
			t.Error(err)
		}
		if d := time.Since(began); d != 60*time.Second {
			t.Errorf("given up after %v", d)
		}
	})
}

// TestExpiresWithoutStandstill: the same break without a word in the record.
func TestExpiresWithoutStandstill(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var i ice
		gw, _ := frozenPair(t, &i, func() (bool, <-chan struct{}) { return false, nil })
		began := time.Now()
		i.set(true)
		if _, err := gw.Read(make([]byte, 1)); !errors.Is(err, ErrExpired) || time.Since(began) != 60*time.Second {
			t.Errorf("%v after %v", err, time.Since(began))
		}
	})
}

// TestDialWaitsForThaw: a stream to a machine that stands still opens when it
// goes on, or not at all when its caller has left.
func TestDialWaitsForThaw(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Listen(Options{})
		defer l.Close()
		var i ice
		i.set(true)
		dial := func(context.Context) (net.Conn, error) {
			if err := i.dialled(); err != nil {
				return nil, err
			}
			near, far := net.Pipe()
			go l.Serve(far)
			return near, nil
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if _, err := Dial(ctx, dial, Options{Place: i.place}); !errors.Is(err, context.DeadlineExceeded) {
			t.Error(err)
		}
		time.AfterFunc(time.Hour, func() { i.set(false) })
		c, err := Dial(context.Background(), dial, Options{Place: i.place})
		if err != nil {
			t.Fatal(err)
		}
		c.Abort()
		time.Sleep(2 * time.Second) // it says so for a second at most
		if err := i.failed(); err != nil {
			t.Error(err)
		}
	})
}

// TestEagerAfterChange: the host of the new place lets nobody in for a moment
// after the record has named it; the stream is there some 20 ms after it does.
func TestEagerAfterChange(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var i ice
		var closed atomic.Bool
		gw, ag := frozenPair(t, &i, func() (bool, <-chan struct{}) {
			still, changed := i.place()
			return still && !closed.Load(), changed
		})
		i.set(true)
		time.Sleep(time.Second)
		closed.Store(true)
		i.set(true) // committed; the machine is not thawed yet
		time.Sleep(777 * time.Millisecond)
		thawed := time.Now()
		i.mu.Lock()
		i.still = false // without a word
		i.mu.Unlock()
		go ag.Write([]byte("b"))
		if _, err := io.ReadFull(gw, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(thawed); d > 30*time.Millisecond {
			t.Errorf("the stream came %v late", d)
		}
	})
}

// TestClosedStreamWaitsForThaw: what was written before Close is delivered after
// a move that takes longer than Keep; a pause of a day is not waited for.
func TestClosedStreamWaitsForThaw(t *testing.T) {
	for _, tt := range []struct {
		still time.Duration
		kept  bool
	}{{5 * time.Minute, true}, {24 * time.Hour, false}} {
		synctest.Test(t, func(t *testing.T) {
			var i ice
			gw, ag := frozenPair(t, &i, i.place)
			i.set(true)
			if _, err := gw.Write([]byte("last words")); err != nil {
				t.Fatal(err)
			}
			gw.Close()
			time.Sleep(tt.still)
			i.set(false)
			ag.SetReadDeadline(time.Now().Add(time.Minute))
			got, err := io.ReadAll(ag)
			if kept := string(got) == "last words" && err == nil; kept != tt.kept {
				t.Errorf("after %v: %q, %v", tt.still, got, err)
			}
		})
	}
}

// TestAgentSwitchesAtOnce: a restored agent's transport is dead, which its
// kernel does not know: a write hangs in it, a read waits. The next hello takes
// over without waiting for either.
func TestAgentSwitchesAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Listen(Options{})
		defer l.Close()
		var dead *deadEnd
		dial := func(context.Context) (net.Conn, error) {
			near, far := net.Pipe()
			go l.Serve(far)
			if dead == nil {
				dead = &deadEnd{Conn: near, broken: make(chan struct{})}
				return dead, nil
			}
			return near, nil
		}
		gw, err := Dial(context.Background(), dial, Options{})
		if err != nil {
			t.Fatal(err)
		}
		defer gw.Abort()
		nc, _ := l.Accept()
		ag := nc.(*Conn)
		gw.Write([]byte("a"))
		io.ReadFull(ag, make([]byte, 1))

		dead.hangs.Store(true)
		want := make([]byte, 50<<10)
		for i := range want {
			want[i] = pattern(1, i)
		}
		wrote := make(chan error, 1)
		go func() {
			_, err := ag.Write(want)
			wrote <- err
		}()
		time.Sleep(time.Second)
		ag.mu.Lock()
		if !ag.flushing || ag.attempt != 1 {
			t.Error("no write hangs in the dead transport: the test proves nothing")
		}
		ag.mu.Unlock()
		began := time.Now()
		close(dead.broken)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(gw, got); err != nil || string(got) != string(want) {
			t.Errorf("%v", err)
		}
		if err := <-wrote; err != nil {
			t.Error(err)
		}
		if d := time.Since(began); d > 0 {
			t.Errorf("the switch took %v", d)
		}
		dead.Conn.Close()
		gw.Abort()
		time.Sleep(2 * time.Second)
	})
}

// deadEnd is a transport that breaks for its own side only: the other's writes
// hang, and it is not told of a close.
type deadEnd struct {
	net.Conn
	hangs  atomic.Bool
	broken chan struct{}
}

func (d *deadEnd) Close() error { return nil }

func (d *deadEnd) Read(p []byte) (int, error) {
	if d.hangs.Load() {
		<-d.broken
		return 0, errCut
	}
	return d.Conn.Read(p)
}
