package link

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"
)

// plan is one run of chaos, drawn by rapid.
type plan struct {
	seed       uint64
	window     int    // MinWindow and MaxWindow of both sides
	bytes      [2]int // what gateway and agent write
	closeWrite [2]bool
	cutEvery   int           // bytes a transport carries, on average; 0: for ever
	delay      time.Duration // longest of a read, a write, a hello's way
	pause      time.Duration // longest of a slow reader, 0: a fast one
	freezes    int           // how often the machine stands still, each time for longer than Keep
}

// drawPlan keeps the number of round trips and of transports within bounds:
// most is how much may be written, and a small window or early cuts lessen it;
// slow is the longest delay.
func drawPlan(t *rapid.T, most int, slow time.Duration) plan {
	p := plan{
		seed:       rapid.Uint64().Draw(t, "seed"),
		window:     rapid.SampledFrom([]int{64, 4 << 10, 64 << 10, 1 << 20}).Draw(t, "window"),
		closeWrite: [2]bool{rapid.Bool().Draw(t, "half up"), rapid.Bool().Draw(t, "half down")},
		cutEvery:   rapid.SampledFrom([]int{0, 300, 5000, 100000}).Draw(t, "cut every"),
		delay:      rapid.SampledFrom([]time.Duration{0, slow / 20, slow}).Draw(t, "delay"),
		pause:      rapid.SampledFrom([]time.Duration{0, 2 * slow}).Draw(t, "slow reader"),
	}
	most = min(most, 40*p.window)
	if p.cutEvery > 0 {
		most = min(most, 20*p.cutEvery)
	}
	size := rapid.SampledFrom([]int{0, 1, 1000, most / 4, most})
	p.bytes = [2]int{size.Draw(t, "up"), size.Draw(t, "down")}
	return p
}

// chaos is a transport that splits, delays and dies.
type chaos struct {
	net.Conn
	mu     sync.Mutex
	rng    *rand.Rand
	delay  time.Duration
	budget int // bytes until it dies, -1: never
}

var errCut = errors.New("cut")

// draw says how many of n bytes may pass now, and how long they wait. A cut
// comes after bytes that passed: a transport that only takes a handshake tests
// nothing but the pauses between dials.
func (c *chaos) draw(n int) (int, time.Duration, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.budget == 0 {
		c.Conn.Close()
		return 0, 0, errCut
	}
	if n > 1 && c.rng.IntN(3) == 0 {
		n = 1 + c.rng.IntN(n)
	}
	if c.budget > 0 {
		n = min(n, c.budget)
	}
	var d time.Duration
	if c.delay > 0 && c.rng.IntN(8) == 0 {
		d = rand.N(c.delay)
	}
	return n, d, nil
}

// spend counts n bytes that have passed.
func (c *chaos) spend(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.budget > 0 {
		c.budget = max(0, c.budget-n)
	}
}

func (c *chaos) Read(p []byte) (int, error) {
	n, d, err := c.draw(len(p))
	if err != nil {
		return 0, err
	}
	time.Sleep(d)
	n, err = c.Conn.Read(p[:n])
	c.spend(n)
	return n, err
}

// CloseWrite closes all where there is no half.
func (c *chaos) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Conn.Close()
}

func (c *chaos) Write(p []byte) (n int, err error) {
	for n < len(p) {
		m, d, err := c.draw(len(p) - n)
		if err != nil {
			return n, err
		}
		time.Sleep(d)
		w, err := c.Conn.Write(p[n : n+m])
		c.spend(w)
		if n += w; err != nil {
			return n, err
		}
	}
	return n, nil
}

// world is a Listener, a way to it, and all that runs meanwhile.
type world struct {
	plan plan
	mu   sync.Mutex
	rng  *rand.Rand
	l    *Listener
	pipe func() (near, far net.Conn, err error)
	keep time.Duration

	busy   sync.WaitGroup // Serves; it grows under mu
	ending bool
	ice    ice
}

func (w *world) draw(n int) int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.rng.IntN(n)
}

func netPipe() (near, far net.Conn, err error) {
	near, far = net.Pipe()
	return near, far, nil
}

