package wsframe

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
	"go.uber.org/goleak"
	"pgregory.net/rapid"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// started runs a Pipe between two net.Pipes and gives its outer ends.
func started(t *testing.T, onControl func(byte, []byte)) (p *Pipe, in, out net.Conn, result <-chan error) {
	in, src := net.Pipe()
	dst, out := net.Pipe()
	p = NewPipe(dst, src, onControl)
	done := make(chan error, 1)
	go func() {
		err := p.Run()
		dst.Close()
		src.Close()
		done <- err
	}()
	t.Cleanup(func() { in.Close(); out.Close() })
	return p, in, out, done
}

func expect(t *testing.T, r io.Reader, want []byte) {
	t.Helper()
	got := make([]byte, len(want))
	if _, err := io.ReadFull(r, got); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("got %q, %v; want %q", got, err, want)
	}
}

func TestInjectIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, in, out, done := started(t, nil)
		ping := AppendPing(nil, []byte("hi"), false)
		go func() {
			if err := p.Inject(ping, time.Second); err != nil {
				t.Error(err)
			}
		}()
		expect(t, out, ping)
		in.Close()
		if err := <-done; err != nil {
			t.Fatal(err)
		}
		if err := p.Inject(ping, time.Second); !errors.Is(err, io.ErrClosedPipe) {
			t.Fatalf("after the end: %v", err)
		}
	})
}

// TestInjectInsideFrame: a frame waits for the end of the one that passes, and
// not for ever.
func TestInjectInsideFrame(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, in, out, done := started(t, nil)
		msg := frame(0x82, 10, false, []byte("0123456789"))
		go in.Write(msg[:5])
		expect(t, out, msg[:5])
		synctest.Wait()
		ping := AppendPing(nil, nil, false)
		start := time.Now()
		if err := p.Inject(ping, time.Second); err != ErrInsideFrame || time.Since(start) != time.Second {
			t.Fatalf("%v after %v", err, time.Since(start))
		}
		result := make(chan error, 1)
		go func() { result <- p.Inject(ping, time.Second) }()
		synctest.Wait()
		go in.Write(append(bytes.Clone(msg[5:]), msg...))
		expect(t, out, msg[5:])
		expect(t, out, ping)
		expect(t, out, msg)
		if err := <-result; err != nil {
			t.Fatal(err)
		}
		go in.Write(msg[:3])
		expect(t, out, msg[:3])
		in.Close()
		if err := <-done; err != io.ErrUnexpectedEOF {
			t.Fatal(err)
		}
		if err := p.Inject(ping, time.Second); err != ErrInsideFrame {
			t.Fatalf("after the end: %v", err)
		}
	})
}

// TestInjectClose: nothing passes after our close.
func TestInjectClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, in, out, done := started(t, nil)
		msg := frame(0x82, 3, false, []byte("abc"))
		go in.Write(msg[:4])
		expect(t, out, msg[:4])
		synctest.Wait()
		bye := AppendClose(nil, CloseRestart, "moved", false)
		go p.Inject(bye, time.Second)
		synctest.Wait()
		go in.Write(append(bytes.Clone(msg[4:]), msg...))
		expect(t, out, msg[4:])
		expect(t, out, bye)
		if err := <-done; err != ErrClosed {
			t.Fatal(err)
		}
		if n, err := out.Read(make([]byte, 9)); n != 0 || err != io.EOF {
			t.Fatal(n, err)
		}
		if err := p.Inject(bye, time.Second); err != ErrClosed {
			t.Fatal(err)
		}
	})
}

func TestBadFrameEndsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		p, in, out, done := started(t, nil)
		_ = out
		go in.Write([]byte{0x83, 0})
		if err := <-done; !errors.Is(err, ErrFrame) {
			t.Fatal(err)
		}
		if !p.AtBoundary() {
			t.Fatal("cannot be told any more")
		}
	})
}

// script is a reader that gives a stream in given pieces.
type script struct {
	b    []byte
	size func() int
}

func (s *script) Read(p []byte) (int, error) {
	if len(s.b) == 0 {
		return 0, io.EOF
	}
	n := copy(p[:min(len(p), max(1, s.size()))], s.b)
	s.b = s.b[n:]
	return n, nil
}

