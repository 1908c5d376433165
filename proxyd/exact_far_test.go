package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// kind is what happens on a connection.
type kind string

const (
	echoes     kind = "echo"          // n bytes there and back, then the client half-closes
	bulk       kind = "bulk"          // the same with much, so that the kernel moves it
	half       kind = "half-close"    // the client says all it has and half-closes, then is answered
	early      kind = "early"         // the site speaks with the proxy's answer and closes; the client speaks with its request
	clientCuts kind = "client resets" // after an exchange that both have seen the end of
	siteCuts   kind = "site resets"
	plainHTTP  kind = "plain" // requests on one connection, answers with and without a length
	refused    kind = "refused"
)

var kinds = []kind{echoes, half, early, clientCuts, siteCuts, plainHTTP, plainHTTP, refused, echoes, half, echoes, clientCuts, bulk}

// plan is a connection.
type plan struct {
	id      int
	kind    kind
	n, m    int  // bytes there, bytes back
	socks   bool // the client's protocol, where it has the choice
	sampled chan struct{}
}

// far is a proxy that is every site too, and keeps what the kernel counted.
type far struct {
	addr string
	ln   net.Listener
	open sync.WaitGroup

	mu      sync.Mutex // guards what follows
	plans   map[int]*plan
	exact   bytesBySession // of connections that ended as planned
	ceiling bytesBySession // at most, of all
	planned int
}

func startFar(t *testing.T) *far {
	t.Helper()
	ln, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	f := &far{addr: ln.Addr().String(), ln: ln, plans: map[int]*plan{}, exact: bytesBySession{}, ceiling: bytesBySession{}}
	over := make(chan struct{})
	go func() {
		defer close(over)
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			_ = conn.SetDeadline(time.Now().Add(40 * time.Second))
			f.open.Go(func() { f.serve(conn.(*net.TCPConn)) })
		}
	}()
	t.Cleanup(func() { ln.Close(); <-over; f.open.Wait() })
	return f
}

// plan gives the i-th, always the same.
func (f *far) plan(i int) *plan {
	f.mu.Lock()
	defer f.mu.Unlock()
	p := f.plans[i]
	if p == nil {
		p = &plan{id: i, kind: kinds[i%len(kinds)], n: 1 + i*7919%9000, m: 1 + i*104729%20_000, socks: i%3 == 0, sampled: make(chan struct{})}
		if p.kind == bulk {
			p.n, p.m = 300_000+p.n, 300_000+p.n
		}
		f.plans[i] = p
	}
	return p
}

// settle waits until no connection is open.
func (f *far) settle() { f.open.Wait() }

func (f *far) sums() bytesBySession { return f.copy(f.exact) }

// allPlanned says whether each connection from one plan to another ended as it
// should have.
func (f *far) allPlanned(from, to int) bool {
	want := 0
	for i := from; i < to; i++ {
		if f.plan(i).kind != refused {
			want++
		}
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.planned == want
}

// most is what a session can have moved at most.
func (f *far) most(session string) [2]int64 { return f.copy(f.ceiling)[session] }

func (f *far) copy(from bytesBySession) bytesBySession {
	f.mu.Lock()
	defer f.mu.Unlock()
	out := bytesBySession{}
	for k, v := range from {
		out[k] = v
	}
	return out
}

// forget begins anew.
func (f *far) forget() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.planned = 0
	clear(f.exact)
	clear(f.ceiling)
}

func (f *far) book(p *plan, up, down int64, planned bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	add := func(to bytesBySession) {
		session := "s" + strconv.Itoa(p.id%sessions)
		was := to[session]
		to[session] = [2]int64{was[0] + up, was[1] + down}
	}
	add(f.ceiling)
	if planned {
		add(f.exact)
		f.planned++
	}
}

// side is a connection from proxyd.
type side struct {
	*net.TCPConn
	r          *bufio.Reader
	head, told int64 // known bytes that are nobody's data: of the requests, of the answer
	ended      bool  // proxyd half-closed
}

func (f *far) serve(conn *net.TCPConn) {
	defer conn.Close()
	s := &side{TCPConn: conn, r: bufio.NewReader(conn)}
	head, err := s.readHead()
	if err != nil {
		return // proxyd died before it had asked
	}
	p := f.plan(planOf(head))
	if p.kind == plainHTTP {
		s.head = 0
		err = s.plain(head, p)
	} else {
		err = s.tunnel(p)
	}
	if err != nil {
		info, _ := s.info()
		f.book(p, int64(info.Bytes_received)-s.head, int64(info.Bytes_sent)-s.told, false)
		return
	}
	if p.kind == refused {
		return
	}
	up, down, err := s.counted()
	f.book(p, up, down, err == nil)
	close(p.sampled)
	switch p.kind {
	case siteCuts:
		_ = conn.SetLinger(0)
	case clientCuts:
		_, _ = conn.Read(make([]byte, 1))
	}
}

