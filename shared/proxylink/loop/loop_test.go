package loop

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is two ends of one TCP connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp4", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	for _, x := range []net.Conn{c, s} {
		_ = x.SetDeadline(time.Now().Add(time.Minute))
	}
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// rig is client ⇄ (relay) ⇄ server.
type rig struct {
	client, server *net.TCPConn
	up, down       atomic.Int64
	relay          *Relay
	ended          chan error
}

// build makes a rig whose relay nobody runs yet.
func build(t *testing.T) (*rig, Ends) {
	t.Helper()
	client, near := pair(t)
	far, server := pair(t)
	r := &rig{client: client, server: server, ended: make(chan error, 1)}
	e := Ends{Up: func(n int64) { r.up.Add(n) }, Down: func(n int64) { r.down.Add(n) }}
	var err error
	if e.A, err = Take(near); err == nil {
		e.B, err = Take(far)
	}
	if err != nil {
		t.Fatal(err)
	}
	return r, e
}

func start(t *testing.T) *rig {
	t.Helper()
	r, e := build(t)
	var err error
	if r.relay, err = StartNew(e, func(err error) { r.ended <- err }); err != nil {
		t.Fatal(err)
	}
	return r
}

// turn sends a byte each way.
func (r *rig) turn(t *testing.T) {
	t.Helper()
	one := make([]byte, 1)
	for _, way := range [][2]net.Conn{{r.client, r.server}, {r.server, r.client}} {
		if _, err := way[0].Write(one); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(way[1], one); err != nil {
			t.Fatal(err)
		}
	}
}

