package network

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"
)

func TestHarmless(t *testing.T) {
	for head, want := range map[string]bool{
		"CONNECT a:1 HTTP/1.1\r\n\r\n":                       true,
		"CONNECT a:1 HTTP/1.1\r\nHost: a:1\r\n\r\n":          true,
		"CONNECT a:1 HTTP/1.1\r\n":                           false, // not whole: its client goes on
		"CONNECT a:1 HTTP/1.1\r\n\r\nhello":                  false, // more than the request
		"CONNECT a:1 HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n": false,
		"POST http://a/ HTTP/1.1\r\n\r\n":                    false, // may have been done
		"GET http://a/ HTTP/1.1\r\n\r\n":                     false,
		"CONNECTED":                                          false,
		"\x05\x01\x00":                                       true,
		"\x05\x02\x00\x02":                                   true,
		"\x05\x02\x00":                                       false,
		"\x05\x01\x00\x05\x01":                               false,
		"\x05":                                               false,
		"\x04\x01\x00":                                       false,
		"":                                                   false,
	} {
		if got := harmless([]byte(head)); got != want {
			t.Errorf("%q: %v", head, got)
		}
	}
}

// scripted is a proxyd that treats its connections one after another as the
// steps say.
type scripted struct {
	t    *testing.T
	addr string
	mu   sync.Mutex
	said []string // guarded by mu: what each connection said first
}

// script serves: "close" closes when the head has come, "reset" resets then,
// "serve" answers "ok" and echoes, "whole" does so when the head is whole.
func script(t *testing.T, steps ...string) *scripted {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &scripted{t: t, addr: ln.Addr().String()}
	var open sync.WaitGroup
	t.Cleanup(func() { ln.Close(); open.Wait() })
	open.Go(func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			step := "serve"
			if len(steps) > 0 {
				step, steps = steps[0], steps[1:]
			}
			open.Go(func() { s.serve(conn, step) })
		}
	})
	return s
}

func (s *scripted) serve(conn net.Conn, step string) {
	defer conn.Close()
	if step == "reset" {
		defer abort(conn)
	}
	_ = conn.SetDeadline(time.Now().Add(20 * time.Second))
	head := make([]byte, 100)
	n, err := conn.Read(head)
	for step == "whole" && err == nil && !strings.HasSuffix(string(head[:n]), "\r\n\r\n") {
		var more int
		more, err = conn.Read(head[n:])
		n += more
	}
	s.mu.Lock()
	s.said = append(s.said, string(head[:n]))
	s.mu.Unlock()
	if step == "serve" || step == "whole" {
		_, _ = io.WriteString(conn, "ok")
		_, _ = io.Copy(conn, conn)
	}
}

func (s *scripted) heard() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.said...)
}

func (s *scripted) dial(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "tcp", s.addr)
}

// throughSlot serves one connection as a slot's listener would, and gives the
// client's end.
func throughSlot(t *testing.T, dial DialEgress) net.Conn {
	t.Helper()
	s := &Slot{net: &Network{log: slog.New(slog.DiscardHandler)}}
	s.SetEgress(dial)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer ln.Close()
	client, err := net.Dial("tcp", ln.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	conn, err := ln.Accept()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); s.tunnel(ctx, conn.(*net.TCPConn)) }()
	t.Cleanup(func() { client.Close(); cancel(); <-done })
	_ = client.SetDeadline(time.Now().Add(20 * time.Second))
	return client
}

const connectHead = "CONNECT example.com:443 HTTP/1.1\r\nHost: example.com:443\r\n\r\n"

// A proxyd that dies before it has answered leaves the request to another, where
// that cannot do anything twice.
func TestARequestIsSaidAgain(t *testing.T) {
	for _, c := range []struct {
		name, head string
		steps      []string
		tries      int
		served     bool
	}{
		{"served at once", connectHead, nil, 1, true},
		{"closed", connectHead, []string{"close"}, 2, true},
		{"reset, then closed", connectHead, []string{"reset", "close"}, 3, true},
		{"nobody serves", connectHead, []string{"close", "close", "close"}, 3, false},
		{"a greeting", "\x05\x01\x00", []string{"reset"}, 2, true},
		{"a plain request may have been done", "POST http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", []string{"close"}, 1, false},
		{"a plain request", "GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", nil, 1, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p := script(t, c.steps...)
			client := throughSlot(t, p.dial)
			if _, err := io.WriteString(client, c.head); err != nil {
				t.Fatal(err)
			}
			answer := make([]byte, 2)
			_, err := io.ReadFull(client, answer)
			if (err == nil) != c.served || c.served && string(answer) != "ok" {
				t.Errorf("answer %q, %v", answer, err)
			}
			heard := p.heard()
			for _, said := range heard {
				if said != c.head {
					t.Errorf("a proxyd heard %q", said)
				}
			}
			if len(heard) != c.tries {
				t.Errorf("%d tries, want %d", len(heard), c.tries)
			}
			if c.served { // and then both ways, half-close included
				_, _ = io.WriteString(client, strings.Repeat("x", 100_000))
				_ = client.(*net.TCPConn).CloseWrite()
				if n, err := io.Copy(io.Discard, client); n != 100_000 || err != nil {
					t.Errorf("%d bytes came back: %v", n, err)
				}
			}
		})
	}
}

// Nothing is dialled for a connection that says nothing.
func TestProxydIsDialledAtTheFirstWord(t *testing.T) {
	p := script(t)
	dials := make(chan struct{}, 10)
	client := throughSlot(t, func(ctx context.Context) (net.Conn, error) {
		dials <- struct{}{}
		return p.dial(ctx)
	})
	_ = client.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
	if _, err := client.Read(make([]byte, 1)); !errors.Is(err, context.DeadlineExceeded) && !isTimeout(err) {
		t.Fatal(err)
	}
	if len(dials) != 0 {
		t.Error("it was dialled for nothing")
	}
	_ = client.SetDeadline(time.Now().Add(20 * time.Second))
	if _, err := io.WriteString(client, connectHead); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(client, make([]byte, 2)); err != nil || len(dials) != 1 {
		t.Errorf("%v after %d dials", err, len(dials))
	}
}

func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// A request that may have been done is not said again, also where it could not
// be written.
func TestAPlainRequestIsNotSaidAgain(t *testing.T) {
	p := script(t)
	dials := make(chan struct{}, 10)
	client := throughSlot(t, func(ctx context.Context) (net.Conn, error) {
		dials <- struct{}{}
		conn, err := p.dial(ctx)
		if err == nil {
			err = conn.(*net.TCPConn).CloseWrite() // as if its proxyd had died
		}
		return conn, err
	})
	if _, err := io.WriteString(client, "GET http://a/ HTTP/1.1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if n, err := client.Read(make([]byte, 1)); n != 0 || isTimeout(err) || len(dials) != 1 {
		t.Errorf("%d bytes, %v, %d dials", n, err, len(dials))
	}
}

// A head that comes in pieces arrives whole.
func TestAHeadInPieces(t *testing.T) {
	p := script(t, "whole")
	client := throughSlot(t, p.dial)
	for i := range len(connectHead) {
		if _, err := io.WriteString(client, connectHead[i:i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := client.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(client)
	if said := p.heard(); err != nil || len(said) != 1 || said[0] != connectHead || string(got) != "ok" {
		t.Errorf("said %q, came back %q: %v", said, got, err)
	}
}
