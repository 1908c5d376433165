package network

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/berth-dev/berth/shared/agentlink"
)

// guestEnd is a machine with a kernel of its own, as far as the slot can see:
// it writes frames to the tap device and collects what comes back.
type guestEnd struct {
	t    testing.TB
	tap  *os.File
	port uint16 // of the last packet sent

	mu    sync.Mutex
	since uint16              // answers to ports from firstPort to here are of awaitLink and not kept
	got   map[uint16][]string // by the guest's port
	more  chan struct{}       // told of each frame
	done  chan struct{}
}

// firstPort is the last port before those that packets are sent from.
const firstPort = 20000

// nobodyAddr is in the opened network, but nobody has it.
const nobodyAddr = "10.226.0.77"

// vnetLen is the virtio_net_hdr before each frame.
const vnetLen = 10

func withTap(c *Config) { c.Tap = true }

func attachGuest(t testing.TB, s *Slot) *guestEnd {
	t.Helper()
	tap, err := openTap(s)
	if err != nil {
		t.Fatal(err)
	}
	g := &guestEnd{t: t, tap: tap, port: firstPort, got: map[uint16][]string{}, more: make(chan struct{}, 1), done: make(chan struct{})}
	go g.collect()
	t.Cleanup(g.detach)
	g.awaitLink()
	return g
}

// awaitLink waits until the device passes frames: the kernel takes a moment
// after one has attached to it.
func (g *guestEnd) awaitLink() {
	g.t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); {
		p := g.packet(protoTCP, flagACK, agentlink.SlotAddr+":1")
		g.send(p.marshal())
		if g.first(p.src.Port(), 20*time.Millisecond) == "reset" {
			g.mu.Lock()
			defer g.mu.Unlock()
			g.since = g.port
			clear(g.got)
			return
		}
	}
	g.t.Fatal("the tap device passes nothing")
}

// openTap opens the slot's tap device as a driver does.
func openTap(s *Slot) (tap *os.File, err error) {
	err = s.net.inNamespace(s.info.NetNS, func() error {
		fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
		if err != nil {
			return err
		}
		request, err := unix.NewIfreq(agentlink.TapName)
		if err == nil {
			request.SetUint16(tapFlags)
			err = unix.IoctlIfreq(fd, unix.TUNSETIFF, request)
		}
		if err != nil {
			return errors.Join(err, unix.Close(fd))
		}
		tap = os.NewFile(uintptr(fd), agentlink.TapName)
		return nil
	})
	return tap, err
}

func (g *guestEnd) detach() {
	g.tap.Close()
	<-g.done
}

func (g *guestEnd) collect() {
	defer close(g.done)
	buf := make([]byte, 1<<16)
	for {
		size, err := g.tap.Read(buf)
		if err != nil {
			return
		}
		what, port := read(buf[vnetLen:size])
		g.mu.Lock()
		if port <= firstPort || port > g.since {
			g.got[port] = append(g.got[port], what)
		}
		g.mu.Unlock()
		select {
		case g.more <- struct{}{}:
		default:
		}
	}
}

// packet completes a packet of the guest's own with a source port that no
// other has.
func (g *guestEnd) packet(proto, flags byte, to string) segment {
	g.port++
	dst, err := netip.ParseAddrPort(to)
	if err != nil {
		g.t.Fatal(err)
	}
	return segment{srcMAC: agentlink.GuestMAC, dstMAC: agentlink.TapMAC, dst: dst, proto: proto, flags: flags, payload: "ping",
		src: netip.AddrPortFrom(netip.MustParseAddr(agentlink.GuestAddr), g.port)}
}

func (g *guestEnd) send(frame []byte) {
	g.t.Helper()
	if _, err := g.tap.Write(append(make([]byte, vnetLen), frame...)); err != nil {
		g.t.Fatal(err)
	}
}

// first waits for the first frame to a port.
func (g *guestEnd) first(port uint16, wait time.Duration) string {
	deadline := time.After(wait)
	for {
		g.mu.Lock()
		got := g.got[port]
		g.mu.Unlock()
		if len(got) > 0 {
			return got[0]
		}
		select {
		case <-g.more:
		case <-deadline:
			return "nothing"
		}
	}
}

