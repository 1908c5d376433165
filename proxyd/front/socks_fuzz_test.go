package front

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"

	"github.com/things-go/go-socks5"

	"github.com/berth-dev/berth/shared/egress"
)

// socksFrame reads a request as RFC 1928 4 has it: where it leads, by address or
// by name, and how long it is; 0 for one that is none or not whole.
func socksFrame(b []byte) (addr netip.Addr, name string, port uint16, size int) {
	if len(b) < 5 || b[0] != 5 {
		return addr, "", 0, 0
	}
	from, n := 4, 0
	switch b[3] {
	case 1:
		n = 4
	case 3:
		from, n = 5, int(b[4])
	case 4:
		n = 16
	default:
		return addr, "", 0, 0
	}
	if len(b) < from+n+2 {
		return addr, "", 0, 0
	}
	host := b[from : from+n]
	if b[3] == 3 {
		name = string(host)
	} else {
		addr, _ = netip.AddrFromSlice(host)
	}
	return addr, name, binary.BigEndian.Uint16(b[from+n:]), from + n + 2
}

// What a client asks for in SOCKS is what is decided on: the library and this
// package read a frame as its bytes say, take no byte behind it, and a target
// that comes out is one that HTTP could have asked for as well.
func FuzzSocksRequest(f *testing.F) {
	f.Add([]byte("\x05\x01\x00\x01\x7f\x00\x00\x01\x00\x50rest"))
	f.Add([]byte("\x05\x01\x00\x03\x06a.test\x01\xbb\x16\x03\x01"))
	f.Add([]byte("\x05\x01\x00\x03\x0a2130706433\x00\x50"))
	f.Add([]byte("\x05\x01\x00\x03\x0e127.0.0.1\x00.com\x00\x50"))
	f.Add([]byte("\x05\x01\x00\x03\x03::1\x00\x50"))
	f.Add([]byte("\x05\x01\x00\x03\x00\x00\x50"))
	f.Add(append([]byte("\x05\x01\x00\x03\xff"), append(bytes.Repeat([]byte("a."), 127), "b\x00\x50"...)...))
	f.Add([]byte("\x05\x01\x00\x04\x00\x64\xff\x9b\x00\x00\x00\x00\x00\x00\x00\x00\x7f\x00\x00\x01\x00\x50"))
	f.Add([]byte("\x05\x01\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\xff\xff\x0a\x00\x00\x01\x00\x50"))
	f.Add([]byte("\x05\x01\x00\x09\x00\x50"))
	f.Add([]byte("\x04\x01\x00\x50\x7f\x00\x00\x01\x00"))
	f.Fuzz(func(t *testing.T, wire []byte) {
		in := bytes.NewReader(wire)
		r, err := socks5.ParseRequest(in)
		addr, name, port, size := socksFrame(wire)
		if err != nil {
			return
		}
		if size == 0 || len(wire)-in.Len() != size {
			t.Fatalf("took %d bytes of %q, a frame has %d", len(wire)-in.Len(), wire, size)
		}
		target, refused := socksTarget(r)
		if refused != nil {
			if refused.Reason != egress.BadTarget {
				t.Fatalf("%q: %v", wire, refused)
			}
			return
		}
		want := egress.Target{Addr: addr.Unmap(), Port: port}
		if name != "" {
			if want, refused = egress.HostTarget(name, port); refused != nil {
				literal, err := netip.ParseAddr(name)
				want = egress.Target{Addr: literal.Unmap(), Port: port}
				if err != nil {
					t.Fatalf("%q leads to %s", wire, target)
				}
			}
		}
		if again, refused := egress.ParseTarget(target.String()); target != want || refused != nil || again != target {
			t.Fatalf("%q leads to %s, should to %s, and reads back as %s (%v)", wire, target, want, again, refused)
		}
	})
}
