package guard

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/berth-dev/berth/shared/egress"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// names is a name server with these A records; a name that is missing does not
// exist, one with an empty list fails. asked counts queries for A.
type names struct {
	records map[string][]string
	asked   atomic.Int32
}

// resolver asks the server over a pipe, as TCP does (RFC 1035 4.2.2).
func (n *names) resolver() *net.Resolver {
	return &net.Resolver{PreferGo: true, Dial: func(context.Context, string, string) (net.Conn, error) {
		client, server := net.Pipe()
		go func() {
			defer server.Close()
			var head [2]byte
			for {
				if _, err := readFull(server, head[:]); err != nil {
					return
				}
				query := make([]byte, binary.BigEndian.Uint16(head[:]))
				if _, err := readFull(server, query); err != nil {
					return
				}
				r := n.answer(query)
				binary.BigEndian.PutUint16(head[:], uint16(len(r)))
				_, _ = server.Write(append(head[:], r...))
			}
		}()
		return client, nil
	}}
}

func readFull(c net.Conn, p []byte) (int, error) {
	for got := 0; got < len(p); {
		n, err := c.Read(p[got:])
		if got += n; err != nil {
			return got, err
		}
	}
	return len(p), nil
}

func (n *names) answer(query []byte) []byte {
	var labels []string
	at := 12
	for query[at] != 0 {
		size := int(query[at])
		labels = append(labels, string(query[at+1:at+1+size]))
		at += 1 + size
	}
	question := query[12 : at+5]
	isA := query[at+2] == 1
	addrs, exists := n.records[strings.Join(labels, ".")]
	r := append([]byte{query[0], query[1], 0x81, 0x80, 0, 1, 0, 0, 0, 0, 0, 0}, question...)
	switch {
	case !exists:
		r[3] |= 3 // NXDOMAIN
	case len(addrs) == 0:
		r[3] |= 2 // SERVFAIL
	case isA:
		if turn := int(n.asked.Add(1)); labels[0] == "rebind" { // another address each time
			addrs = addrs[turn%len(addrs):][:1]
		}
		r[7] = byte(len(addrs))
		for _, a := range addrs {
			r = append(r, 0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 0, 0, 4)
			r = append(r, netip.MustParseAddr(a).AsSlice()...)
		}
	}
	return r
}

// listen accepts on an address of loopback and closes at once.
func listen(t *testing.T, addr string) uint16 {
	t.Helper()
	ln, err := net.Listen("tcp4", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { ln.Close() })
	go func() {
		for {
			conn, err := ln.Accept()
			if err != nil {
				return
			}
			conn.Close()
		}
	}()
	return uint16(ln.Addr().(*net.TCPAddr).Port)
}

func allow(t *testing.T, text string) egress.Policy {
	t.Helper()
	list, err := egress.ParseAllow(text)
	if err != nil {
		t.Fatal(err)
	}
	return egress.Policy{Allow: list}
}

func reasonOf(err error) egress.Reason {
	var r *egress.Refusal
	if errors.As(err, &r) {
		return r.Reason
	}
	return ""
}

func TestDialDecides(t *testing.T) {
	port := listen(t, "127.0.0.2:0")
	dns := &names{records: map[string][]string{
		"opened.test":  {"127.0.0.2"},
		"private.test": {"10.0.0.1"},
		"meta.test":    {"169.254.169.254"},
		"broken.test":  {},
		"mixed.test":   {"127.0.0.9", "10.0.0.1", "127.0.0.2"},
	}}
	g := New(allow(t, "127.0.0.2/32"), dns.resolver())
	for text, want := range map[string]egress.Reason{
		"opened.test":          "",
		"mixed.test":           "", // the one permitted address of three
		"127.0.0.2":            "",
		"[::ffff:127.0.0.2]":   "",
		"private.test":         egress.BadTarget,
		"meta.test":            egress.BadTarget,
		"missing.test":         egress.BadTarget,
		"broken.test":          egress.BadTarget,
		"127.0.0.1":            egress.BadTarget,
		"localhost":            egress.BadTarget,
		"[::1]":                egress.BadTarget,
		"[64:ff9b::7f00:2]":    egress.BadTarget,
		"[2002:7f00:2::1]":     egress.BadTarget,
		"[::ffff:169.254.1.1]": egress.BadTarget,
	} {
		target, r := egress.ParseTarget(text + ":1")
		if r != nil {
			t.Fatal(r)
		}
		target.Port = port
		conn, err := g.Dial(context.Background(), target)
		if err == nil {
			if got := conn.RemoteAddr().(*net.TCPAddr).IP.String(); got != "127.0.0.2" {
				t.Errorf("%s: connected to %s", text, got)
			}
			conn.Close()
		}
		if reasonOf(err) != want || want == "" && err != nil {
			t.Errorf("%s: %v, want %q", text, err, want)
		}
	}
}

func TestDialRefusesMailPortsBeforeResolving(t *testing.T) {
	dns := &names{records: map[string][]string{"opened.test": {"127.0.0.2"}}}
	g := New(allow(t, "127.0.0.0/8"), dns.resolver())
	for _, port := range egress.MailPorts {
		if _, err := g.Dial(context.Background(), egress.Target{Name: "opened.test", Port: port}); reasonOf(err) != egress.PortBlocked {
			t.Errorf("port %d: %v", port, err)
		}
	}
	if dns.asked.Load() != 0 {
		t.Error("a name was resolved for a closed port")
	}
}

