package proxylink

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is two ends of one TCP connection.
func pair(t *testing.T) (a, b *net.TCPConn) {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	c, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	s, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close(); s.Close() })
	for _, x := range []net.Conn{c, s} {
		_ = x.SetDeadline(time.Now().Add(20 * time.Second))
	}
	return c.(*net.TCPConn), s.(*net.TCPConn)
}

// rig is client ⇄ (near, far relayed) ⇄ server.
type rig struct {
	client, server *net.TCPConn
	up, down       atomic.Int64
	cancel         context.CancelCauseFunc
	result         chan error
}

func start(t *testing.T) *rig {
	client, near := pair(t)
	far, server := pair(t)
	for _, x := range []net.Conn{near, far} {
		_ = x.SetDeadline(time.Time{})
	}
	r := &rig{client: client, server: server, result: make(chan error, 1)}
	var ctx context.Context
	ctx, r.cancel = context.WithCancelCause(context.Background())
	t.Cleanup(func() { r.cancel(nil) })
	go func() {
		r.result <- Relay(ctx, near, far, func(n int64) { r.up.Add(n) }, func(n int64) { r.down.Add(n) })
	}()
	return r
}

func TestRelayHalfCloseAndCounts(t *testing.T) {
	r := start(t)
	request := make([]byte, 4<<20+12345) // copied at first, then spliced
	for i := range request {
		request[i] = byte(rand.Uint32())
	}
	go func() {
		_, _ = r.client.Write(request)
		_ = r.client.CloseWrite()
	}()
	h := sha256.New()
	n, err := io.Copy(h, r.server) // ends only if the half-close is passed on
	if err != nil || n != int64(len(request)) || !bytes.Equal(h.Sum(nil), func() []byte { s := sha256.Sum256(request); return s[:] }()) {
		t.Fatalf("server read %d bytes, %v", n, err)
	}
	if _, err := r.server.Write([]byte("late answer")); err != nil { // the other direction lives on
		t.Fatal(err)
	}
	r.server.Close()
	got, err := io.ReadAll(r.client)
	if err != nil || string(got) != "late answer" {
		t.Fatalf("client read %q, %v", got, err)
	}
	if err := <-r.result; err != nil {
		t.Fatal(err)
	}
	if r.up.Load() != int64(len(request)) || r.down.Load() != 11 {
		t.Fatalf("counted %d up, %d down", r.up.Load(), r.down.Load())
	}
}

func TestRelayPassesResetOn(t *testing.T) {
	r := start(t)
	if _, err := r.server.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(r.client, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	_ = r.server.SetLinger(0)
	r.server.Close()
	if _, err := r.client.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("client got %v, want a reset", err)
	}
	if err := <-r.result; err == nil {
		t.Fatal("a reset is no orderly end")
	}
}

// Counters know of bytes as soon as they passed: a long connection that says
// little is counted all the same.
func TestRelayCountsAtOnce(t *testing.T) {
	r := start(t)
	for i := int64(1); i <= 5; i++ {
		if _, err := r.client.Write([]byte("ping")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(r.server, make([]byte, 4)); err != nil {
			t.Fatal(err)
		}
		if _, err := r.server.Write([]byte("hello")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(r.client, make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		// The write that the server saw may not have returned yet where it was made.
		for deadline := time.Now().Add(10 * time.Second); r.up.Load() != 4*i || r.down.Load() != 5*i; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("counted %d up, %d down in turn %d", r.up.Load(), r.down.Load(), i)
			}
		}
	}
}

// What the far side gave counts, also where the near one does not take it: to
// the byte what its kernel was told to have arrived (TCP_INFO).
func TestRelayCountsWhatTheFarSideGave(t *testing.T) {
	r := start(t)
	full := make(chan struct{})
	go func() { // until everything between is full
		defer close(full)
		_ = r.server.SetWriteDeadline(time.Now().Add(time.Second))
		chunk := make([]byte, 64<<10)
		for {
			if _, err := r.server.Write(chunk); err != nil {
				return
			}
		}
	}()
	if _, err := io.ReadFull(r.client, make([]byte, 8<<20)); err != nil { // in bulk by now
		t.Fatal(err)
	}
	<-full
	_ = r.client.SetLinger(0)
	r.client.Close()
	if err := <-r.result; err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("a reset is no orderly end, and why it came about is said: %v", err)
	}
	// The reset has reached the server, so nothing moves any more.
	if _, err := r.server.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Fatalf("the server got %v, want a reset", err)
	}
	raw, err := r.server.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var info *unix.TCPInfo
	_ = raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) })
	if err != nil {
		t.Fatal(err)
	}
	// More than what was acknowledged may have come: while its window was shut the
	// kernel tries it with a segment more.
	if down, acked := r.down.Load(), int64(info.Bytes_acked); down < acked || down > acked+64<<10 {
		t.Errorf("counted %d down, the far side was told of %d", down, acked)
	}
}

