package link

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// never is longer than any test: no heartbeat and no Keep comes to the rescue.
const never = time.Hour

// TestReadersLeave: several Reads wait when the Conn is closed, or only one has
// time left; what the other side says is read nevertheless.
func TestReadersLeave(t *testing.T) {
	o := Options{MinWindow: 4 << 10, MaxWindow: 4 << 10, Heartbeat: never, Keep: never}
	two := func(c *Conn) (wait func()) {
		var both sync.WaitGroup
		for range 2 {
			both.Go(func() { c.Read(make([]byte, 1000)) }) // its end is what matters
		}
		eventually(t, "two readers", func() bool {
			c.mu.Lock()
			defer c.mu.Unlock()
			return c.reading == readerApp && c.rd.n == 1 && !c.ticking
		})
		return both.Wait
	}
	t.Run("close", func(t *testing.T) {
		r := newRig(t, "unix", o)
		gw, ag := r.pair(o)
		wait := two(gw)
		gw.Close()
		wait()
		ag.Close()
		eventually(t, "both ends are over", func() bool {
			gw.mu.Lock()
			defer gw.mu.Unlock()
			return gw.over && r.l.Streams() == 0
		})
	})
	t.Run("deadline", func(t *testing.T) {
		r := newRig(t, "unix", o)
		gw, ag := r.pair(o)
		wait := two(gw)
		wrote := make(chan error, 1)
		go func() {
			_, err := gw.Write(make([]byte, 100<<10))
			wrote <- err
		}()
		gw.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		wait()
		go io.Copy(io.Discard, onlyRead{ag})
		select {
		case err := <-wrote:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(time.Minute):
			t.Fatal("nobody reads the acknowledgements")
		}
	})
}

// TestLastAckFails: the gateway knows that its last acknowledgement did not get
// through and dials once more, so that the agent need not wait for Keep.
func TestLastAckFails(t *testing.T) {
	o := Options{Heartbeat: never, Keep: never}
	r := newRig(t, "unix", o)
	var broken atomic.Bool
	r.wrap = func(nc net.Conn) net.Conn { return &deafening{nc, &broken} }
	gw, ag := r.pair(o)
	gw.CloseWrite()
	if _, err := io.Copy(io.Discard, onlyRead{ag}); err != nil {
		t.Fatal(err)
	}
	broken.Store(true)
	ag.Write([]byte("the last words"))
	ag.Close()
	if got, err := io.ReadAll(gw); err != nil || string(got) != "the last words" {
		t.Fatalf("%q, %v", got, err)
	}
	eventually(t, "the agent forgets the stream", func() bool { return r.l.Streams() == 0 })
	gw.Close()
}

// deafening fails one write when it is told to.
type deafening struct {
	net.Conn
	broken *atomic.Bool
}

func (d *deafening) Write(p []byte) (int, error) {
	if d.broken.CompareAndSwap(true, false) {
		return 0, errCut
	}
	return d.Conn.Write(p)
}

// TestReadFromSmallPeer: a chunk larger than all the other side takes at once.
func TestReadFromSmallPeer(t *testing.T) {
	r := newRig(t, "unix", Options{MinWindow: initialWindow, MaxWindow: initialWindow})
	gw, ag := r.pair(Options{})
	want := bytes.Repeat([]byte("0123456789abcdef"), 64<<10)
	go func() {
		gw.SetWriteDeadline(time.Now().Add(time.Minute))
		io.Copy(gw, onlyRead{bytes.NewReader(want)}) // what it lacks shows below
		gw.Close()
	}()
	if got, err := io.ReadAll(ag); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes of %d, %v", len(got), len(want), err)
	}
	ag.Close()
}

// TestStickyTimeout: a transport that repeats a write's timeout for ever, as TLS
// does, is replaced.
func TestStickyTimeout(t *testing.T) {
	o := Options{Heartbeat: never, Keep: never}
	r := newRig(t, "unix", o)
	var broken atomic.Bool
	r.wrap = func(nc net.Conn) net.Conn { return &sticky{Conn: nc, broken: &broken} }
	gw, ag := r.pair(o)
	broken.Store(true)
	gw.SetWriteDeadline(time.Now().Add(time.Hour))
	gw.Write([]byte("hello"))
	got := make([]byte, 5)
	ag.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := io.ReadFull(ag, got); err != nil || string(got) != "hello" {
		t.Fatalf("%q, %v", got, err)
	}
	ag.Close()
}

// sticky times out once and from then on.
type sticky struct {
	net.Conn
	broken *atomic.Bool
	stuck  atomic.Bool
}

func (s *sticky) Write(p []byte) (int, error) {
	if s.broken.CompareAndSwap(true, false) {
		s.stuck.Store(true)
	}
	if s.stuck.Load() {
		return 0, os.ErrDeadlineExceeded
	}
	return s.Conn.Write(p)
}

// TestDialGivesUp: a dialler that fails for good ends Dial with ctx.
func TestDialGivesUp(t *testing.T) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
	defer cancel()
	_, err := Dial(ctx, func(context.Context) (net.Conn, error) { return nil, errNoWay }, Options{})
	if !errors.Is(err, errNoWay) || !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
}
