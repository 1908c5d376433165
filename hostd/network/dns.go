package network

import (
	"context"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/berth-dev/berth/shared/proxylink"
)

const (
	dnsTimeout = 5 * time.Second // for a whole query, all resolvers together
	maxDNS     = 64              // queries of one slot under way, and as many TCP connections
	maxQuery   = 4096            // bytes of a UDP query
	dnsHeader  = 12              // bytes of a DNS header, RFC 1035 4.1.1
)

// answers are buffers of the largest UDP payload.
var answers = sync.Pool{New: func() any { b := make([]byte, 1<<16); return &b }}

// serveDNS passes UDP queries on to the host's resolvers. It reads nothing
// behind a query's header: names are for the resolver to parse. Queries beyond
// maxDNS are dropped, as a full socket would; clients ask again.
func (s *Slot) serveDNS(ctx context.Context, sock *net.UDPConn) {
	free := make(chan struct{}, maxDNS)
	buf := make([]byte, maxQuery)
	for {
		size, from, err := sock.ReadFromUDPAddrPort(buf)
		if err != nil {
			if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
				return
			}
			pause(ctx, 10*time.Millisecond) // no memory, say; never a hot loop
			continue
		}
		if size < dnsHeader {
			continue
		}
		select {
		case free <- struct{}{}:
		default:
			continue
		}
		query := append([]byte(nil), buf[:size]...)
		s.served.Go(func() {
			defer func() { <-free }()
			s.net.answer(ctx, query, func(reply []byte) { _, _ = sock.WriteToUDPAddrPort(reply, from) })
		})
	}
}

// answer asks the resolvers one after the other, each with an equal part of
// the time, and sends the first answer, or SERVFAIL.
func (n *Network) answer(ctx context.Context, query []byte, send func([]byte)) {
	buf := answers.Get().(*[]byte)
	defer answers.Put(buf)
	servers := n.resolvers.list()
	for _, server := range servers {
		size, err := ask(ctx, server, query, *buf, dnsTimeout/time.Duration(len(servers)))
		if err == nil {
			send((*buf)[:size])
			return
		}
		if ctx.Err() != nil {
			return
		}
	}
	send(servFail(query))
}

// ask sends query from a fresh port and waits for the answer with its id.
func ask(ctx context.Context, server netip.AddrPort, query, buf []byte, timeout time.Duration) (int, error) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(server))
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	_ = conn.SetDeadline(time.Now().Add(timeout))
	if _, err := conn.Write(query); err != nil {
		return 0, err
	}
	for {
		size, err := conn.Read(buf)
		if err != nil {
			return 0, err
		}
		if size >= dnsHeader && buf[0] == query[0] && buf[1] == query[1] {
			return size, nil
		}
	}
}

// servFail answers with the query's id, opcode and RD bit, QR and RA set, code
// 2 and no sections (RFC 1035 4.1.1).
func servFail(query []byte) []byte {
	reply := make([]byte, dnsHeader)
	copy(reply, query[:2])
	flags := binary.BigEndian.Uint16(query[2:])
	binary.BigEndian.PutUint16(reply[2:], flags&0x7900|0x8082)
	return reply
}

// relayDNS carries a TCP connection to the first resolver that accepts it.
func (n *Network) relayDNS(ctx context.Context, conn *net.TCPConn) {
	for _, server := range n.resolvers.list() {
		d := net.Dialer{Timeout: dnsTimeout / 2}
		up, err := d.DialContext(ctx, "tcp", server.String())
		if err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(ctx, 4*dnsTimeout) // RFC 7766 6.2.3 lets servers end idle ones
		defer cancel()
		_ = proxylink.Relay(ctx, conn, up.(*net.TCPConn), nil, nil)
		return
	}
	abort(conn)
}
