package guard

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/berth-dev/berth/shared/egress"
)

// offLimits are addresses that no session reaches, by what makes them so. Of
// each a literal target and a name that resolves to it are tried.
var offLimits = map[string][]string{
	"this network":       {"0.0.0.0", "0.0.0.1", "0.255.255.255"},
	"private":            {"10.0.0.0", "10.0.0.1", "10.255.255.255", "172.16.0.1", "172.31.255.255", "192.168.0.1", "192.168.255.255"},
	"loopback":           {"127.0.0.1", "127.0.0.53", "127.255.255.255", "::1"},
	"link-local":         {"169.254.0.1", "169.254.77.1", "169.254.255.255", "fe80::1", "febf::1", "fec0::1"},
	"carrier-grade NAT":  {"100.64.0.0", "100.64.0.1", "100.127.255.255"},
	"metadata":           {"169.254.169.254", "100.100.100.200", "192.0.0.192", "fd00:ec2::254"},
	"unique local":       {"fc00::1", "fd12:3456:789a::1", "fdff:ffff::1"},
	"benchmarks":         {"198.18.0.1", "198.19.255.255", "2001:2::1"},
	"documentation":      {"192.0.2.1", "198.51.100.1", "203.0.113.1", "2001:db8::1", "3fff::1"},
	"multicast":          {"224.0.0.1", "239.255.255.250", "ff02::1", "ff0e::1"},
	"reserved":           {"240.0.0.1", "255.255.255.254", "255.255.255.255", "::", "::7f00:1", "100::1", "5f00::1"},
	"protocols":          {"192.0.0.1", "192.88.99.1", "2001::1", "2620:4f:8000::1"},
	"IPv4 in IPv6":       {"::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:169.254.169.254", "::ffff:a9fe:a9fe"},
	"IPv4 by NAT64":      {"64:ff9b::7f00:1", "64:ff9b::a9fe:a9fe", "64:ff9b::808:808", "64:ff9b:1::a9fe:a9fe"},
	"IPv4 by 6to4":       {"2002:7f00:1::1", "2002:a9fe:a9fe::1", "2002:808:808::1"},
	"IPv4 by Teredo":     {"2001:0:a9fe:a9fe::1"},
	"IPv4, old notation": {"::127.0.0.1", "::169.254.169.254"},
}

// numbers are hosts that a resolver or browser may read as an address.
var numbers = []string{
	"2130706433", "2852039166", "0", "4294967295", "017700000001", "0x7f000001", "0X7F000001", "0xa9fea9fe", // one number: decimal, octal, hex
	"127.1", "127.0.1", "10.1", "169.254.43518", // short
	"0177.0.0.1", "127.0.0.01", "0x7f.0.0.1", "127.0.0.0x1", "0xa9.0xfe.0xa9.0xfe", "0251.0376.0251.0376", // mixed
	"127.0.0.1.", "169.254.169.254.", "127.1.", "0x7f000001.", // a trailing dot
	"256.256.256.256", "1.2.3.4.5", "127.0.0.1:80", "[::ffff:127.0.0.1]", "fe80::1%lo",
	"%31%32%37.0.0.1", "127.0.0.1\x00.example.com", "127.0.0.1#.example.com", "user@127.0.0.1", "127。0。0。1", "①②⑦.⓪.⓪.①",
}

// record is what a guard would connect to.
type record struct {
	mu    sync.Mutex
	addrs []string // guarded by mu
}

func (r *record) dialled() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.addrs
}

// sockets makes a guard that connects nothing, and records what it would: a
// refusal must come before the kernel hears of an address.
func sockets(g *Guard) *record {
	r := &record{}
	decide := g.dialer.Control
	g.dialer.Control = func(network, address string, c syscall.RawConn) error {
		err := decide(network, address, c)
		if err == nil {
			r.mu.Lock()
			r.addrs = append(r.addrs, address)
			r.mu.Unlock()
			err = fmt.Errorf("would connect to %s", address)
		}
		return err
	}
	return r
}