// dial gives one end of a pipe whose other end may reach the agent late, after
// those dialled later.
func (w *world) dial(context.Context) (net.Conn, error) {
	if err := w.ice.dialled(); err != nil {
		return nil, err
	}
	if w.draw(10) == 0 {
		return nil, errNoWay
	}
	near, far, err := w.pipe()
	if err != nil {
		return nil, err
	}
	c := &chaos{Conn: near, rng: rand.New(rand.NewPCG(uint64(w.draw(1<<30)), 0)), delay: w.plan.delay, budget: -1}
	if w.plan.cutEvery > 0 {
		c.budget = helloLen/2 + w.draw(2*w.plan.cutEvery)
	}
	late := time.Duration(0)
	if w.plan.delay > 0 && w.draw(4) == 0 {
		late = time.Duration(w.draw(int(5 * w.plan.delay)))
	}
	if !w.serve(late, far) {
		c.Close()
		return nil, errNoWay
	}
	return c, nil
}

// serve hands the agent a transport, unless the world is ending: a stream may
// redial until its Abort, and a WaitGroup may not grow while it is waited for.
func (w *world) serve(late time.Duration, far net.Conn) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.ending {
		far.Close()
		return false
	}
	if !w.ice.took(far) {
		return false
	}
	w.busy.Go(func() {
		time.Sleep(late)
		w.l.Serve(far)
	})
	return true
}

// end refuses further transports and waits for those there are.
func (w *world) end() {
	w.mu.Lock()
	w.ending = true
	w.mu.Unlock()
	w.l.Close()
	w.busy.Wait()
}

// pattern is byte i of what side writes.
func pattern(side int, i int) byte { return byte(i*31 + i>>8*7 + side*101) }

func (w *world) write(c *Conn, side int) error {
	rng := rand.New(rand.NewPCG(w.plan.seed, uint64(side)))
	total := w.plan.bytes[side]
	for at := 0; at < total; {
		b := make([]byte, min(total-at, 1+rng.IntN(1<<rng.IntN(18))))
		for i := range b {
			b[i] = pattern(side, at+i)
		}
		n, err := c.Write(b)
		at += n
		if err != nil {
			return fmt.Errorf("side %d wrote %d of %d: %w", side, at, total, err)
		}
		if err := c.checkMemory(w.plan.window); err != nil {
			return err
		}
	}
	if w.plan.closeWrite[side] {
		return c.CloseWrite()
	}
	return nil
}

// read reads all that the other side writes: to the end when it half-closes,
// else exactly as much as is to come.
func (w *world) read(c *Conn, side int) error {
	rng := rand.New(rand.NewPCG(w.plan.seed, uint64(side+7)))
	from := 1 - side
	total := w.plan.bytes[from]
	for at := 0; at < total || w.plan.closeWrite[from]; {
		b := make([]byte, 1+rng.IntN(1<<rng.IntN(18)))
		n, err := c.Read(b)
		for i, x := range b[:n] {
			if x != pattern(from, at+i) {
				return fmt.Errorf("side %d: byte %d is wrong", side, at+i)
			}
		}
		if at += n; at > total {
			return fmt.Errorf("side %d: %d bytes of %d", side, at, total)
		}
		if err == io.EOF && at == total {
			return nil
		}
		if err != nil {
			return fmt.Errorf("side %d read %d of %d: %w", side, at, total, err)
		}
		if w.plan.pause > 0 && rng.IntN(10) == 0 {
			time.Sleep(time.Duration(rng.IntN(int(w.plan.pause))))
		}
	}
	return nil
}

// checkMemory fails when more is kept than the windows allow.
func (c *Conn) checkMemory(window int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if most := 2*window + 4*bigChunk; c.sq.mem > most {
		return fmt.Errorf("%d bytes kept to send", c.sq.mem)
	}
	held := 0
	for ch := c.rq.head; ch != nil; ch = ch.next {
		held += len(ch.b)
	}
	if held > 2*max(window, initialWindow)+2*bigChunk {
		return fmt.Errorf("%d bytes kept unread", held)
	}
	return nil
}