// expect sends a packet for each row, all at once, and compares the answers.
func (g *guestEnd) expect(want map[string]string) {
	g.t.Helper()
	ports := map[string]uint16{}
	for row := range want {
		kind, to, _ := strings.Cut(row, " ")
		var p segment
		switch kind {
		case "syn":
			p = g.packet(protoTCP, flagSYN, to)
		case "syn-ack":
			p = g.packet(protoTCP, flagSYN|flagACK, to)
		case "ack":
			p = g.packet(protoTCP, flagACK, to)
		case "udp":
			p = g.packet(protoUDP, 0, to)
		case "ping":
			p = g.packet(protoICMP, 0, to+":0")
		default:
			g.t.Fatalf("row %q", row)
		}
		ports[row] = p.src.Port()
		g.send(p.marshal())
	}
	for row, answer := range want {
		wait := 30 * time.Second
		if answer == "nothing" {
			wait = 300 * time.Millisecond
		}
		if got := g.first(ports[row], wait); got != answer {
			g.t.Errorf("%s: %s, want %s", row, got, answer)
		}
	}
}

func TestGuestReachesWhatItMay(t *testing.T) {
	resolver, err := net.ListenPacket("udp4", "127.0.0.1:0") // echoes: DNS is relayed unread
	if err != nil {
		t.Fatal(err)
	}
	defer resolver.Close()
	go answerQueries(resolver)
	n := openNet(t, func(c *Config) {
		c.Tap = true
		c.Resolvers = []netip.AddrPort{netip.MustParseAddrPort(resolver.LocalAddr().String())}
	})
	w := newWeb(t, n, echoPort)
	w.echo(n, filepath.Join(netnsDir, webNS), publicAddr, 4009)
	s, other := makeSlot(t, n), makeSlot(t, n)
	w.echo(n, s.Info().NetNS, "0.0.0.0", 8000)
	slotAddr, otherAddr := n.addr(s.Info().Index).String(), n.addr(other.Info().Index).String()
	g := attachGuest(t, s)
	g.expect(map[string]string{
		"syn " + agentlink.SlotAddr + egressPort: "syn-ack",
		"syn " + agentlink.SlotAddr + ":53":      "syn-ack",
		"syn " + agentlink.SlotAddr + ":8000":    "reset",
		"udp " + agentlink.SlotAddr + ":78":      "icmp error",
		"syn " + agentlink.TapAddr + ":8000":     "reset",
		"ping " + agentlink.TapAddr:              "icmp error",
		"syn " + slotAddr + ":8000":              "reset",
		"syn 127.0.0.1:8000":                     "nothing",
		"syn " + gatewayAddr.String() + ":8000":  "reset",

		"syn " + webAddr + ":4007":    "syn-ack", // private, but opened
		"udp " + webAddr + ":4007":    "udp",
		"ping " + webAddr:             "echo",
		"syn " + publicAddr + ":4007": "syn-ack",
		"udp " + publicAddr + ":4009": "udp",

		// Flows that nobody here knows, as after a move.
		"ack " + nobodyAddr + ":4007":            "reset",
		"syn-ack " + nobodyAddr + ":4007":        "reset",
		"ack " + webAddr + ":4007":               "reset",
		"ack " + publicAddr + ":4007":            "reset",
		"ack " + agentlink.SlotAddr + egressPort: "reset",
		"ack " + agentlink.TapAddr + ":40000":    "reset",
		"ack " + otherAddr + ":4007":             "reset",
	})
	query := g.packet(protoUDP, 0, agentlink.SlotAddr+":53")
	query.payload = strings.Repeat("\x00", 12)
	g.send(query.marshal())
	if got := g.first(query.src.Port(), 5*time.Second); got != "udp" {
		t.Errorf("a DNS query: %s", got)
	}
}

// What is closed to a guest is refused at once, by the two layers and by the
// slot's alone.
func TestGuestIsRefusedAtOnce(t *testing.T) {
	n := openNet(t, withTap)
	w := newWeb(t, n, echoPort, 25, 465, 587, 2525)
	w.echo(n, "", hostAddr, 4008)
	s, other := makeSlot(t, n), makeSlot(t, n)
	w.echo(n, other.Info().NetNS, "0.0.0.0", echoPort)
	otherAddr := n.addr(other.Info().Index).String()
	g := attachGuest(t, s)
	want := map[string]string{
		"syn " + privAddr + ":4007":  "reset",
		"udp " + privAddr + ":4007":  "icmp error",
		"ping " + privAddr:           "icmp error",
		"syn " + metaAddr + ":4007":  "reset",
		"syn " + cgnatAddr + ":4007": "reset",
		"syn " + otherAddr + ":4007": "reset",
		"syn " + webAddr + ":25":     "reset",
		"syn " + webAddr + ":465":    "reset",
		"syn " + webAddr + ":587":    "reset",
		"syn " + webAddr + ":2525":   "reset",
		"udp " + webAddr + ":25":     "icmp error",
		"udp 224.0.0.251:5353":       "nothing", // multicast is not answered
		"udp 255.255.255.255:4007":   "nothing",
	}
	g.expect(want)
	// Only the host's layer knows which addresses of an opened network are the host's.
	g.expect(map[string]string{"syn " + hostAddr + ":4008": "reset", "udp " + hostAddr + ":4008": "icmp error"})
	for _, chain := range []string{"input", "forward"} {
		run(t, "nft flush chain inet "+testName+" "+chain)
	}
	g.expect(want)
}

