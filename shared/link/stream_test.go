package link

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coder/websocket"
)

// TestRefusals: each reason reaches the dialler as its own error.
func TestRefusals(t *testing.T) {
	lineage := [16]byte{1, 2, 3}
	for name, c := range map[string]struct {
		spoil func(h *hello)
		want  error
	}{
		"wrong secret":  {func(h *hello) { h.secret[0]++ }, ErrSecret},
		"unknown":       {func(h *hello) { h.id[0]++ }, ErrUnknownStream},
		"other lineage": {func(h *hello) { h.lineage[0]++ }, ErrLineage},
		"bad offsets":   {func(h *hello) { h.received = 1 << 40 }, errProtocol},
		"no hello":      {nil, errProtocol},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t, "tcp", Options{Lineage: lineage})
			r.wrap = func(nc net.Conn) net.Conn { return &spoiler{Conn: nc, spoil: c.spoil} }
			gw, ag := r.pair(Options{})
			gw.Write([]byte("x"))
			io.ReadFull(ag, make([]byte, 1))
			ag.Write([]byte("y"))
			io.ReadFull(gw, make([]byte, 1))
			r.cut()
			if _, err := gw.Read(make([]byte, 1)); !errors.Is(err, c.want) && !errors.Is(c.want, errProtocol) {
				t.Fatalf("read: %v, want %v", err, c.want)
			}
		})
	}
	r := newRig(t, "tcp", Options{Lineage: lineage})
	gw, err := r.open(context.Background(), Options{Lineage: [16]byte{9}})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := gw.Read(make([]byte, 1)); !errors.Is(err, ErrLineage) {
		t.Fatalf("first hello with another lineage: %v", err)
	}
}

// spoiler alters resuming hellos.
type spoiler struct {
	net.Conn
	spoil func(h *hello)
}

func (s *spoiler) Write(p []byte) (int, error) {
	h, err := parseHello(p)
	if err != nil || h.flags&flagResume == 0 {
		return s.Conn.Write(p)
	}
	if s.spoil == nil {
		return s.Conn.Write(make([]byte, helloLen))
	}
	s.spoil(&h)
	return s.Conn.Write(h.encode())
}

// TestLateTransport: a hello that arrives after a newer one changes nothing,
// and one of an ended stream opens none.
func TestLateTransport(t *testing.T) {
	r := newRig(t, "tcp", Options{})
	gw, ag := r.pair(Options{})
	gw.Write([]byte("a"))
	io.ReadFull(ag, make([]byte, 1))
	say := func() error {
		nc, err := net.Dial("tcp", r.ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		defer nc.Close()
		h := hello{id: gw.id, secret: gw.secret, attempt: 1, buffer: initialWindow, step: 1}
		nc.Write(h.encode())
		w, _, err := readWelcome(nc)
		if err != nil {
			t.Fatal(err)
		}
		return refusalError(w.refusal)
	}
	if err := say(); err != errStale {
		t.Fatalf("late: %v", err)
	}
	ag.Write([]byte("b"))
	if _, err := io.ReadFull(gw, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	gw.Abort()
	eventually(t, "the agent forgets", func() bool { return r.l.Streams() == 0 })
	if err := say(); err != ErrUnknownStream {
		t.Fatalf("after the end: %v", err)
	}
}

// TestSlowReader: a writer stops at the window, and goes on when there is room.
func TestSlowReader(t *testing.T) {
	const window = 256 << 10
	o := Options{MinWindow: window, MaxWindow: window}
	r := newRig(t, "tcp", o)
	gw, ag := r.pair(o)
	b := make([]byte, 10000)
	total := 0
	for stopped, end := false, time.Now().Add(time.Minute); !stopped; {
		ag.SetWriteDeadline(time.Now().Add(200 * time.Millisecond))
		n, err := ag.Write(b)
		total += n
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded): // at the window, or the computer is busy
			stopped = total >= window/2 || time.Now().After(end)
		case err != nil:
			t.Fatal(err)
		}
	}
	if total < window/2 || total > window {
		t.Fatalf("wrote %d into a window of %d", total, window)
	}
	ag.SetWriteDeadline(time.Time{})
	go func() {
		ag.Write(b)
		ag.Close()
	}()
	if n, err := io.Copy(io.Discard, onlyRead{gw}); err != nil || int(n) != total+len(b) {
		t.Fatalf("read %d of %d, %v", n, total+len(b), err)
	}
}

// TestOneSidedFlow: acknowledgements arrive though the writer's side never reads.
func TestOneSidedFlow(t *testing.T) {
	o := Options{MinWindow: 64 << 10, MaxWindow: 64 << 10}
	r := newRig(t, "unix", o)
	gw, ag := r.pair(o)
	go io.Copy(io.Discard, onlyRead{ag})
	if _, err := gw.Write(make([]byte, 5<<20)); err != nil {
		t.Fatal(err)
	}
	eventually(t, "all acknowledged and freed", func() bool {
		gw.mu.Lock()
		defer gw.mu.Unlock()
		return gw.acked == gw.sq.end && gw.sq.mem == 0
	})
}

// TestReadFrom: both ways of taking over what a source gives.
func TestReadFrom(t *testing.T) {
	r := newRig(t, "unix", Options{})
	gw, ag := r.pair(Options{})
	want := make([]byte, 3<<20)
	for i := range want {
		want[i] = pattern(0, i)
	}
	go func() {
		io.Copy(gw, io.MultiReader(bytes.NewReader(want[:100]), onlyRead{bytes.NewReader(want[100:])}))
		gw.CloseWrite()
	}()
	if got, err := io.ReadAll(ag); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
}