func (w *world) run() error {
	o := Options{MinWindow: w.plan.window, MaxWindow: w.plan.window, Keep: w.keep}
	w.rng = rand.New(rand.NewPCG(w.plan.seed, 99))
	ours := o
	if w.plan.freezes > 0 {
		o.Keep = time.Hour // the agent's clocks stand still with its processors
		ours.Place = w.ice.place
	}
	w.l = Listen(o)
	defer w.end()
	stop := w.ice.run(w, 3*ours.withDefaults().Keep)
	defer stop()
	gw, err := Dial(context.Background(), w.dial, ours)
	if err != nil {
		return err
	}
	defer gw.Abort()
	nc, err := w.l.Accept()
	if err != nil {
		return err
	}
	ag := nc.(*Conn)
	errs := make(chan error, 4)
	for side, c := range []*Conn{gw, ag} {
		go func() { errs <- w.write(c, side) }()
		go func() { errs <- w.read(c, side) }()
	}
	for range 4 {
		err = errors.Join(err, <-errs)
	}
	if err = errors.Join(err, w.ice.failed()); err != nil {
		return err
	}
	stop()
	gw.Close()
	ag.Close()
	for end := time.Now().Add(30*time.Second + o.withDefaults().Keep); ; time.Sleep(time.Millisecond) { // a last word may be lost
		switch {
		case w.l.Streams() == 0:
			return nil
		case time.Now().After(end):
			return errors.New("the agent keeps the stream")
		}
	}
}

// TestChaos: over transports that split, delay and break at any byte, both
// sides get exactly what the other wrote, and nothing stays behind. Time is
// virtual and net.Pipe has no buffer: a write waits for the reader, so that
// each side's dependence on the other shows as a deadlock.
func TestChaos(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		w := &world{plan: drawPlan(rt, 100<<10, 20*time.Millisecond), pipe: netPipe}
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

// TestChaosSockets is the same over sockets, where what was written before a
// break may still arrive, and hellos come in another order than they were said.
// It mostly sleeps, so four run side by side; BERTH_SOAK makes it long.
func TestChaosSockets(t *testing.T) {
	each := 10
	if os.Getenv("BERTH_SOAK") != "" {
		each = 500
	}
	setChecks(t, each)
	for i := range 4 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			chaosSockets(t)
		})
	}
}

// setChecks is how often rapid checks, unless -rapid.checks says so.
func setChecks(t *testing.T, n int) {
	f := flag.Lookup("rapid.checks")
	before := f.Value.String()
	if before != f.DefValue {
		return
	}
	f.Value.Set(strconv.Itoa(n)) // a number: it cannot fail
	t.Cleanup(func() { f.Value.Set(before) })
}

func chaosSockets(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	var dialling sync.Mutex
	pipe := func() (near, far net.Conn, err error) { // fails when the test is over, and a stream dials yet
		dialling.Lock()
		defer dialling.Unlock()
		if near, err = net.Dial("tcp", ln.Addr().String()); err != nil {
			return nil, nil, err
		}
		if far, err = ln.Accept(); err != nil {
			near.Close()
			return nil, nil, err
		}
		return near, far, nil
	}
	rapid.Check(t, func(rt *rapid.T) {
		w := &world{plan: drawPlan(rt, 400<<10, time.Millisecond), pipe: pipe, keep: 15 * time.Second} // generous: a busy machine is no lost stream
		if err := w.run(); err != nil {
			rt.Fatal(err)
		}
	})
}

// TestProgressUnderCuts: as long as some bytes pass, transports that die early
// only cost their dials: no backoff builds up, nothing expires. Time is virtual,
// so the bound has nothing to do with the machine's load.
func TestProgressUnderCuts(t *testing.T) {
	for seed := range 60 {
		p := plan{
			seed: uint64(seed), window: 64, bytes: [2]int{2560, 1000}, closeWrite: [2]bool{true, false},
			cutEvery: 300, delay: time.Millisecond, pause: 2 * time.Millisecond,
		}
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			w := &world{plan: p, pipe: netPipe, keep: 2 * time.Second}
			if err := w.run(); err != nil {
				t.Errorf("seed %d: %v", seed, err)
			}
			if d := time.Since(start) - w.keep; d > 2*time.Second { // keep: a last word may be lost
				t.Errorf("seed %d: took %v longer than Keep", seed, d)
			}
			time.Sleep(time.Second) // chaos may still delay a read
		})
	}
}