// arpRequest asks who has an address, as the guest.
func arpRequest(addr string) []byte {
	frame := append(macOf("ff:ff:ff:ff:ff:ff"), macOf(agentlink.GuestMAC)...)
	frame = append(frame, 0x08, 0x06, 0, 1, 0x08, 0, 6, 4, 0, 1)
	frame = append(append(frame, macOf(agentlink.GuestMAC)...), netip.MustParseAddr(agentlink.GuestAddr).AsSlice()...)
	return append(append(frame, make([]byte, 6)...), netip.MustParseAddr(addr).AsSlice()...)
}

// routerSolicitation is what an IPv6 host says first, to all routers.
func routerSolicitation() []byte {
	frame := append(macOf("33:33:00:00:00:02"), macOf(agentlink.GuestMAC)...)
	frame = append(frame, 0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, 58, 255)
	frame = append(frame, netip.MustParseAddr("fe80::be:27ff:fe00:4").AsSlice()...)
	frame = append(frame, netip.MustParseAddr("ff02::2").AsSlice()...)
	return append(frame, 133, 0, 0x7b, 0x4c, 0, 0, 0, 0)
}

func answerQueries(conn net.PacketConn) {
	buf := make([]byte, 512)
	for {
		size, from, err := conn.ReadFrom(buf)
		if err != nil {
			return
		}
		if size > 2 {
			buf[2] |= 0x80 // an answer
		}
		_, _ = conn.WriteTo(buf[:size], from)
	}
}