// Whatever sizes come, in bulk or not, nothing is lost, doubled or reordered.
func TestRelayKeepsEveryByteProperty(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		sizes := rapid.SliceOfN(rapid.SampledFrom([]int{1, 7, 1000, copySize - 1, copySize, 3 * copySize, 700_000}), 1, 12).Draw(rt, "sizes")
		r := start(t)
		want, source := sha256.New(), rand.NewChaCha8([32]byte{1})
		total := int64(0)
		go func() {
			for _, n := range sizes {
				b := make([]byte, n)
				_, _ = source.Read(b)
				if _, err := r.client.Write(b); err != nil {
					return
				}
			}
			_ = r.client.CloseWrite()
		}()
		again := rand.NewChaCha8([32]byte{1})
		for _, n := range sizes {
			b := make([]byte, n)
			_, _ = again.Read(b)
			_, _ = want.Write(b)
			total += int64(n)
		}
		got := sha256.New()
		n, err := io.Copy(got, r.server)
		if err != nil || n != total || !bytes.Equal(got.Sum(nil), want.Sum(nil)) {
			rt.Fatalf("%d bytes of %d, %v", n, total, err)
		}
		r.server.Close()
		if err := <-r.result; err != nil || r.up.Load() != total {
			rt.Fatalf("%v, counted %d of %d", err, r.up.Load(), total)
		}
		r.client.Close()
	})
}

// A relay that moves bulk gives way to others, and loses nothing by it.
func TestRelayBesideBulk(t *testing.T) {
	quiet, bulk := start(t), start(t)
	const size = 64 << 20
	sent := make(chan error, 1)
	go func() {
		_, err := bulk.client.Write(make([]byte, size))
		sent <- errors.Join(err, bulk.client.CloseWrite())
	}()
	read := make(chan int64, 1)
	go func() {
		n, _ := io.Copy(io.Discard, bulk.server)
		read <- n
	}()
	one := make([]byte, 1)
	turns := int64(0)
	for n := int64(-1); n < 0; turns++ { // as long as the bulk takes
		for _, way := range [][2]*net.TCPConn{{quiet.client, quiet.server}, {quiet.server, quiet.client}} {
			if _, err := way[0].Write(one); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(way[1], one); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case n = <-read:
			if n != size {
				t.Errorf("%d bytes of %d", n, size)
			}
		default:
		}
	}
	if err := <-sent; err != nil {
		t.Error(err)
	}
	for _, r := range []*rig{quiet, bulk} {
		r.client.Close()
		r.server.Close()
		if err := <-r.result; err != nil {
			t.Error(err)
		}
	}
	if bulk.up.Load() != size || quiet.up.Load() != turns || quiet.down.Load() != turns {
		t.Errorf("counted %d of bulk, %d and %d of %d turns", bulk.up.Load(), quiet.up.Load(), quiet.down.Load(), turns)
	}
}

func TestRelayEndsWithContext(t *testing.T) {
	r := start(t)
	why := errors.New("session ended")
	r.cancel(why)
	if err := <-r.result; !errors.Is(err, why) {
		t.Fatalf("got %v", err)
	}
	for _, c := range []net.Conn{r.client, r.server} {
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("got %v, want a reset", err)
		}
	}
}

// Between two bare TCP connections the kernel moves the bytes (splice).
func BenchmarkRelay(b *testing.B) {
	ln, _ := net.Listen("tcp", "127.0.0.1:0")
	defer ln.Close()
	dial := func() (*net.TCPConn, *net.TCPConn) {
		c, _ := net.Dial("tcp", ln.Addr().String())
		s, _ := ln.Accept()
		return c.(*net.TCPConn), s.(*net.TCPConn)
	}
	client, near := dial()
	far, server := dial()
	go func() { _ = Relay(context.Background(), near, far, nil, nil) }()
	buf := make([]byte, 1<<20)
	b.SetBytes(1 << 20)
	go func() {
		for {
			if _, err := server.Write(buf); err != nil {
				return
			}
		}
	}()
	sink := make([]byte, 1<<20)
	for b.Loop() {
		if _, err := io.ReadFull(client, sink); err != nil {
			b.Fatal(err)
		}
	}
	client.Close()
	server.Close()
}
