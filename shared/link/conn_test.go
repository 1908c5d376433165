package link

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"io"
	"net"
	"testing"
	"time"

	"golang.org/x/net/nettest"
)

func TestNetConn(t *testing.T) {
	for _, network := range []string{"tcp", "unix"} {
		for _, o := range []Options{{}, {MinWindow: 2 << 10, MaxWindow: 8 << 10}} {
			nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
				r := newRig(t, network, o)
				c1, c2 = r.pair(o)
				return c1, c2, func() { c1.Close(); c2.Close() }, nil
			})
		}
	}
}

// TestHalfClose: the end arrives in order after the data, and the other
// direction goes on.
func TestHalfClose(t *testing.T) {
	r := newRig(t, "unix", Options{})
	gw, ag := r.pair(Options{})
	data := make([]byte, 300<<10)
	rand.Read(data)
	go func() {
		gw.Write(data)
		gw.CloseWrite()
	}()
	got, err := io.ReadAll(ag)
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	if _, err := gw.Write([]byte("x")); !errors.Is(err, ErrWriteClosed) {
		t.Fatalf("write after CloseWrite: %v", err)
	}
	go func() {
		ag.Write(data)
		ag.Close()
	}()
	if got, err = io.ReadAll(gw); err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	gw.Close()
	eventually(t, "the agent forgets the stream", func() bool { return r.l.Streams() == 0 })
}

// TestCloseDelivers: what was written before Close arrives, though the
// transport breaks at that moment.
func TestCloseDelivers(t *testing.T) {
	r := newRig(t, "unix", Options{})
	gw, ag := r.pair(Options{})
	data := make([]byte, 900<<10)
	rand.Read(data)
	if _, err := gw.Write(data); err != nil {
		t.Fatal(err)
	}
	r.cut()
	gw.Close()
	got, err := io.ReadAll(ag)
	if err != nil || !bytes.Equal(got, data) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	ag.Close()
	eventually(t, "the agent forgets the stream", func() bool { return r.l.Streams() == 0 })
}

func TestPeerClosed(t *testing.T) {
	r := newRig(t, "tcp", Options{})
	gw, ag := r.pair(Options{})
	ag.Close()
	if _, err := gw.Read(make([]byte, 1)); err != io.EOF {
		t.Fatalf("read: %v", err)
	}
	eventually(t, "writes fail", func() bool {
		_, err := gw.Write([]byte("x"))
		return errors.Is(err, ErrPeerClosed)
	})
}

func TestAbort(t *testing.T) {
	r := newRig(t, "tcp", Options{})
	gw, ag := r.pair(Options{})
	gw.Write([]byte("hello"))
	buf := make([]byte, 5)
	io.ReadFull(ag, buf)
	gw.Abort()
	if _, err := ag.Read(buf); !errors.Is(err, ErrReset) {
		t.Fatalf("read: %v", err)
	}
	if _, err := ag.Write(buf); !errors.Is(err, ErrReset) {
		t.Fatalf("write: %v", err)
	}
	ag.Close()
}

// TestResume: a ping-pong goes on over many cuts, from either side's silence.
func TestResume(t *testing.T) {
	r := newRig(t, "tcp", Options{})
	gw, ag := r.pair(Options{})
	go func() {
		io.Copy(ag, ag)
		ag.Close()
	}()
	for i := range 50 {
		msg := []byte{byte(i), 1, 2, 3}
		if _, err := gw.Write(msg); err != nil {
			t.Fatal(err)
		}
		if i%2 == 0 {
			r.cut()
		}
		got := make([]byte, 4)
		if _, err := io.ReadFull(gw, got); err != nil || !bytes.Equal(got, msg) {
			t.Fatalf("%v, %v", got, err)
		}
	}
	gw.Close()
}

func TestExpiry(t *testing.T) {
	o := Options{Keep: 50 * time.Millisecond}
	r := newRig(t, "unix", o)
	gw, ag := r.pair(o)
	r.setFail(errNoWay)
	r.cut()
	for _, c := range []*Conn{gw, ag} {
		_, err := c.Read(make([]byte, 1))
		var ne net.Error
		if !errors.As(err, &ne) || !ne.Timeout() || !errors.Is(err, ErrExpired) {
			t.Fatalf("read: %v", err)
		}
		c.Close()
	}
	eventually(t, "the agent forgets the stream", func() bool { return r.l.Streams() == 0 })
}

type goneError struct{}

func (goneError) Error() string   { return "the session ended" }
func (goneError) Permanent() bool { return true }

func TestPermanentError(t *testing.T) {
	r := newRig(t, "unix", Options{})
	gw, ag := r.pair(Options{})
	r.setFail(goneError{})
	r.cut()
	if _, err := gw.Read(make([]byte, 1)); !errors.Is(err, goneError{}) {
		t.Fatalf("read: %v", err)
	}
	ag.Abort()
	if _, err := Dial(context.Background(), r.dial, Options{}); !errors.Is(err, goneError{}) {
		t.Fatalf("dial: %v", err)
	}
}

// TestWake: a woken stream does not wait for its next try.
func TestWake(t *testing.T) {
	took := time.Hour
	for tries := 0; tries < 5 && took > 300*time.Millisecond; tries++ { // a computer that is busy adds to it now and then
		took = wake(t)
	}
	if took > 300*time.Millisecond {
		t.Fatalf("took %v", took)
	}
}

func wake(t *testing.T) (took time.Duration) {
	r := newRig(t, "unix", Options{})
	gw, ag := r.pair(Options{})
	defer ag.Abort()
	r.setFail(errNoWay)
	r.cut()
	eventually(t, "long pauses", func() bool {
		r.mu.Lock()
		defer r.mu.Unlock()
		return r.dials > 6
	})
	r.setFail(nil)
	start := time.Now()
	gw.Wake()
	gw.Write([]byte("x"))
	io.ReadFull(ag, make([]byte, 1))
	return time.Since(start)
}
