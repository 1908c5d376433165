package egress

import (
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestPublic(t *testing.T) {
	closed := []string{
		"0.0.0.0", "10.0.0.1", "10.255.255.255", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.255.255.254",
		"169.254.169.254", "172.16.0.1", "172.31.255.255", "192.0.0.192", "192.0.2.1", "192.88.99.1", "192.168.1.1",
		"198.18.0.1", "198.19.255.255", "198.51.100.1", "203.0.113.9", "224.0.0.1", "239.255.255.250", "240.0.0.1", "255.255.255.255",
		"::", "::1", "::ffff:10.0.0.1", "::ffff:8.8.8.8%eth0", "::127.0.0.1", "64:ff9b::a00:1", "64:ff9b::808:808", "64:ff9b:1::1",
		"100::1", "2001::1", "2001:0:4136:e378::1", "2001:10::1", "2001:db8::1", "2002:a00:1::", "2620:4f:8000::1", "3fff::1", "5f00::1",
		"fc00::1", "fd00:ec2::254", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1",
	}
	open := []string{
		"1.1.1.1", "8.8.8.8", "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "126.255.255.255", "128.0.0.1",
		"169.253.255.255", "172.15.255.255", "172.32.0.0", "192.0.1.1", "192.167.255.255", "198.17.255.255", "198.20.0.0", "223.255.255.255",
		"::ffff:8.8.8.8", "2606:4700::1111", "2a00:1450:4001::1", "2001:4860:4860::8888", "2400:cb00::1",
	}
	for _, s := range closed {
		if Public(netip.MustParseAddr(s)) {
			t.Errorf("%s counts as public", s)
		}
	}
	for _, s := range open {
		if !Public(netip.MustParseAddr(s)) {
			t.Errorf("%s does not count as public", s)
		}
	}
	if Public(netip.Addr{}) || (Policy{}).Permits(netip.Addr{}) {
		t.Error("the zero address is permitted")
	}
}

// nft refuses interval sets whose elements overlap.
func TestTableHasNoOverlap(t *testing.T) {
	for i, p := range NonPublic {
		if p != p.Masked() {
			t.Errorf("%s has bits behind its length", p)
		}
		for _, q := range NonPublic[i+1:] {
			if p.Overlaps(q) {
				t.Errorf("%s and %s overlap", p, q)
			}
		}
	}
}

// What the standard library calls special is never public.
func TestNeverPublicProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var addr netip.Addr
		if rapid.Bool().Draw(t, "v4") {
			addr = netip.AddrFrom4([4]byte(rapid.SliceOfN(rapid.Byte(), 4, 4).Draw(t, "bytes")))
		} else {
			addr = netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "bytes")))
		}
		special := addr.IsPrivate() || addr.IsLoopback() || addr.IsLinkLocalUnicast() || addr.IsMulticast() || addr.IsUnspecified()
		if special && Public(addr) {
			t.Fatalf("%s is special and public", addr)
		}
		if addr.Is4() && Public(addr) != Public(netip.AddrFrom16(addr.As16())) {
			t.Fatalf("%s and its mapped form differ", addr)
		}
	})
}

func TestPolicyAllow(t *testing.T) {
	allow, err := ParseAllow(" 10.200.0.0/24, fd00::/64,192.0.2.7 ")
	if err != nil {
		t.Fatal(err)
	}
	p := Policy{Allow: allow}
	for addr, want := range map[string]bool{
		"10.200.0.2": true, "::ffff:10.200.0.2": true, "10.200.1.2": false, "fd00::9": true, "fd00:0:0:1::9": false, "fd00::9%eth0": false,
		"192.0.2.7": true, "192.0.2.8": false, "8.8.8.8": true, "127.0.0.1": false,
	} {
		if got := p.Permits(netip.MustParseAddr(addr)); got != want {
			t.Errorf("Permits(%s) = %v", addr, got)
		}
	}
}

func TestParseAllow(t *testing.T) {
	if got, err := ParseAllow("  "); err != nil || got != nil {
		t.Errorf("empty: %v %v", got, err)
	}
	for text, want := range map[string]string{
		"10.0.0.0/8,web":      `"web" is not a network`,
		"10.0.0.0/8,":         `"" is not a network`,
		"10.1.2.3/16":         "did you mean 10.1.0.0/16?",
		"::ffff:10.0.0.0/104": "write it as IPv4",
		"10.0.0.0/33":         `"10.0.0.0/33"`,
		"fe80::1%eth0":        "is not a network",
	} {
		_, err := ParseAllow(text)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("ParseAllow(%q) = %v, want %q in it", text, err, want)
		}
	}
}
