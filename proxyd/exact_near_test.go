package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"time"
)

// near is the client of a connection.
type near struct {
	conn *net.TCPConn
	r    *bufio.Reader
	plan *plan
}

func (c *near) host() string { return fmt.Sprintf("c%d.test", c.plan.id) }

func (c *near) run() error {
	c.r = bufio.NewReader(c.conn)
	p := c.plan
	if p.kind == plainHTTP {
		return c.plain()
	}
	if err := c.open(); err != nil {
		if p.kind == refused && errors.Is(err, errRefused) {
			return nil
		}
		return err
	}
	switch p.kind {
	case echoes, bulk:
		return errors.Join(c.exchange(), c.conn.CloseWrite(), c.end(0))
	case half:
		return errors.Join(c.say(p.n), c.conn.CloseWrite(), c.end(p.m))
	case early:
		return c.end(p.m)
	case clientCuts, siteCuts:
		if err := errors.Join(c.exchange(), c.say(1)); err != nil {
			return err
		}
		select {
		case <-p.sampled:
		case <-time.After(30 * time.Second):
			return errors.New("the far side has not all")
		}
		if p.kind == clientCuts {
			return c.conn.SetLinger(0)
		}
		if _, err := c.r.ReadByte(); err == nil || errors.Is(err, io.EOF) {
			return fmt.Errorf("the site's reset came as %v", err)
		}
		return nil
	}
	return fmt.Errorf("%s was not refused", p.kind)
}

var errRefused = errors.New("refused")

// open asks for the tunnel, by SOCKS5 or CONNECT; what is early goes with it.
func (c *near) open() error {
	ahead := ""
	if c.plan.kind == early {
		ahead = string(make([]byte, c.plan.n))
	}
	if c.plan.socks {
		return c.socks(ahead)
	}
	if _, err := fmt.Fprintf(c.conn, "CONNECT %s:443 HTTP/1.1\r\nHost: x\r\n\r\n%s", c.host(), ahead); err != nil {
		return err
	}
	resp, err := http.ReadResponse(c.r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%w: %s", errRefused, resp.Status)
	}
	return nil
}

func (c *near) socks(ahead string) error {
	if _, err := io.WriteString(c.conn, "\x05\x01\x00"); err != nil {
		return err
	}
	reply := make([]byte, 10)
	if _, err := io.ReadFull(c.r, reply[:2]); err != nil {
		return err
	}
	if _, err := io.WriteString(c.conn, "\x05\x01\x00\x03"+string(rune(len(c.host())))+c.host()+"\x01\xbb"+ahead); err != nil {
		return err
	}
	if _, err := io.ReadFull(c.r, reply); err != nil {
		return err
	}
	if reply[1] != 0 {
		return fmt.Errorf("%w: code %d", errRefused, reply[1])
	}
	return nil
}

func (c *near) say(n int) error {
	_, err := c.conn.Write(make([]byte, n))
	return err
}

// exchange says n bytes and reads them back, both at once.
func (c *near) exchange() error {
	said := make(chan error, 1)
	go func() { said <- c.say(c.plan.n) }()
	_, err := io.CopyN(io.Discard, c.r, int64(c.plan.n))
	return errors.Join(err, <-said)
}

// end wants n bytes and then the end.
func (c *near) end(n int) error {
	got, err := io.Copy(io.Discard, c.r)
	if err == nil && got != int64(n) {
		err = fmt.Errorf("%d bytes, want %d", got, n)
	}
	return err
}

func (c *near) plain() error {
	body := strings.Repeat("b", c.plan.n)
	for range requests {
		if _, err := fmt.Fprintf(c.conn, "POST http://%[1]s/ HTTP/1.1\r\nHost: %[1]s\r\nContent-Length: %[2]d\r\n\r\n%[3]s", c.host(), len(body), body); err != nil {
			return err
		}
		resp, err := http.ReadResponse(c.r, nil)
		if err != nil {
			return err
		}
		n, err := io.Copy(io.Discard, resp.Body)
		if err != nil || resp.StatusCode != http.StatusOK || n != int64(c.plan.m) {
			return fmt.Errorf("%s, %d bytes: %w", resp.Status, n, err)
		}
	}
	return nil
}
