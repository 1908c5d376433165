package egress

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestParseTarget(t *testing.T) {
	good := map[string]string{
		"example.com:443":            "example.com:443",
		"EXAMPLE.com.:80":            "example.com:80",
		"a_b.example:1":              "a_b.example:1",
		"localhost:65535":            "localhost:65535", // resolves to loopback, which the guard refuses
		"8.8.8.8:53":                 "8.8.8.8:53",
		"8.8.8.8.:53":                "8.8.8.8:53",
		"[2001:4860:4860::8888]:443": "[2001:4860:4860::8888]:443",
		"[::ffff:8.8.8.8]:443":       "8.8.8.8:443",
		"xn--mnchen-3ya.de:443":      "xn--mnchen-3ya.de:443",
		"1e100.net:80":               "1e100.net:80",
		"0xdead.example:80":          "0xdead.example:80",
	}
	for text, want := range good {
		got, r := ParseTarget(text)
		if r != nil || got.String() != want {
			t.Errorf("ParseTarget(%q) = %v, %v; want %s", text, got, r, want)
		}
	}
	bad := []string{
		"", ":", ":80", "example.com", "example.com:", "example.com:0", "example.com:00080", "example.com:65536", "example.com:-1",
		"example.com:+80", "example.com:http", "example.com:8 0", " example.com:80", "exa mple.com:80", "example..com:80", ".com:80", "..:80",
		"user@example.com:80", "http://example.com:80", "example.com/:80", "münchen.de:80", "a\x00b:80", "a\r\nb:80", "a%41:80",
		// what inet_aton takes for an address
		"2130706433:80", "0x7f000001:80", "0x7f.1:80", "0177.0.0.1:80", "127.1:80", "127.0.1:80", "127.0.0.01:80", "127.0.0.0x1:80", "0x:80",
		"1.2.3.4.5:80", "256.256.256.256:80", "foo.1:80", "0:80", "127.0.0.1..:80", "0X7F000001:80",
		"::1:80", "[::1:80", "::1]:80", "[]:80", "[8.8.8.8]:80", "[fe80::1%eth0]:80", "[example.com]:80", "[::1]x:80", "[[::1]]:80",
		strings.Repeat("a", 64) + ".com:80", strings.Repeat("a.", 127) + ":80", strings.Repeat("abc.", 64) + "com:80",
	}
	for _, text := range bad {
		got, r := ParseTarget(text)
		if r == nil {
			if len(text) == 257 && len(got.Name) == 253 { // 127 labels of one letter: as long as a name can be
				continue
			}
			t.Errorf("ParseTarget(%q) = %v, want a refusal", text, got)
			continue
		}
		if r.Reason != BadTarget || r.Detail == "" || len(r.Detail) > 400 {
			t.Errorf("ParseTarget(%q): refusal %+v", text, r)
		}
	}
}

func TestCheckPort(t *testing.T) {
	for port := 1; port <= 65535; port++ {
		r := Target{Name: "x", Port: uint16(port)}.CheckPort()
		mail := port == 25 || port == 465 || port == 587 || port == 2525
		if (r != nil) != mail || mail && r.Reason != PortBlocked {
			t.Fatalf("port %d: %v", port, r)
		}
	}
}

// A target's text parses to the same target again.
func TestTargetRoundTripProperty(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		label := rapid.StringMatching(`[a-z][a-z0-9_-]{0,20}`)
		host := strings.Join(rapid.SliceOfN(label, 1, 5).Draw(t, "labels"), ".")
		if rapid.Bool().Draw(t, "literal") {
			addr := netip.AddrFrom16([16]byte(rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "addr")))
			host = addr.Unmap().String()
		}
		port := rapid.Uint16Range(1, 65535).Draw(t, "port")
		text := net.JoinHostPort(host, netip.AddrPortFrom(netip.IPv4Unspecified(), port).String()[len("0.0.0.0:"):])
		first, r := ParseTarget(text)
		if r != nil {
			t.Fatalf("%q: %v", text, r)
		}
		second, r := ParseTarget(first.String())
		if r != nil || first != second {
			t.Fatalf("%q: %v, then %v %v", text, first, second, r)
		}
	})
}

// Whatever is accepted names one host that no resolver reads as another: a
// canonical address, or a name that cannot be an address.
func FuzzParseTarget(f *testing.F) {
	for _, s := range []string{"example.com:80", "[::1]:1", "127.1:80", "0x7f.1:25", "a.:1", "::1:1", "[::ffff:1.2.3.4]:9"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, text string) {
		target, r := ParseTarget(text)
		if r != nil {
			if r.Reason != BadTarget {
				t.Fatalf("%q: reason %s", text, r.Reason)
			}
			return
		}
		if target.Port == 0 || (target.Name == "") != target.Addr.IsValid() || target.Addr.Zone() != "" || target.Addr.Is4In6() {
			t.Fatalf("%q: %+v", text, target)
		}
		if target.Name != "" {
			last := target.Name[strings.LastIndexByte(target.Name, '.')+1:]
			if len(target.Name) > 253 || net.ParseIP(target.Name) != nil || last == "" || strings.Trim(last, "0123456789") == "" {
				t.Fatalf("%q: name %q", text, target.Name)
			}
		}
		again, r := ParseTarget(target.String())
		if r != nil || again != target {
			t.Fatalf("%q: %v then %v %v", text, target, again, r)
		}
	})
}
