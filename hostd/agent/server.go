package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/agentlink"
)

const listenFD = agentlink.ListenFD

// prefaceWait bounds how long a connection may keep its first byte back.
const prefaceWait = 10 * time.Second

// inherited gives the listening socket that the driver made.
func inherited() (net.Listener, error) {
	f := os.NewFile(listenFD, "listener")
	l, err := net.FileListener(f) // a copy, closed on exec
	_ = f.Close()
	if err != nil {
		return nil, fmt.Errorf("file descriptor %d is no listening socket: %w", listenFD, err)
	}
	return l, nil
}

// transports takes connections of the session link, after their first byte.
type transports interface{ Serve(net.Conn) }

// front accepts connections and sends each where its first byte says.
type front struct {
	link    transports
	control *conns
	log     *slog.Logger
}

// serve accepts until l is closed.
func (f *front) serve(l net.Listener) error {
	var open sync.WaitGroup
	defer open.Wait()
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return fmt.Errorf("accept: %w", err)
		}
		open.Go(func() { f.dispatch(conn) })
	}
}

func (f *front) dispatch(conn net.Conn) {
	var preface [1]byte
	_ = conn.SetReadDeadline(time.Now().Add(prefaceWait))
	if _, err := io.ReadFull(conn, preface[:]); err != nil {
		_ = conn.Close()
		return
	}
	_ = conn.SetReadDeadline(time.Time{})
	switch preface[0] {
	case agentlink.PrefaceControl:
		f.control.give(conn)
	case agentlink.PrefaceLink:
		f.link.Serve(conn)
	default:
		f.log.Warn("connection with an unknown first byte", "byte", preface[0])
		_ = conn.Close()
	}
}

// conns is a net.Listener over connections that were accepted elsewhere.
type conns struct {
	addr net.Addr
	next chan net.Conn
	done chan struct{}
	once sync.Once
}

func newConns(addr net.Addr) *conns {
	return &conns{addr: addr, next: make(chan net.Conn), done: make(chan struct{})}
}

func (c *conns) give(conn net.Conn) {
	select {
	case c.next <- conn:
	case <-c.done:
		_ = conn.Close()
	}
}

// Accept implements net.Listener.
func (c *conns) Accept() (net.Conn, error) {
	select {
	case conn := <-c.next:
		return conn, nil
	case <-c.done:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener.
func (c *conns) Close() error {
	c.once.Do(func() { close(c.done) })
	return nil
}

// Addr implements net.Listener.
func (c *conns) Addr() net.Addr { return c.addr }

// serveHTTP serves handler on l until ctx ends.
func serveHTTP(ctx context.Context, l net.Listener, handler http.Handler, log *slog.Logger) error {
	// No timeouts: exec, waits and sockets last as long as their clients want.
	s := &http.Server{Handler: handler, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	stop := context.AfterFunc(ctx, func() { _ = s.Close() })
	defer stop()
	if err := s.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) && ctx.Err() == nil {
		return fmt.Errorf("serve %s: %w", l.Addr(), err)
	}
	return nil
}
