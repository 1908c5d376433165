package main

import (
	"bytes"
	"fmt"
	"io"
	"net/netip"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// lane is a way to a site: through a proxy, or straight to it.
type lane struct {
	Addr   string // of the proxy, or of what is connected to
	Hello  []byte // goes before the request
	Direct bool   // no request
	pid    int    // of the proxy; 0: none whose time counts
}

// ends is one blocking socket: nothing of the Go runtime stands between it and
// what it measures.
type ends struct{ fd int }

const patience = 20 * time.Second // for whatever a socket waits for

// open connects, and has the proxy connect to target.
func (l lane) open(target string) (c ends, err error) {
	at, err := netip.ParseAddrPort(l.Addr)
	if err != nil {
		return c, err
	}
	c.fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return c, err
	}
	limit := unix.NsecToTimeval(patience.Nanoseconds())
	if err = unix.SetsockoptTimeval(c.fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &limit); err == nil {
		err = unix.Connect(c.fd, &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()})
	}
	if err == nil && !l.Direct {
		err = c.request(l.Hello, target)
	}
	if err != nil {
		c.close()
		return c, fmt.Errorf("connect by way of %s: %w", l.Addr, err)
	}
	return c, nil
}

// request sends CONNECT and takes the whole answer; sites say nothing unasked.
func (c ends) request(hello []byte, target string) error {
	if _, err := c.Write(fmt.Appendf(hello[:len(hello):len(hello)], "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target)); err != nil {
		return err
	}
	var answer []byte
	for chunk := make([]byte, 1024); !bytes.HasSuffix(answer, []byte("\r\n\r\n")); {
		n, err := c.Read(chunk)
		if err != nil {
			return fmt.Errorf("%w after %q", err, answer)
		}
		answer = append(answer, chunk[:n]...)
	}
	if !bytes.HasPrefix(answer, []byte("HTTP/1.")) || !bytes.Contains(answer[:13], []byte(" 200 ")) {
		return fmt.Errorf("the answer is %q", answer)
	}
	return nil
}

func (c ends) Read(p []byte) (int, error) {
	for {
		n, err := unix.Read(c.fd, p)
		switch {
		case err == unix.EINTR:
		case err != nil:
			return 0, err
		case n == 0:
			return 0, io.EOF
		default:
			return n, nil
		}
	}
}

func (c ends) Write(p []byte) (n int, err error) {
	for n < len(p) {
		w, err := unix.Write(c.fd, p[n:])
		if err != nil && err != unix.EINTR {
			return n, err
		}
		n += max(w, 0)
	}
	return n, nil
}

// turn sends a byte and waits for it.
func (c ends) turn(one []byte) error {
	if _, err := c.Write(one); err != nil {
		return err
	}
	_, err := c.Read(one)
	return err
}

func (c ends) close() { unix.Close(c.fd) }

// cpu is the processor time that the proxy has used, to the nanosecond where
// /proc counts ticks (clock_getcpuclockid(3)).
func (l lane) cpu() (time.Duration, error) {
	if l.pid == 0 {
		return 0, nil
	}
	var ts unix.Timespec
	err := unix.ClockGettime(int32(^l.pid<<3|2), &ts)
	return time.Duration(ts.Nano()), err
}

// download reads a site's endless answer for a while: GB/s, and the proxy's
// processor time in s/GB.
func download(l lane, target string, d time.Duration) (rate, cpu float64, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := l.open(target)
	if err != nil {
		return 0, 0, err
	}
	defer c.close()
	if _, err := c.Write([]byte("x")); err != nil {
		return 0, 0, err
	}
	sink := make([]byte, 1<<20)
	if _, err := c.Read(sink); err != nil { // it runs
		return 0, 0, err
	}
	before, err := l.cpu()
	if err != nil {
		return 0, 0, err
	}
	total, began := 0, time.Now()
	for time.Since(began) < d {
		n, err := c.Read(sink)
		if err != nil {
			return 0, 0, err
		}
		total += n
	}
	took := time.Since(began)
	after, err := l.cpu()
	return float64(total) / float64(took.Nanoseconds()), (after - before).Seconds() / float64(total) * 1e9, err
}

// callers is how many connections are made at the same time.
const callers = 8

// connect makes connections for a while, each with a turn: how many a second,
// and the proxy's processor time of one in µs.
func connect(l lane, targets []string, d time.Duration) (rate, cpu float64, err error) {
	before, err := l.cpu()
	if err != nil {
		return 0, 0, err
	}
	var counts [callers]int
	var errs [callers]error
	began := time.Now()
	var all sync.WaitGroup
	for i := range callers {
		all.Go(func() {
			runtime.LockOSThread()
			defer runtime.UnlockOSThread()
			one := []byte{1}
			for time.Since(began) < d && errs[i] == nil {
				// Several targets: one has too few ports to leave for a while.
				errs[i] = visit(l, targets[(i+counts[i])%len(targets)], one)
				counts[i]++
			}
		})
	}
	all.Wait()
	took := time.Since(began)
	total := 0
	for i := range callers {
		if errs[i] != nil {
			return 0, 0, errs[i]
		}
		total += counts[i]
	}
	after, err := l.cpu()
	return float64(total) / took.Seconds(), float64((after - before).Microseconds()) / float64(total), err
}

func visit(l lane, target string, one []byte) error {
	c, err := l.open(target)
	if err != nil {
		return err
	}
	defer c.close()
	return c.turn(one)
}

// turns takes the time of one byte there and back, every half a millisecond,
// in µs.
func turns(l lane, target string, d time.Duration) (all samples, err error) {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	c, err := l.open(target)
	if err != nil {
		return nil, err
	}
	defer c.close()
	one := []byte{1}
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(500 * time.Microsecond) {
		began := time.Now()
		if err := c.turn(one); err != nil {
			return nil, err
		}
		all = append(all, float64(time.Since(began).Nanoseconds())/1000)
	}
	return all, nil
}