// TestPipeKeepsFrames: whatever the pieces and the moments of injection, dst
// gets src's bytes with injected frames between frames only.
func TestPipeKeepsFrames(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var in []byte
		var seen, want []byte
		for range rapid.IntRange(1, 20).Draw(t, "frames") {
			n := rapid.SampledFrom([]int{0, 3, 200, 70000}).Draw(t, "n")
			switch rapid.IntRange(0, 2).Draw(t, "kind") {
			case 0:
				in = AppendPong(in, []byte{byte(n)}, n%2 == 0)
				want = append(want, byte(n))
			default:
				in = append(in, frame(0x82, uint64(n), true, bytes.Repeat([]byte{7}, n))...)
			}
		}
		size := rapid.SampledFrom([]int{1, 50, 3000, 1 << 20}).Draw(t, "size")
		if len(in) > 10000 {
			size = max(size, 50)
		}
		var out bytes.Buffer
		p := NewPipe(&out, &script{in, func() int { return size }}, func(op byte, payload []byte) {
			if op == OpPong {
				seen = append(seen, payload...)
			}
		})
		mark := AppendPing(nil, []byte("injected"), false)
		var injected int
		var wg sync.WaitGroup
		wg.Go(func() {
			for range 3 {
				if p.Inject(mark, time.Minute) == nil {
					injected++
				}
			}
		})
		if err := p.Run(); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if injected != 3 {
			t.Fatalf("injected %d", injected)
		}
		if !bytes.Equal(seen, want) {
			t.Fatalf("saw control frames %v, want %v", seen, want)
		}
		check(t, out.Bytes(), func() int { return 1 << 20 })
		if got := bytes.ReplaceAll(out.Bytes(), mark, nil); !bytes.Equal(got, in) {
			t.Fatalf("%d bytes became %d", len(in), len(got))
		}
	})
}

// TestRealPeers: two real endpoints talk through Pipes, we ping one of them,
// see its pong, and close with a code.
func TestRealPeers(t *testing.T) {
	backend := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer ws.CloseNow()
		ws.SetReadLimit(1 << 20)
		for {
			typ, b, err := ws.Read(r.Context())
			if err != nil || ws.Write(r.Context(), typ, b) != nil {
				return
			}
		}
	}))
	defer backend.Close()
	front, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer front.Close()
	pipes := make(chan *Pipe, 1)
	pongs := make(chan string, 1)
	var relay sync.WaitGroup
	relay.Go(func() { relayOne(t, front, backend.Listener.Addr().String(), pipes, pongs) })

	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, "ws://"+front.Addr().String(), nil)
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	ws.SetReadLimit(1 << 20)
	down := <-pipes
	for _, n := range []int{0, 1, 5000, 300000} {
		msg := bytes.Repeat([]byte{byte(n)}, n)
		if err := ws.Write(ctx, websocket.MessageBinary, msg); err != nil {
			t.Fatal(err)
		}
		if _, got, err := ws.Read(ctx); err != nil || !bytes.Equal(got, msg) {
			t.Fatalf("%d bytes of %d, %v", len(got), n, err)
		}
	}
	if err := down.Inject(AppendPing(nil, []byte("there?"), false), time.Minute); err != nil {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() {
		_, _, err := ws.Read(ctx)
		closed <- err
	}()
	if got := <-pongs; got != "there?" {
		t.Fatalf("pong %q", got)
	}
	if err := down.Inject(AppendClose(nil, 4001, "paused", false), time.Minute); err != nil {
		t.Fatal(err)
	}
	var ce websocket.CloseError
	if err := <-closed; !errors.As(err, &ce) || ce.Code != 4001 || ce.Reason != "paused" {
		t.Fatalf("closed: %v", err)
	}
	relay.Wait()
}

// relayOne takes one connection, passes its upgrade on, and relays frames.
func relayOne(t *testing.T, front net.Listener, backend string, pipes chan<- *Pipe, pongs chan<- string) {
	client, err := front.Accept()
	if err != nil {
		t.Error(err)
		return
	}
	defer client.Close()
	server, err := net.Dial("tcp", backend)
	if err != nil {
		t.Error(err)
		return
	}
	defer server.Close()
	passHead(server, client)
	passHead(client, server)
	up := NewPipe(server, client, func(op byte, payload []byte) {
		if op == OpPong {
			pongs <- string(payload)
		}
	})
	down := NewPipe(client, server, nil)
	pipes <- down
	var both sync.WaitGroup
	both.Go(func() { down.Run() })
	both.Go(func() { up.Run(); server.Close() })
	both.Wait()
}

// passHead copies an HTTP head byte by byte.
func passHead(dst io.Writer, src io.Reader) {
	var head []byte
	b := make([]byte, 1)
	for !bytes.HasSuffix(head, []byte("\r\n\r\n")) {
		if _, err := src.Read(b); err != nil {
			return
		}
		head = append(head, b...)
	}
	dst.Write(head)
}
