package front

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"

	"github.com/things-go/go-socks5"
	"github.com/things-go/go-socks5/statute"

	"github.com/berth-dev/berth/shared/egress"
)

// newSocks leaves the handshake (RFC 1928) to the library; resolving, dialling
// and relaying are ours. The writer it gives to handlers is the *client.
func (s *Server) newSocks() *socks5.Server {
	unsupported := func(_ context.Context, w io.Writer, _ *socks5.Request) error {
		return socks5.SendReply(w, statute.RepCommandNotSupported, nil)
	}
	return socks5.NewServer(
		socks5.WithResolver(noResolver{}),
		socks5.WithConnectHandle(func(_ context.Context, w io.Writer, r *socks5.Request) error {
			s.socksConnect(w.(*client), r)
			return nil
		}),
		socks5.WithBindHandle(unsupported),
		socks5.WithAssociateHandle(unsupported),
	)
}

// noResolver keeps names unresolved: the guard resolves.
type noResolver struct{}

func (noResolver) Resolve(ctx context.Context, _ string) (context.Context, net.IP, error) {
	return ctx, nil, nil
}

func (s *Server) socksConnect(c *client, r *socks5.Request) {
	w, refused := s.reach(c, "SOCKS5", r.RawDestAddr.String(), func() (egress.Target, *egress.Refusal) { return socksTarget(r) })
	if refused != nil {
		_ = socks5.SendReply(c, socksReply(refused), nil)
		c.lingerClose()
		return
	}
	// The address that the connection leaves from is not the session's business.
	err := socks5.SendReply(c, statute.RepSuccess, &net.TCPAddr{IP: net.IPv4zero})
	w.flow.Down(int64(len(w.early)))
	if err == nil && len(w.early) > 0 {
		_, err = c.Write(w.early)
	}
	if err != nil {
		w.conn.Close()
		return
	}
	s.relay(c, w, readAhead(r.Reader))
}

// socksTarget reads the request's address; a name that is a literal address
// counts as one.
func socksTarget(r *socks5.Request) (egress.Target, *egress.Refusal) {
	port := uint16(r.RawDestAddr.Port)
	if r.RawDestAddr.AddrType == statute.ATYPDomain {
		if addr, err := netip.ParseAddr(r.RawDestAddr.FQDN); err == nil {
			return egress.AddrTarget(addr, port)
		}
		return egress.HostTarget(r.RawDestAddr.FQDN, port)
	}
	addr, _ := netip.AddrFromSlice(r.RawDestAddr.IP)
	return egress.AddrTarget(addr, port)
}

// readAhead takes what the library's buffer holds behind the request.
func readAhead(r io.Reader) []byte {
	b, ok := r.(interface {
		Buffered() int
		Peek(int) ([]byte, error)
	})
	if !ok {
		return nil
	}
	ahead, _ := b.Peek(b.Buffered())
	return append([]byte(nil), ahead...)
}

// socksReply is the reply code of a refusal (RFC 1928 6).
func socksReply(r *egress.Refusal) uint8 {
	switch r.Reason {
	case egress.BadTarget, egress.PortBlocked, egress.TargetRestricted, egress.ProxyNotPublic, egress.TokenInvalid:
		return statute.RepRuleFailure
	case egress.UpstreamTimeout:
		return statute.RepTTLExpired
	case egress.UpstreamUnreachable:
		if errors.Is(r, syscall.ECONNREFUSED) {
			return statute.RepConnectionRefused
		}
		return statute.RepHostUnreachable
	}
	return statute.RepServerFailure
}