func TestNothingThatIsNotPublicIsDialled(t *testing.T) {
	for why, addrs := range offLimits {
		for _, text := range addrs {
			addr := netip.MustParseAddr(text)
			g := New(egress.Policy{}, nil)
			seen := sockets(g)
			target, refused := egress.AddrTarget(addr, 443)
			if refused != nil {
				t.Fatal(refused)
			}
			if _, err := g.Dial(context.Background(), target); reasonOf(err) != egress.BadTarget {
				t.Errorf("%s: %s: %v", why, text, err)
			}
			if literal := net.JoinHostPort(text, "443"); !strings.Contains(text, "%") {
				target, refused := egress.ParseTarget(literal)
				if refused == nil {
					_, err := g.Dial(context.Background(), target)
					if reasonOf(err) != egress.BadTarget {
						t.Errorf("%s: %s: %v", why, literal, err)
					}
				}
			}
			if len(seen.dialled()) != 0 {
				t.Errorf("%s: %s would be connected to", why, text)
			}
		}
	}
}

// The same behind names, alone and among others.
func TestNamesOfWhatIsNotPublic(t *testing.T) {
	dns := &names{records: map[string][]string{}}
	for _, addrs := range offLimits {
		for _, text := range addrs {
			if addr := netip.MustParseAddr(text); addr.Is4() {
				dns.records["n"+strings.ReplaceAll(text, ".", "-")+".test"] = []string{text}
				dns.records["mixed"+strings.ReplaceAll(text, ".", "-")+".test"] = []string{text, "8.8.8.8", text}
			}
		}
	}
	for name := range dns.records {
		g := New(egress.Policy{}, dns.resolver())
		seen := sockets(g)
		target, refused := egress.ParseTarget(name + ".:443")
		if refused != nil {
			t.Fatal(refused)
		}
		_, err := g.Dial(context.Background(), target)
		if strings.HasPrefix(name, "mixed") {
			if got := seen.dialled(); !slices.Equal(got, []string{"8.8.8.8:443"}) {
				t.Errorf("%s: dialled %q: %v", name, got, err)
			}
		} else if reasonOf(err) != egress.BadTarget || len(seen.dialled()) != 0 {
			t.Errorf("%s: %v, dialled %q", name, err, seen.dialled())
		}
	}
}

// A host that somebody could take for an address is none, or the canonical one
// that it says, and then the guard decides.
func TestNumbersAreNoNames(t *testing.T) {
	dns := &names{records: map[string][]string{}}
	for _, host := range numbers {
		g := New(egress.Policy{}, dns.resolver())
		seen := sockets(g)
		for _, text := range []string{host + ":443", "[" + host + "]:443"} {
			target, refused := egress.ParseTarget(text)
			if refused != nil {
				if refused.Reason != egress.BadTarget {
					t.Errorf("%q: %v", text, refused)
				}
				continue
			}
			if target.Name != "" {
				t.Errorf("%q is the name %q", text, target.Name)
			}
			if _, err := g.Dial(context.Background(), target); reasonOf(err) != egress.BadTarget {
				t.Errorf("%q: %v", text, err)
			}
		}
		if len(seen.dialled()) != 0 || dns.asked.Load() != 0 {
			t.Errorf("%q: dialled %q, %d names asked for", host, seen.dialled(), dns.asked.Load())
		}
	}
}

// Addresses around the closed networks stay open, and what the operator opens
// is open in that form only.
func TestWhatStaysOpen(t *testing.T) {
	open := func(policy egress.Policy, text string) bool {
		g := New(policy, nil)
		seen := sockets(g)
		target, refused := egress.AddrTarget(netip.MustParseAddr(text), 443)
		if refused != nil {
			t.Fatal(refused)
		}
		_, _ = g.Dial(context.Background(), target)
		return len(seen.dialled()) == 1
	}
	for _, text := range []string{"1.1.1.1", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.0", "169.253.255.255",
		"169.255.0.0", "172.15.255.255", "172.32.0.0", "192.167.255.255", "192.169.0.0", "198.17.255.255", "198.20.0.0", "223.255.255.255",
		"2606:4700::1111", "2400:cb00::1", "2003::1", "::ffff:8.8.8.8"} {
		if !open(egress.Policy{}, text) {
			t.Errorf("%s is refused", text)
		}
	}
	lab := allow(t, "10.1.0.0/16,fd00:1::/32")
	for text, want := range map[string]bool{
		"10.1.2.3": true, "::ffff:10.1.2.3": true, "fd00:1::9": true,
		"10.2.0.1": false, "64:ff9b::a01:203": false, "2002:a01:203::1": false, "fd00:2::9": false,
	} {
		if open(lab, text) != want {
			t.Errorf("%s: open is %v", text, !want)
		}
	}
}