func (s *side) readHead() (string, error) {
	var head strings.Builder
	for !strings.HasSuffix(head.String(), "\r\n\r\n") {
		line, err := s.r.ReadString('\n')
		if err != nil {
			return "", err
		}
		head.WriteString(line)
	}
	s.head += int64(head.Len())
	return head.String(), nil
}

// planOf reads the number in a target such as c17.test.
func planOf(head string) int {
	_, rest, _ := strings.Cut(head, "c")
	if strings.HasPrefix(head, "POST ") {
		_, rest, _ = strings.Cut(head, "//c")
	}
	number, _, _ := strings.Cut(rest, ".")
	i, _ := strconv.Atoi(number)
	return i
}

func (s *side) tunnel(p *plan) error {
	answer := "HTTP/1.1 200 Connection established\r\nVia: 1.1 far\r\n\r\n"
	if p.kind == refused {
		answer = "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n"
	}
	s.told = int64(len(answer))
	if p.kind == early {
		answer += string(make([]byte, p.m))
	}
	if _, err := io.WriteString(s, answer); err != nil {
		return err
	}
	switch p.kind {
	case refused:
		return nil
	case echoes, bulk:
		if err := s.echo(p.n); err != nil {
			return err
		}
		return s.toEnd(0)
	case half:
		if err := s.toEnd(p.n); err != nil {
			return err
		}
		_, err := s.Write(make([]byte, p.m))
		return err
	case early:
		return s.expect(p.n)
	}
	if err := s.echo(p.n); err != nil {
		return err
	}
	return s.expect(1) // the client has all
}

func (s *side) echo(n int) error {
	_, err := io.CopyN(struct{ io.Writer }{s}, s.r, int64(n))
	return err
}

func (s *side) expect(n int) error {
	_, err := io.CopyN(io.Discard, s.r, int64(n))
	return err
}

// toEnd wants n bytes and then the end.
func (s *side) toEnd(n int) error {
	got, err := io.Copy(io.Discard, s.r)
	if err == nil && got != int64(n) {
		err = fmt.Errorf("%d bytes, want %d", got, n)
	}
	s.ended = err == nil
	return err
}

// plain answers requests until proxyd closes. Of their heads the login alone is
// none of the session's.
func (s *side) plain(head string, p *plan) (err error) {
	for k := 0; ; k++ {
		s.head = int64(k+1) * int64(len(login))
		if strings.Count(head, login) != 1 {
			return errors.New("a request without its login: " + head)
		}
		if err := s.expect(p.n); err != nil {
			return err
		}
		if _, err := io.WriteString(s, answerOf(p, k)); err != nil {
			return err
		}
		if k == requests-1 {
			return s.toEnd(0)
		}
		if head, err = s.readHead(); err != nil {
			return err
		}
	}
}

// login is the far proxy's, of user u with password p.
const login = "Proxy-Authorization: Basic dTpw\r\n"

const requests = 3 // on a connection

func answerOf(p *plan, k int) string {
	body := string(make([]byte, p.m))
	if k%2 == 0 {
		return fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", p.m, body)
	}
	return fmt.Sprintf("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n", p.m, body)
}

func (s *side) info() (info *unix.TCPInfo, err error) {
	info = &unix.TCPInfo{}
	raw, err := s.SyscallConn()
	if err != nil {
		return info, err
	}
	failed := raw.Control(func(fd uintptr) {
		var got *unix.TCPInfo
		if got, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			info = got
		}
	})
	return info, errors.Join(err, failed)
}

// counted is what the kernel counted, once all that was said is acknowledged. A
// half-close counts as a byte there.
func (s *side) counted() (up, down int64, err error) {
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(time.Millisecond) {
		info, err := s.info()
		up, down = int64(info.Bytes_received)-s.head, int64(info.Bytes_acked)-s.told
		if s.ended {
			up--
		}
		if err != nil || info.Unacked == 0 && info.Notsent_bytes == 0 {
			return up, down, err
		}
		if time.Now().After(deadline) {
			return up, down, errors.New("not acknowledged")
		}
	}
}
