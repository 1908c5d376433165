package network

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strings"
)

// segment is one packet that a guest sends or gets: enough of Ethernet, IPv4,
// TCP, UDP and ICMP to try rules with.
type segment struct {
	srcMAC, dstMAC string
	src, dst       netip.AddrPort
	proto          byte   // protoTCP, protoUDP, protoICMP
	flags          byte   // of TCP
	payload        string // of UDP
}

const (
	protoICMP, protoTCP, protoUDP = 1, 6, 17

	flagSYN, flagRST, flagACK = 0x02, 0x04, 0x10
)

const (
	etherLen = 14
	ipLen    = 20
)

// marshal gives the Ethernet frame.
func (s segment) marshal() []byte {
	frame := append(macOf(s.dstMAC), macOf(s.srcMAC)...)
	frame = append(frame, 0x08, 0x00)
	body := s.transport()
	ip := make([]byte, ipLen)
	ip[0], ip[8], ip[9] = 0x45, 64, s.proto
	binary.BigEndian.PutUint16(ip[2:], uint16(ipLen+len(body)))
	copy(ip[12:], s.src.Addr().AsSlice())
	copy(ip[16:], s.dst.Addr().AsSlice())
	binary.BigEndian.PutUint16(ip[10:], checksum(ip))
	return append(append(frame, ip...), body...)
}

func (s segment) transport() []byte {
	src, dst := s.src.Port(), s.dst.Port()
	switch s.proto {
	case protoTCP:
		b := make([]byte, 20)
		binary.BigEndian.PutUint16(b, src)
		binary.BigEndian.PutUint16(b[2:], dst)
		b[4], b[12], b[13] = 1, 5<<4, s.flags
		binary.BigEndian.PutUint16(b[14:], 65535)
		binary.BigEndian.PutUint16(b[16:], checksum(append(s.pseudo(len(b)), b...)))
		return b
	case protoUDP: // without a checksum, which IPv4 allows
		b := make([]byte, 8)
		binary.BigEndian.PutUint16(b, src)
		binary.BigEndian.PutUint16(b[2:], dst)
		binary.BigEndian.PutUint16(b[4:], uint16(8+len(s.payload)))
		return append(b, s.payload...)
	default: // an echo request with the source port as its id
		b := []byte{8, 0, 0, 0, byte(src >> 8), byte(src), 0, 1}
		binary.BigEndian.PutUint16(b[2:], checksum(b))
		return b
	}
}

// pseudo is the header that TCP's checksum begins with.
func (s segment) pseudo(size int) []byte {
	b := append(s.src.Addr().AsSlice(), s.dst.Addr().AsSlice()...)
	return append(b, 0, s.proto, byte(size>>8), byte(size))
}

func macOf(s string) []byte {
	mac, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return mac
}

// checksum is the internet checksum (RFC 1071).
func checksum(b []byte) uint16 {
	var sum uint32
	for ; len(b) > 1; b = b[2:] {
		sum += uint32(binary.BigEndian.Uint16(b))
	}
	if len(b) == 1 {
		sum += uint32(b[0]) << 8
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// read says what a frame is and, for an answer, which of the guest's ports it
// is for: "syn-ack", "reset", "syn", "udp", "echo", "icmp error" (of a packet
// that the guest sent), or a description of anything else.
func read(frame []byte) (what string, port uint16) {
	if len(frame) < etherLen+ipLen+8 || frame[12] != 0x08 || frame[13] != 0x00 {
		return fmt.Sprintf("no IPv4: %x", frame), 0
	}
	ip := frame[etherLen:]
	body := ip[int(ip[0]&0xf)*4:]
	port = binary.BigEndian.Uint16(body[2:])
	switch ip[9] {
	case protoTCP:
		return readFlags(body[13]), port
	case protoUDP:
		return "udp", port
	case protoICMP:
		if body[0] == 0 {
			return "echo", binary.BigEndian.Uint16(body[4:])
		}
		if body[0] == 3 && len(body) >= 8+ipLen+6 {
			inner := body[8:]
			if port = binary.BigEndian.Uint16(inner[ipLen:]); inner[9] == protoICMP {
				port = binary.BigEndian.Uint16(inner[ipLen+4:])
			}
			return "icmp error", port
		}
	}
	return fmt.Sprintf("protocol %d: %x", ip[9], body), 0
}

func readFlags(flags byte) string {
	var out []string
	for _, f := range []struct {
		bit  byte
		name string
	}{{flagSYN, "syn"}, {flagRST, "reset"}, {flagACK, "ack"}} {
		if flags&f.bit != 0 && (f.bit != flagACK || flags&flagRST == 0) {
			out = append(out, f.name)
		}
	}
	return strings.Join(out, "-")
}
