package egress

import (
	"net/netip"
	"strconv"
	"strings"
)

// maxHost is the longest host name in text form (RFC 1035 2.3.4).
const maxHost = 253

// Target is where a connection wants to go: exactly one of Addr and Name is set.
type Target struct {
	Addr netip.Addr // a literal address, unmapped
	Name string     // a host name in lower case without the trailing dot
	Port uint16     // 1 to 65535
}

// Host is the target's host as text, without brackets.
func (t Target) Host() string {
	if t.Name != "" {
		return t.Name
	}
	return t.Addr.String()
}

// String is host:port, IPv6 in brackets.
func (t Target) String() string {
	port := strconv.Itoa(int(t.Port))
	if t.Addr.Is6() {
		return "[" + t.Addr.String() + "]:" + port
	}
	return t.Host() + ":" + port
}

// CheckPort refuses the mail ports.
func (t Target) CheckPort() *Refusal {
	if portBlocked(t.Port) {
		return Refuse(PortBlocked, "port %d is closed: outgoing mail ports are blocked", t.Port)
	}
	return nil
}

// ParseTarget reads "host:port"; an IPv6 address stands in brackets. What
// looks like a number but is not a canonical dotted quad (decimal, octal, hex
// or short forms, which resolvers take for addresses) is refused.
func ParseTarget(text string) (Target, *Refusal) {
	i := strings.LastIndexByte(text, ':')
	if i < 0 {
		return Target{}, Refuse(BadTarget, "%s has no port: give host:port", shown(text))
	}
	port, err := strconv.ParseUint(text[i+1:], 10, 16)
	if err != nil || port == 0 || text[i+1] == '0' {
		return Target{}, Refuse(BadTarget, "%s has no valid port: give a number from 1 to 65535", shown(text))
	}
	host := text[:i]
	if strings.HasPrefix(host, "[") && strings.HasSuffix(host, "]") && len(host) > 2 {
		return literal6(host[1:len(host)-1], uint16(port))
	}
	return HostTarget(host, uint16(port))
}

func literal6(host string, port uint16) (Target, *Refusal) {
	addr, err := netip.ParseAddr(host)
	if err != nil || !addr.Is6() || addr.Zone() != "" {
		return Target{}, Refuse(BadTarget, "%s is not an IPv6 address without a zone", shown(host))
	}
	return AddrTarget(addr, port)
}

// AddrTarget makes a target of an address that came in binary form (SOCKS5).
func AddrTarget(addr netip.Addr, port uint16) (Target, *Refusal) {
	if !addr.IsValid() || addr.Zone() != "" || port == 0 {
		return Target{}, Refuse(BadTarget, "not a valid address and port")
	}
	return Target{Addr: addr.Unmap(), Port: port}, nil
}

// HostTarget makes a target of a host without brackets and a port.
func HostTarget(host string, port uint16) (Target, *Refusal) {
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	if port == 0 {
		return Target{}, Refuse(BadTarget, "port 0 is not a port")
	}
	if len(name) == 0 || len(name) > maxHost {
		return Target{}, Refuse(BadTarget, "the host has %d characters: want 1 to %d", len(name), maxHost)
	}
	if addr, err := netip.ParseAddr(name); err == nil && addr.Is4() {
		return AddrTarget(addr, port)
	}
	if numeric(name) {
		return Target{}, Refuse(BadTarget, "%s is a number but no dotted IPv4 address", shown(host))
	}
	for label := range strings.SplitSeq(name, ".") {
		if !validLabel(label) {
			return Target{}, Refuse(BadTarget, "%s is not a host name", shown(host))
		}
	}
	return Target{Name: name, Port: port}, nil
}

// numeric says whether inet_aton (and the WHATWG URL parser, "ends in a
// number") could take name for an IPv4 address: its last label is decimal,
// octal or hex. No top-level domain is a number (RFC 3696 2), so no name is lost.
func numeric(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	if last == "" {
		return false
	}
	if hex, ok := strings.CutPrefix(last, "0x"); ok {
		return strings.Trim(hex, "0123456789abcdef") == ""
	}
	return strings.Trim(last, "0123456789") == ""
}

// validLabel takes letters, digits, hyphens and underscores (in wide use
// although RFC 952 lacks them), at most 63. Names beyond ASCII come as punycode.
func validLabel(label string) bool {
	if len(label) == 0 || len(label) > 63 {
		return false
	}
	for i := range len(label) {
		c := label[i]
		if c != '-' && c != '_' && (c < '0' || c > '9') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

// shown quotes foreign text for a message, cut to a readable length.
func shown(text string) string {
	if len(text) > 80 {
		text = text[:80] + "…"
	}
	return strconv.QuoteToASCII(text)
}
