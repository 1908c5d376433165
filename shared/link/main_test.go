package link

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a Listener behind a socket, and a dialler whose transports can be cut.
type rig struct {
	t    testing.TB
	l    *Listener
	ln   net.Listener
	wrap func(net.Conn) net.Conn // around the dialler's end, nil: none

	mu    sync.Mutex
	conns []net.Conn
	fail  error // what dialling gives instead
	dials int
}

func newRig(t testing.TB, network string, o Options) *rig {
	addr := "127.0.0.1:0"
	if network == "unix" {
		dir, err := os.MkdirTemp("", "link")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { os.RemoveAll(dir) })
		addr = filepath.Join(dir, "s")
	}
	ln, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, l: Listen(o), ln: ln}
	var serving sync.WaitGroup
	serving.Go(func() {
		for {
			nc, err := ln.Accept()
			if err != nil {
				return
			}
			serving.Go(func() { r.l.Serve(nc) })
		}
	})
	t.Cleanup(func() {
		ln.Close()
		r.l.Close()
		r.cut()
		serving.Wait()
	})
	return r
}

func (r *rig) dial(ctx context.Context) (net.Conn, error) {
	r.mu.Lock()
	r.dials++
	err := r.fail
	r.mu.Unlock()
	if err != nil {
		return nil, err
	}
	var d net.Dialer
	nc, err := d.DialContext(ctx, r.ln.Addr().Network(), r.ln.Addr().String())
	if err != nil {
		return nil, err
	}
	if r.wrap != nil {
		nc = r.wrap(nc)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.conns = append(r.conns, nc)
	return nc, nil
}

// cut closes every transport there is.
func (r *rig) cut() {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, nc := range r.conns {
		nc.Close()
	}
	r.conns = nil
}

// setFail makes dialling fail from now on, nil: work again.
func (r *rig) setFail(err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fail = err
}

// open dials a stream that does not outlive the test.
func (r *rig) open(ctx context.Context, o Options) (*Conn, error) {
	c, err := Dial(ctx, r.dial, o)
	if err == nil {
		r.t.Cleanup(c.Abort)
	}
	return c, err
}

// pair opens a stream and accepts it.
func (r *rig) pair(o Options) (gw, ag *Conn) {
	gw, err := r.open(context.Background(), o)
	if err != nil {
		r.t.Fatal(err)
	}
	nc, err := r.l.Accept()
	if err != nil {
		r.t.Fatal(err)
	}
	return gw, nc.(*Conn)
}

// eventually polls until ok holds.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: " + what)
		}
	}
}

var errNoWay = errors.New("no way")