// settle waits until ok says so.
func settle(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

func descriptors(t *testing.T) int {
	t.Helper()
	all, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

// still is a loop that the test turns by hand.
func still(t *testing.T) *Loop {
	t.Helper()
	l, err := newLoop(bulkQuota)
	if err != nil {
		t.Fatal(err)
	}
	l.running = true // so nobody starts it
	t.Cleanup(func() { l.closePipes(); closeFD(l.bell); closeFD(l.ep) })
	return l
}

func (r *rig) onto(l *Loop, e Ends) {
	r.relay = newRelay(e, func(err error) { r.ended <- err })
	r.relay.at.Store(l)
	r.relay.adopt(l)
}

// However much one relay has to move, another that has something gets its turn
// after a quota, and the first one moves on. Nothing here depends on time.
func TestAQuietRelayWaitsForAQuotaAtMost(t *testing.T) {
	l := still(t)
	bulk, be := build(t)
	quiet, qe := build(t)
	near := qe.A
	bulk.onto(l, be)
	quiet.onto(l, qe)
	const size = 64 << 20
	go func() { _, _ = bulk.server.Write(make([]byte, size)) }()
	go func() { _, _ = io.Copy(io.Discard, bulk.client) }()
	for sent := int64(0); bulk.down.Load() < size; {
		if _, err := quiet.client.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		sent++
		wait := []unix.PollFd{{Fd: int32(near), Events: unix.POLLIN}}
		if _, err := unix.Poll(wait, 60_000); err != nil && err != unix.EINTR || err == nil && wait[0].Revents == 0 {
			t.Fatalf("the byte did not come: %v", err)
		}
		before := bulk.down.Load()
		l.turn(-1)
		if moved := bulk.down.Load() - before; moved > bulkQuota+pipeSize {
			t.Fatalf("%d bytes in one turn", moved)
		}
		if got := quiet.up.Load(); wait[0].Revents != 0 && got != sent {
			t.Fatalf("the other relay moved %d of %d bytes", got, sent)
		} else if got != sent { // a signal came instead
			settle(t, "the byte passes", func() bool { l.turn(1); return quiet.up.Load() == sent })
		}
	}
	for _, r := range []*rig{bulk, quiet} {
		r.relay.fail(errors.New("over"))
		<-r.ended
	}
	if l.open != 0 {
		t.Errorf("%d sockets are left", l.open)
	}
}

// What was told of a socket that is closed is not told to the next one of the
// same number.
func TestLateEventsAreNobodys(t *testing.T) {
	l := still(t)
	a, _ := pair(t)
	fd, err := Take(a)
	if err != nil {
		t.Fatal(err)
	}
	told := map[string]int{}
	if err := l.Add(fd, waiter(func() { told["first"]++ }), true); err != nil {
		t.Fatal(err)
	}
	event := syscall.EpollEvent{Events: syscall.EPOLLIN, Fd: int32(fd), Pad: l.slots[fd].use}
	l.deliver(&event)
	l.Remove(fd)
	l.deliver(&event)
	if err := l.Add(fd, waiter(func() { told["second"]++ }), true); err != nil {
		t.Fatal(err)
	}
	l.deliver(&event)
	if told["first"] != 1 || told["second"] != 0 {
		t.Errorf("told: %v", told)
	}
	l.Close(fd)
	if l.open != 0 {
		t.Errorf("%d sockets are left", l.open)
	}
}

type waiter func()

func (w waiter) Ready(int, uint32) { w() }

// A relay goes to the loop for bulk and comes back, and no byte is lost on the way.
func TestBulkMovesAndComesBack(t *testing.T) {
	r := start(t)
	all, err := quicks()
	if err != nil {
		t.Fatal(err)
	}
	isQuick := func() bool { return r.relay.at.Load().bulk != nil }
	for round := range 3 {
		body := make([]byte, 8<<20+round)
		for i := range body {
			body[i] = byte(rand.Uint32())
		}
		sent := make(chan error, 1)
		go func() { _, err := r.client.Write(body); sent <- err }()
		got := make([]byte, len(body))
		if _, err := io.ReadFull(r.server, got); err != nil || <-sent != nil || sha256.Sum256(got) != sha256.Sum256(body) {
			t.Fatalf("round %d: %v", round, err)
		}
		settle(t, "it is bulk's", func() bool { return !isQuick() })
		for turns := 0; !isQuick(); turns++ {
			if turns > 10*smallReads {
				t.Fatal("it never comes back")
			}
			r.turn(t)
		}
	}
	r.client.Close()
	r.server.Close()
	if err := <-r.ended; err != nil {
		t.Fatal(err)
	}
	if len(all) == 0 {
		t.Error("no loops")
	}
}

// Relays that end in every way, at any moment, leave no descriptor, and each
// says once how it ended.
func TestNoDescriptorStays(t *testing.T) {
	warm := start(t)
	warm.turn(t)
	warm.client.Close()
	warm.server.Close()
	<-warm.ended
	before := descriptors(t)
	t.Run("all", func(t *testing.T) {
		var all sync.WaitGroup
		for i := range 120 {
			r := start(t)
			all.Go(func() { endSomehow(t, r, i) })
		}
		all.Wait()
	})
	settle(t, "as many descriptors as before", func() bool { return descriptors(t) <= before })
}

var errWhy = errors.New("why")

func endSomehow(t *testing.T, r *rig, i int) {
	size := []int{1, 5000, 3 << 20}[i%3]
	var moving sync.WaitGroup
	moving.Go(func() {
		_, _ = r.server.Write(make([]byte, size))
		if i%5 == 0 {
			_ = r.server.CloseWrite()
		}
	})
	want := error(nil)
	switch i % 5 {
	case 0: // in good order
		_, _ = io.Copy(io.Discard, r.client)
		_ = r.client.CloseWrite()
	case 1: // cut while bytes are on their way, perhaps while it moves between loops
		_, _ = io.CopyN(io.Discard, r.client, int64(size/2))
		r.relay.Cancel(errWhy)
		want = errWhy
	case 2: // cut at once
		r.relay.Cancel(errWhy)
		want = errWhy
	case 3: // reset by the client
		_, _ = io.CopyN(io.Discard, r.client, int64(size/2))
		_ = r.client.SetLinger(0)
		r.client.Close()
		want = syscall.ECONNRESET
	case 4: // reset by the site
		_, _ = io.CopyN(io.Discard, r.client, int64(size/2))
		_ = r.server.SetLinger(0)
		r.server.Close()
		want = syscall.ECONNRESET
	}
	err := <-r.ended
	moving.Wait()
	if want == nil && err != nil || want == errWhy && !errors.Is(err, errWhy) || want == syscall.ECONNRESET && err == nil {
		t.Errorf("%d: ended with %v, want %v", i, err, want)
	}
	r.client.Close()
	r.server.Close()
}

// What goes first goes first, also where nothing else is said.
func TestFirstBytesGoFirst(t *testing.T) {
	r, e := build(t)
	e.ToA, e.ToB = []byte("answer"), []byte("ahead")
	var err error
	if r.relay, err = StartNew(e, func(err error) { r.ended <- err }); err != nil {
		t.Fatal(err)
	}
	_, _ = r.client.Write([]byte(" and more"))
	_ = r.client.CloseWrite()
	if got, err := io.ReadAll(r.server); err != nil || string(got) != "ahead and more" {
		t.Errorf("%q %v", got, err)
	}
	r.server.Close()
	if got, err := io.ReadAll(r.client); err != nil || string(got) != "answer" {
		t.Errorf("%q %v", got, err)
	}
	if err := <-r.ended; err != nil || r.up.Load() != int64(len("ahead and more")) || r.down.Load() != 0 {
		t.Errorf("%v, %d up, %d down", err, r.up.Load(), r.down.Load())
	}
}

// The end of a context ends a relay that is full in both directions.
func TestJoinEndsWithItsContext(t *testing.T) {
	client, near := pair(t)
	far, server := pair(t)
	ctx, cancel := context.WithCancelCause(context.Background())
	defer cancel(nil)
	ended := make(chan error, 1)
	go func() { ended <- Join(ctx, near, far, nil, nil) }()
	var full sync.WaitGroup
	for _, c := range []*net.TCPConn{client, server} {
		full.Go(func() {
			if _, err := c.Write(make([]byte, 64<<20)); err == nil {
				t.Error("all of it was taken")
			}
		})
	}
	got := make([]byte, 1<<20) // bulk by now
	if _, err := io.ReadFull(client, got); err != nil || !bytes.Equal(got, make([]byte, len(got))) {
		t.Fatal(err)
	}
	cancel(errWhy)
	if err := <-ended; !errors.Is(err, errWhy) {
		t.Errorf("ended with %v", err)
	}
	full.Wait()
}

// A listener takes connections until it is closed, then nobody does.
func TestListenerEnds(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.77.3.9:0") // where nobody else listens
	if err != nil {
		t.Fatal(err)
	}
	addr := ln.Addr().String()
	x, err := Listen(ln.(*net.TCPListener), func(l *Loop, fd int) {
		_, _ = Write(fd, []byte("hello"))
		l.Close(fd)
	}, func(err error) { t.Error(err) })
	if err != nil {
		t.Fatal(err)
	}
	for range 40 {
		conn, err := net.Dial("tcp4", addr)
		if err != nil {
			t.Fatal(err)
		}
		_ = conn.SetDeadline(time.Now().Add(time.Minute))
		if got, err := io.ReadAll(conn); err != nil || string(got) != "hello" {
			t.Errorf("%q %v", got, err)
		}
		conn.Close()
	}
	x.Close()
	if conn, err := net.Dial("tcp4", addr); err == nil {
		conn.Close()
		t.Error("a closed listener took a connection")
	}
}