// TestSilence: a transport that goes dumb without breaking is given up.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := Listen(Options{})
		var mute sync.Map
		dial := func(context.Context) (net.Conn, error) {
			near, far := net.Pipe()
			go l.Serve(far)
			return &muteConn{near, &mute}, nil
		}
		gw, err := Dial(context.Background(), dial, Options{})
		if err != nil {
			t.Fatal(err)
		}
		ag, _ := l.Accept()
		go io.Copy(ag, onlyRead{ag})
		gw.Write([]byte("a"))
		io.ReadFull(gw, make([]byte, 1))
		time.Sleep(time.Hour) // virtual: an idle stream stays on its transport
		if gw.attempt != 1 {
			t.Fatalf("%d transports in an idle hour", gw.attempt)
		}
		gw.mu.Lock()
		old := gw.t.nc
		gw.mu.Unlock()
		mute.Store(old, true)
		start := time.Now()
		gw.Write([]byte("b"))
		if _, err := io.ReadFull(gw, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d > 20*time.Second {
			t.Fatalf("took %v", d)
		}
		gw.Abort()
		l.Close()
		time.Sleep(time.Minute)
	})
}

// muteConn swallows what is written once it is in the map.
type muteConn struct {
	net.Conn
	mute *sync.Map
}

func (m *muteConn) Write(p []byte) (int, error) {
	if _, ok := m.mute.Load(m); ok {
		return len(p), nil
	}
	return m.Conn.Write(p)
}

// TestHTTP: net/http over streams, cuts included: keep-alive, a large
// download, an upload, a WebSocket.
func TestHTTP(t *testing.T) {
	r := newRig(t, "tcp", Options{})
	big := bytes.Repeat([]byte("0123456789abcdef"), 200<<10)
	mux := http.NewServeMux()
	mux.HandleFunc("/big", func(w http.ResponseWriter, _ *http.Request) { w.Write(big) })
	mux.HandleFunc("/count", func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		fmt.Fprint(w, n, err)
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			return
		}
		defer ws.CloseNow()
		for {
			typ, b, err := ws.Read(r.Context())
			if err != nil || ws.Write(r.Context(), typ, b) != nil {
				return
			}
		}
	})
	waits, gone := make(chan struct{}), make(chan struct{})
	mux.HandleFunc("/wait", func(_ http.ResponseWriter, r *http.Request) {
		close(waits)
		<-r.Context().Done()
		close(gone)
	})
	srv := &http.Server{Handler: mux}
	served := make(chan error, 1)
	go func() { served <- srv.Serve(r.l) }()
	defer func() { srv.Close(); <-served }()
	tr := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return r.open(ctx, Options{})
	}}
	defer tr.CloseIdleConnections()
	client := &http.Client{Transport: tr}

	stop := make(chan struct{})
	var cutter sync.WaitGroup
	cutter.Go(func() {
		for tick := time.NewTicker(5 * time.Millisecond); ; {
			select {
			case <-stop:
				tick.Stop()
				return
			case <-tick.C:
				r.cut()
			}
		}
	})
	for range 10 {
		resp, err := client.Get("http://agent/big")
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		resp.Body.Close()
		if err != nil || !bytes.Equal(got, big) {
			t.Fatalf("%d bytes, %v", len(got), err)
		}
		resp, err = client.Post("http://agent/count", "", onlyRead{bytes.NewReader(big)})
		if err != nil {
			t.Fatal(err)
		}
		got, _ = io.ReadAll(resp.Body)
		resp.Body.Close()
		if want := fmt.Sprint(len(big), nil); string(got) != want {
			t.Fatalf("upload: %q, want %q", got, want)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, "ws://agent/ws", &websocket.DialOptions{HTTPClient: client})
	if err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		msg := strings.Repeat("x", i*10)
		if err := ws.Write(ctx, websocket.MessageText, []byte(msg)); err != nil {
			t.Fatal(err)
		}
		if _, got, err := ws.Read(ctx); err != nil || string(got) != msg {
			t.Fatalf("%d bytes of %d, %v", len(got), len(msg), err)
		}
	}
	ws.Close(websocket.StatusNormalClosure, "")
	close(stop)
	cutter.Wait()

	// A client that leaves is seen by the handler.
	ctx, leave := context.WithCancel(context.Background())
	go func() { <-waits; leave() }()
	req, _ := http.NewRequestWithContext(ctx, "GET", "http://agent/wait", nil)
	if _, err := client.Do(req); err == nil {
		t.Fatal("answered")
	}
	<-gone
}

// TestIdleStreamsAreCheap: a thousand streams that have talked and now wait.
func TestIdleStreamsAreCheap(t *testing.T) {
	const n = 1000
	r := newRig(t, "unix", Options{})
	heap := func() int {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return int(m.HeapAlloc + m.StackInuse)
	}
	before := heap()
	var all []*Conn
	b := make([]byte, 4096)
	for range n {
		gw, ag := r.pair(Options{})
		gw.Write(b)
		io.ReadFull(ag, b)
		ag.Write(b)
		io.ReadFull(gw, b)
		all = append(all, gw, ag)
	}
	eventually(t, "nothing is kept", func() bool {
		for _, c := range all {
			c.mu.Lock()
			mem := c.sq.mem
			c.mu.Unlock()
			if mem > 0 {
				return false
			}
		}
		return true
	})
	each := (heap() - before) / n
	t.Logf("%d KiB for both ends, sockets and goroutines included", each>>10)
	if each > 48<<10 {
		t.Errorf("%d bytes each", each)
	}
	for _, c := range all {
		c.Abort()
	}
}
