package front

import (
	"encoding/binary"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/berth-dev/berth/proxyd/meter"
)

func socksAddr(addr netip.Addr, port uint16) []byte {
	kind := byte(1)
	if addr.Is6() {
		kind = 4
	}
	return binary.BigEndian.AppendUint16(append([]byte{kind}, addr.AsSlice()...), port)
}

func socksName(name string, port uint16) []byte {
	return binary.BigEndian.AppendUint16(append([]byte{3, byte(len(name))}, name...), port)
}

// socksConnect does the handshake of RFC 1928 and gives the reply code.
func socksConnect(t *testing.T, conn net.Conn, addr []byte) byte {
	t.Helper()
	return socksCommand(t, conn, 1, addr)
}

func socksCommand(t *testing.T, conn net.Conn, command byte, addr []byte) byte {
	t.Helper()
	_, _ = conn.Write([]byte{5, 2, 0, 2})
	var method [2]byte
	if _, err := io.ReadFull(conn, method[:]); err != nil || method != [2]byte{5, 0} {
		t.Fatalf("method %v %v", method, err)
	}
	_, _ = conn.Write(append([]byte{5, command, 0}, addr...))
	var reply [10]byte
	if _, err := io.ReadFull(conn, reply[:]); err != nil || reply[0] != 5 || reply[3] != 1 {
		t.Fatalf("reply %v %v", reply, err)
	}
	if [6]byte(reply[4:]) != [6]byte{} {
		t.Errorf("the reply tells an address: %v", reply[4:])
	}
	return reply[1]
}

func TestSocksTunnelsAndCounts(t *testing.T) {
	r := newRig(t, 512, time.Second)
	port := portOf(t, echo(t))
	loopback := netip.MustParseAddr("127.0.0.1")
	for session, addr := range map[string][]byte{
		"v4":     socksAddr(loopback, port),
		"mapped": socksAddr(netip.AddrFrom16(loopback.As16()), port),
		"name":   socksName("127.0.0.1", port),
	} {
		conn := r.dial(session)
		if code := socksConnect(t, conn, addr); code != 0 {
			t.Errorf("%s: reply %d", session, code)
			continue
		}
		_, _ = conn.Write([]byte("hello"))
		_ = conn.CloseWrite()
		if got, err := io.ReadAll(conn); err != nil || string(got) != "hello" {
			t.Errorf("%s: %q %v", session, got, err)
		}
		if c := r.settled(session); c != (meter.Counts{Up: 5, Down: 5, Connections: 1}) {
			t.Errorf("%s: %+v", session, c)
		}
	}
}

// A client may send its first bytes with the request.
func TestSocksEarlyBytes(t *testing.T) {
	r := newRig(t, 512, time.Second)
	addr := socksAddr(netip.MustParseAddr("127.0.0.1"), portOf(t, echo(t)))
	conn := r.dial("s")
	_, _ = conn.Write(append(append([]byte{5, 1, 0, 5, 1, 0}, addr...), "early"...))
	_ = conn.CloseWrite()
	got, err := io.ReadAll(conn)
	if err != nil || len(got) != 2+10+5 || string(got[12:]) != "early" {
		t.Fatalf("%q %v", got, err)
	}
	if c := r.settled("s"); c.Up != 5 || c.Down != 5 {
		t.Errorf("%+v", c)
	}
}

func TestSocksRefusals(t *testing.T) {
	r := newRig(t, 512, time.Second)
	dead := portOf(t, nobody(t))
	for name, c := range map[string]struct {
		command byte
		addr    []byte
		code    byte
	}{
		"mail port":   {1, socksName("127.0.0.1", 25), 2},
		"not public":  {1, socksAddr(netip.MustParseAddr("10.0.0.1"), 80), 2},
		"loopback v6": {1, socksAddr(netip.MustParseAddr("::1"), 80), 2},
		"v6 as name":  {1, socksName("::1", 80), 2},
		"decimal":     {1, socksName("2130706433", 80), 2},
		"no name":     {1, socksName("", 80), 2},
		"port 0":      {1, socksName("127.0.0.1", 0), 2},
		"nobody":      {1, socksName("127.0.0.1", dead), 5},
		"bind":        {2, socksName("127.0.0.1", 80), 7},
		"associate":   {3, socksName("127.0.0.1", 80), 7},
	} {
		if code := socksCommand(t, r.dial("s"), c.command, c.addr); code != c.code {
			t.Errorf("%s: reply %d, want %d", name, code, c.code)
		}
	}
	r.settled("s")
}

// RFC 1928 3: a method that the client did not offer is not chosen; without one
// in common the answer is 0xFF. Logins (RFC 1929) are not asked for: who a
// connection is for, its pass says.
func TestSocksMethods(t *testing.T) {
	r := newRig(t, 512, time.Second)
	for offered, want := range map[string]byte{"\x00": 0, "\x02\x00": 0, "\x00\x01\x02": 0, "\x02": 0xff, "\x01\x80": 0xff} {
		conn := r.dial("s")
		_, _ = conn.Write(append([]byte{5, byte(len(offered))}, offered...))
		var got [2]byte
		if _, err := io.ReadFull(conn, got[:]); err != nil || got != [2]byte{5, want} {
			t.Errorf("%q: %v %v, want %d", offered, got, err, want)
		}
		conn.Close()
	}
	r.settled("s")
}

func TestSocksGarbageEnds(t *testing.T) {
	r := newRig(t, 512, time.Second)
	for _, wire := range [][]byte{{5, 0}, {5, 1, 2}, {5, 1, 0, 4, 1, 0, 1}, {5, 1, 0, 5, 1, 0, 9, 0, 0}, {5, 255}} {
		conn := r.dial("s")
		_, _ = conn.Write(wire)
		_ = conn.CloseWrite()
		_, _ = io.ReadAll(conn)
	}
	r.settled("s")
}
