package network

import (
	"encoding/binary"
	"encoding/hex"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/berth-dev/berth/shared/agentlink"
)

// nameServer answers every query on UDP and TCP with the query itself, QR set,
// and padding.
type nameServer struct {
	addr    netip.AddrPort
	padding int
}

func newNameServer(t *testing.T, padding int) *nameServer {
	t.Helper()
	tcp, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ns := &nameServer{addr: tcp.Addr().(*net.TCPAddr).AddrPort(), padding: padding}
	udp, err := net.ListenUDP("udp4", net.UDPAddrFromAddrPort(ns.addr))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tcp.Close(); udp.Close() })
	go func() {
		buf := make([]byte, 4096)
		for {
			size, from, err := udp.ReadFromUDPAddrPort(buf)
			if err != nil {
				return
			}
			wrong := ns.reply(buf[:size])
			wrong[0] ^= 0xff // not the answer: another id
			_, _ = udp.WriteToUDPAddrPort(wrong, from)
			_, _ = udp.WriteToUDPAddrPort(ns.reply(buf[:size]), from)
		}
	}()
	go func() {
		for {
			conn, err := tcp.Accept()
			if err != nil {
				return
			}
			go ns.serveTCP(conn)
		}
	}()
	return ns
}

func (ns *nameServer) reply(query []byte) []byte {
	r := append(slices.Clone(query), make([]byte, ns.padding)...)
	r[2] |= 0x80
	return r
}

func (ns *nameServer) serveTCP(conn net.Conn) {
	defer conn.Close()
	for {
		var size [2]byte
		if _, err := io.ReadFull(conn, size[:]); err != nil {
			return
		}
		query := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(conn, query); err != nil {
			return
		}
		r := ns.reply(query)
		binary.BigEndian.PutUint16(size[:], uint16(len(r)))
		_, _ = conn.Write(append(size[:], r...))
	}
}

// aQuery asks for A of example.com with RD set.
var aQuery, _ = hex.DecodeString("beef01000001000000000000" + "076578616d706c6503636f6d00" + "00010001")

// tryInside dials from the slot; the connection stays in it.
func tryInside(s *Slot, network, addr string) (conn net.Conn, err error) {
	err = s.net.inNamespace(s.Info().NetNS, func() error {
		conn, err = net.DialTimeout(network, addr, 3*time.Second)
		return err
	})
	return conn, err
}

func dialInside(t *testing.T, s *Slot, network, addr string) net.Conn {
	t.Helper()
	conn, err := tryInside(s, network, addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
	return conn
}

func askInside(t *testing.T, s *Slot, query []byte) []byte {
	t.Helper()
	conn := dialInside(t, s, "udp", agentlink.SlotAddr+":53")
	if _, err := conn.Write(query); err != nil {
		t.Fatal(err)
	}
	buf := make([]byte, 1<<16)
	size, err := conn.Read(buf)
	if err != nil {
		t.Fatal(err)
	}
	return buf[:size]
}

func TestDNSIsPassedOn(t *testing.T) {
	good := newNameServer(t, 3000)
	n := openNet(t, func(c *Config) {
		dead := netip.MustParseAddrPort("127.0.0.1:1") // answers with an ICMP error
		c.Resolvers = []netip.AddrPort{dead, good.addr}
	})
	s := makeSlot(t, n)
	if got := askInside(t, s, aQuery); !slices.Equal(got, good.reply(aQuery)) {
		t.Errorf("UDP: %d bytes %x", len(got), got[:dnsHeader])
	}
	conn := dialInside(t, s, "tcp", agentlink.SlotAddr+":53")
	for range 2 { // RFC 7766: several queries on one connection
		if _, err := conn.Write(append([]byte{0, byte(len(aQuery))}, aQuery...)); err != nil {
			t.Fatal(err)
		}
		got := make([]byte, 2+len(aQuery)+3000)
		if _, err := io.ReadFull(conn, got); err != nil || !slices.Equal(got[2:], good.reply(aQuery)) {
			t.Fatalf("TCP: %v", err)
		}
	}
}

func TestDNSFailsWithServFail(t *testing.T) {
	n := openNet(t, func(c *Config) { c.Resolvers = []netip.AddrPort{netip.MustParseAddrPort("127.0.0.1:1")} })
	s := makeSlot(t, n)
	got := askInside(t, s, aQuery)
	want, _ := hex.DecodeString("beef81820000000000000000") // same id; QR RD RA, code 2
	if !slices.Equal(got, want) {
		t.Errorf("got %x, want %x", got, want)
	}
}

// A datagram too short for a header is dropped, and the next query answered.
func TestDNSIgnoresNoise(t *testing.T) {
	good := newNameServer(t, 0)
	n := openNet(t, func(c *Config) { c.Resolvers = []netip.AddrPort{good.addr} })
	s := makeSlot(t, n)
	conn := dialInside(t, s, "udp", agentlink.SlotAddr+":53")
	for _, q := range [][]byte{{}, {1}, make([]byte, dnsHeader-1), aQuery} {
		if _, err := conn.Write(q); err != nil {
			t.Fatal(err)
		}
	}
	buf := make([]byte, 512)
	size, err := conn.Read(buf)
	if err != nil || !slices.Equal(buf[:size], good.reply(aQuery)) {
		t.Fatalf("%v %x", err, buf[:size])
	}
}

func TestServFailProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		query := rapid.SliceOfN(rapid.Byte(), dnsHeader, 600).Draw(t, "query")
		r := servFail(query)
		if len(r) != dnsHeader || r[0] != query[0] || r[1] != query[1] {
			t.Fatalf("id: %x", r)
		}
		if r[2]&0x80 == 0 || r[3]&0x0f != 2 || r[2]&0x79 != query[2]&0x79 || r[2]&0x06 != 0 {
			t.Fatalf("flags of %x: %x", query[:4], r)
		}
		if !slices.Equal(r[4:], make([]byte, 8)) {
			t.Fatalf("sections: %x", r)
		}
	})
}

func TestParseResolvConf(t *testing.T) {
	text := "# local\nsearch example.com\nnameserver 10.0.0.1\n nameserver\tfe80::1%eth0 # why\nnameserver bad\nnameserver 1.1.1.1\nnameserver 9.9.9.9\n"
	got := parseResolvConf(text)
	want := []netip.AddrPort{netip.MustParseAddrPort("10.0.0.1:53"), netip.MustParseAddrPort("[fe80::1%eth0]:53"), netip.MustParseAddrPort("1.1.1.1:53")}
	if !slices.Equal(got, want) {
		t.Errorf("got %v", got)
	}
	if got := parseResolvConf("options edns0\n"); len(got) != 1 || got[0].String() != "127.0.0.1:53" {
		t.Errorf("empty: %v", got)
	}
}

func TestResolversFollowTheFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	r := &resolvers{path: path}
	write := func(text string, stamp time.Time) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, stamp, stamp); err != nil {
			t.Fatal(err)
		}
	}
	write("nameserver 10.0.0.1\n", time.Unix(1000, 0))
	if got := r.list(); got[0].Addr().String() != "10.0.0.1" {
		t.Fatal(got)
	}
	write("nameserver 10.0.0.2\n", time.Unix(2000, 0))
	if got := r.list(); got[0].Addr().String() != "10.0.0.1" {
		t.Fatalf("%v: looked again too soon", got)
	}
	r.check = time.Time{}
	if got := r.list(); got[0].Addr().String() != "10.0.0.2" {
		t.Fatal(got)
	}
}