func TestDialFailures(t *testing.T) {
	ln, err := net.Listen("tcp4", "127.71.3.4:0") // where nobody else listens, so that the port stays free
	if err != nil {
		t.Fatal(err)
	}
	port := uint16(ln.Addr().(*net.TCPAddr).Port)
	ln.Close()
	g := New(allow(t, "127.0.0.0/8"), nil)
	target := egress.Target{Addr: netip.MustParseAddr("127.71.3.4"), Port: port}
	if _, err := g.Dial(context.Background(), target); reasonOf(err) != egress.UpstreamUnreachable {
		t.Errorf("nobody listens: %v", err)
	}
	ctx, cancel := context.WithDeadline(context.Background(), time.Now().Add(-time.Second))
	defer cancel()
	if _, err := g.Dial(ctx, target); reasonOf(err) != egress.UpstreamTimeout {
		t.Errorf("out of time: %v", err)
	}
}

// A name server that changes its mind from answer to answer (DNS rebinding)
// gains nothing: what is checked is what connect gets.
func TestRebinding(t *testing.T) {
	port := listen(t, "127.0.0.2:0")
	var reached atomic.Bool
	closed, err := net.Listen("tcp4", net.JoinHostPort("127.0.0.3", strconv.Itoa(int(port))))
	if err != nil {
		t.Fatal(err)
	}
	defer closed.Close()
	go func() {
		if conn, err := closed.Accept(); err == nil {
			reached.Store(true)
			conn.Close()
		}
	}()
	dns := &names{records: map[string][]string{"rebind.test": {"127.0.0.2", "127.0.0.3"}}}
	g := New(allow(t, "127.0.0.2/32"), dns.resolver())
	outcomes := map[egress.Reason]int{}
	for range 6 {
		conn, err := g.Dial(context.Background(), egress.Target{Name: "rebind.test", Port: port})
		if err == nil {
			conn.Close()
		}
		outcomes[reasonOf(err)]++
	}
	if reached.Load() || outcomes[""] != 3 || outcomes[egress.BadTarget] != 3 {
		t.Errorf("reached %v, outcomes %v", reached.Load(), outcomes)
	}
}

// The computer's search domains are not applied to a session's names.
func TestNamesAreAbsolute(t *testing.T) {
	dns := &names{records: map[string][]string{"host.corp.test": {"127.0.0.2"}}}
	g := New(allow(t, "127.0.0.0/8"), dns.resolver())
	if _, err := g.Dial(context.Background(), egress.Target{Name: "host", Port: 80}); reasonOf(err) != egress.BadTarget {
		t.Errorf("got %v", err)
	}
}

// A target that a proxy is to resolve is checked as far as it can be.
func TestCheckLiteral(t *testing.T) {
	g := New(allow(t, "10.1.0.0/16"), nil)
	for text, want := range map[string]egress.Reason{
		"site.test": "", "8.8.8.8": "", "10.1.2.3": "", "nolocalhost": "", "[2606:4700::1111]": "",
		"10.2.0.1": egress.BadTarget, "127.0.0.1": egress.BadTarget, "localhost": egress.BadTarget, "LOCALHOST.": egress.BadTarget, "a.localhost": egress.BadTarget,
		"[::1]": egress.BadTarget, "[::ffff:10.2.0.1]": egress.BadTarget, "169.254.169.254": egress.BadTarget,
	} {
		target, r := egress.ParseTarget(text + ":80")
		if r != nil {
			t.Fatal(r)
		}
		if r := g.CheckLiteral(target); (r == nil) != (want == "") || r != nil && r.Reason != want {
			t.Errorf("%s: %v, want %q", text, r, want)
		}
	}
}

// A customer's proxy must be public wherever its name leads, at each dial; an
// operator's need not.
func TestDialProxy(t *testing.T) {
	port := listen(t, "127.0.0.2:0")
	dns := &names{records: map[string][]string{
		"opened.test": {"127.0.0.2"}, "private.test": {"10.0.0.1"}, "broken.test": {}, "rebind.test": {"127.0.0.2", "127.0.0.3"},
	}}
	g := New(allow(t, "127.0.0.2/32"), dns.resolver())
	for name, want := range map[string]egress.Reason{
		"opened.test": "", "private.test": egress.ProxyNotPublic, "localhost": egress.ProxyNotPublic,
		"missing.test": egress.UpstreamUnreachable, "broken.test": egress.UpstreamUnreachable,
	} {
		conn, err := g.DialProxy(context.Background(), egress.Target{Name: name, Port: port})
		if err == nil {
			conn.Close()
		}
		if reasonOf(err) != want {
			t.Errorf("%s: %v, want %q", name, err, want)
		}
	}
	outcomes := map[egress.Reason]int{}
	for range 4 {
		conn, err := g.DialProxy(context.Background(), egress.Target{Name: "rebind.test", Port: port})
		if err == nil {
			conn.Close()
		}
		outcomes[reasonOf(err)]++
	}
	if outcomes[""] != 2 || outcomes[egress.ProxyNotPublic] != 2 {
		t.Errorf("rebinding: %v", outcomes)
	}
	if _, err := g.DialProxy(context.Background(), egress.Target{Name: "opened.test", Port: 25}); reasonOf(err) != egress.PortBlocked {
		t.Errorf("a mail port: %v", err)
	}
	other := listen(t, "127.0.0.4:0")
	conn, err := g.DialTrusted(context.Background(), egress.Target{Addr: netip.MustParseAddr("127.0.0.4"), Port: other})
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
}