// counter reads one of the slot's counters.
func (s *Slot) counter(t testing.TB, name string) (packets int) {
	t.Helper()
	var out string
	if err := s.net.inNamespace(s.info.NetNS, func() error {
		out = run(t, "nft list counter inet slot "+name)
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	_, after, _ := strings.Cut(out, "packets ")
	if _, err := fmt.Sscan(after, &packets); err != nil {
		t.Fatalf("%q: %v", out, err)
	}
	return packets
}

// Whatever a guest writes to its card: other addresses, other cards, ARP,
// IPv6, DHCP. It gets no answer, and nothing of it leaves the slot.
func TestGuestCannotPretend(t *testing.T) {
	n := openNet(t, withTap)
	newWeb(t, n, echoPort)
	s := makeSlot(t, n)
	g := attachGuest(t, s)
	frames := watch(t, s.Info().Name)
	self := n.addr(s.Info().Index)
	for _, src := range []string{"8.8.8.8", agentlink.TapAddr, agentlink.SlotAddr, self.String(), "0.0.0.0", "127.0.0.1", "169.254.78.3"} {
		for _, to := range []string{webAddr + ":4007", agentlink.SlotAddr + ":78"} {
			p := g.packet(protoTCP, flagSYN, to)
			p.src = netip.AddrPortFrom(netip.MustParseAddr(src), p.src.Port())
			g.send(p.marshal())
		}
	}
	for _, mac := range []string{"02:be:27:00:00:05", agentlink.TapMAC, "ff:ff:ff:ff:ff:ff"} {
		p := g.packet(protoTCP, flagSYN, webAddr+":4007")
		p.srcMAC = mac
		g.send(p.marshal())
	}
	g.send(arpRequest(agentlink.TapAddr))
	g.send(arpRequest(gatewayAddr.String()))
	g.send(routerSolicitation())
	dhcp := g.packet(protoUDP, 0, "255.255.255.255:67")
	dhcp.src, dhcp.dstMAC = netip.MustParseAddrPort("0.0.0.0:68"), "ff:ff:ff:ff:ff:ff"
	g.send(dhcp.marshal())
	tagged := g.packet(protoTCP, flagSYN, webAddr+":4007").marshal() // in a VLAN
	g.send(append(append(append([]byte(nil), tagged[:12]...), 0x81, 0, 0, 1), tagged[12:]...))

	// The mark is the first packet that may pass; all before it has been judged.
	mark := g.packet(protoUDP, 0, webAddr+":4007")
	mark.payload = "MARK-ON-THE-WIRE"
	g.send(mark.marshal())
	for _, f := range frames.until(t, "MARK-ON-THE-WIRE") {
		t.Errorf("a frame left the slot: %x", f)
	}
	if got := g.first(mark.src.Port(), 30*time.Second); got != "udp" {
		t.Fatalf("the mark: %s", got)
	}
	if counted := s.counter(t, "spoofed"); counted < 14 {
		t.Errorf("%d packets were counted", counted)
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if delete(g.got, mark.src.Port()); len(g.got) > 0 {
		t.Errorf("the guest got answers: %v", g.got)
	}
}

// hostd reaches the agent's port and no other; nothing else comes in.
func TestOnlyTheAgentsPortIsReached(t *testing.T) {
	n := openNet(t, withTap)
	s := makeSlot(t, n)
	g := attachGuest(t, s)
	dial := func(port int) error {
		var conn net.Conn
		err := n.inNamespace(s.Info().NetNS, func() (err error) {
			conn, err = net.DialTimeout("tcp4", net.JoinHostPort(agentlink.GuestAddr, fmt.Sprint(port)), time.Second)
			return err
		})
		if err == nil {
			conn.Close()
		}
		return err
	}
	for tries := 1; ; tries++ { // one that this computer was too busy for says nothing
		began := time.Now()
		err := dial(agentlink.AgentPort + 1)
		if took := time.Since(began); errors.Is(err, syscall.ECONNREFUSED) && took <= 500*time.Millisecond {
			break
		} else if tries == 10 {
			t.Fatalf("another port: %v after %s, want a refusal at once", err, took)
		}
	}
	var late net.Error
	if err := dial(agentlink.AgentPort); !errors.As(err, &late) || !late.Timeout() { // nobody answers here
		t.Errorf("the agent's port: %v", err)
	}
	if got := g.first(agentlink.AgentPort, 30*time.Second); got != "syn" {
		t.Errorf("at the agent's port arrived: %s", got)
	}
	if got := g.first(agentlink.AgentPort+1, 0); got != "nothing" {
		t.Errorf("at another port arrived: %s", got)
	}
}

// The host's layer holds without the slot's: it knows the slot's address only.
func TestGuestIsKeptInByTheHostAlone(t *testing.T) {
	n := openNet(t, withTap)
	newWeb(t, n, echoPort)
	s := makeSlot(t, n)
	g := attachGuest(t, s)
	if err := n.inNamespace(s.Info().NetNS, func() error { run(t, "nft flush ruleset"); return nil }); err != nil {
		t.Fatal(err)
	}
	for _, src := range []string{agentlink.GuestAddr, "8.8.8.8"} {
		for _, addr := range []string{webAddr, publicAddr, privAddr, metaAddr} {
			p := g.packet(protoTCP, flagSYN, addr+":4007")
			p.src = netip.AddrPortFrom(netip.MustParseAddr(src), p.src.Port())
			g.send(p.marshal())
			if got := g.first(p.src.Port(), 50*time.Millisecond); got == "syn-ack" {
				t.Errorf("%s reached %s", src, addr)
			}
		}
	}
}

// A machine that died leaves its slot's tap to the next one.
func TestTapHasOneEndAtATime(t *testing.T) {
	n := openNet(t, withTap)
	s := makeSlot(t, n)
	g := attachGuest(t, s)
	if second, err := openTap(s); !errors.Is(err, syscall.EBUSY) {
		t.Errorf("a second end: %v, %v", second, err)
	}
	g.detach()
	attachGuest(t, s).expect(map[string]string{"syn " + agentlink.SlotAddr + egressPort: "syn-ack"})
}

// A slot made for another kind of driver is not adopted, in either direction.
func TestAdoptWantsTheSameKindOfSlot(t *testing.T) {
	needRoot(t)
	for _, tap := range []bool{false, true} {
		first, err := Open(context.Background(), Config{Name: testName, Subnet: netip.MustParsePrefix(testSubnet), Tap: tap})
		if err != nil {
			t.Fatal(err)
		}
		info := makeSlot(t, first).Info()
		if err := first.Close(); err != nil {
			t.Fatal(err)
		}
		t.Run(fmt.Sprintf("tap %t", tap), func(t *testing.T) {
			n := openNet(t, func(c *Config) { c.Tap = !tap })
			if _, err := n.Adopt(context.Background(), info); err == nil {
				t.Error("adopted")
			}
		})
	}
}
