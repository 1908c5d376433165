// Package egress decides, as pure functions, where a session's traffic may go:
// which addresses are public, which ports are closed, what a target is, and
// the reasons with which a connection is refused.
package egress

import (
	"fmt"
	"net/netip"
	"strings"
)

// NonPublic holds every network that a session must not reach unless the
// operator opened it. proxyd asks it through Policy; hostd/network writes the
// same table into the nftables of slots. Prefixes do not overlap within a
// family, which nft's interval sets want. Sources: the IANA IPv4 and IPv6
// special-purpose registries (RFC 6890 and its updates).
var NonPublic = prefixes(
	"0.0.0.0/8",       // this network, RFC 791; 0.0.0.0 reaches the host itself
	"10.0.0.0/8",      // private, RFC 1918
	"100.64.0.0/10",   // carrier-grade NAT, RFC 6598; 100.100.100.200 is a cloud's metadata
	"127.0.0.0/8",     // loopback, RFC 1122
	"169.254.0.0/16",  // link-local, RFC 3927; 169.254.169.254 is most clouds' metadata
	"172.16.0.0/12",   // private, RFC 1918
	"192.0.0.0/24",    // protocol assignments, RFC 6890; 192.0.0.192 is a cloud's metadata
	"192.0.2.0/24",    // TEST-NET-1, RFC 5737
	"192.88.99.0/24",  // 6to4 relays, deprecated by RFC 7526
	"192.168.0.0/16",  // private, RFC 1918
	"198.18.0.0/15",   // benchmarks, RFC 2544
	"198.51.100.0/24", // TEST-NET-2, RFC 5737
	"203.0.113.0/24",  // TEST-NET-3, RFC 5737
	"224.0.0.0/4",     // multicast, RFC 5771
	"240.0.0.0/4",     // reserved, RFC 1112, with limited broadcast

	"::/8",              // reserved: unspecified, loopback, v4-compatible, v4-mapped (RFC 4291), NAT64 64:ff9b::/96 and 64:ff9b:1::/48 (RFC 6052, 8215)
	"100::/64",          // discard, RFC 6666
	"100:0:0:1::/64",    // dummy prefix, RFC 9780
	"2001::/23",         // protocol assignments with Teredo (2001::/32), ORCHID and benchmarks, RFC 2928
	"2001:db8::/32",     // documentation, RFC 3849
	"2002::/16",         // 6to4, RFC 3056: an IPv4 address inside
	"2620:4f:8000::/48", // AS112 sink, RFC 7534
	"3fff::/20",         // documentation, RFC 9637
	"5f00::/16",         // segment routing identifiers, RFC 9602
	"fc00::/7",          // unique local, RFC 4193; fd00:ec2::254 is a cloud's metadata
	"fe80::/10",         // link-local, RFC 4291
	"fec0::/10",         // site-local, deprecated by RFC 3879
	"ff00::/8",          // multicast, RFC 4291
)

func prefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// Public says whether addr lies outside all of NonPublic. A v4-mapped address
// counts as the IPv4 address inside; one with a zone is never public.
func Public(addr netip.Addr) bool {
	if !addr.IsValid() || addr.Zone() != "" {
		return false
	}
	return !contains(NonPublic, addr.Unmap())
}

// Policy is what an operator changes about the table.
type Policy struct {
	// Allow opens networks that NonPublic closes.
	Allow []netip.Prefix
}

// Permits says whether a session may connect to addr.
func (p Policy) Permits(addr netip.Addr) bool {
	if !addr.IsValid() || addr.Zone() != "" {
		return false
	}
	return Public(addr) || contains(p.Allow, addr.Unmap())
}

func contains(list []netip.Prefix, addr netip.Addr) bool {
	for _, p := range list {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

// ParseAllow reads networks separated by commas ("10.1.0.0/16, fd00::/8"), as
// the setting egress.allow takes them; a bare address is a network of one.
// Empty text is an empty list. The error names the item that is wrong.
func ParseAllow(text string) ([]netip.Prefix, error) {
	if strings.TrimSpace(text) == "" {
		return nil, nil
	}
	var out []netip.Prefix
	for item := range strings.SplitSeq(text, ",") {
		p, err := parseNetwork(strings.TrimSpace(item))
		if err != nil {
			return nil, fmt.Errorf("egress allow: %w", err)
		}
		out = append(out, p)
	}
	return out, nil
}

func parseNetwork(item string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(item); err == nil && addr.Zone() == "" && !addr.Is4In6() {
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	p, err := netip.ParsePrefix(item)
	switch {
	case err != nil:
		return p, fmt.Errorf("%q is not a network such as 10.1.0.0/16 or fd00::/8", item)
	case p.Addr().Is4In6():
		return p, fmt.Errorf("%q is an IPv4 network in IPv6 form: write it as IPv4", item)
	case p != p.Masked():
		return p, fmt.Errorf("%q has bits set behind its length: did you mean %s?", item, p.Masked())
	}
	return p, nil
}
