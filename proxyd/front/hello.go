package front

import (
	"errors"
	"io"
	"sync"

	"github.com/berth-dev/berth/proxyd/recent"
	"github.com/berth-dev/berth/shared/proxylink"
	"github.com/berth-dev/berth/shared/trust"
)

// maxHellos bounds the Hellos that are remembered; one takes about 600 bytes.
const maxHellos = 8192

var errProof = errors.New("wrong proof of the cluster secret")

// hellos reads the Hellos of connections. All of a session from one host are
// alike, so each is parsed and its proof is checked once. Safe for concurrent use.
type hellos struct {
	secret *trust.Secret

	mu    sync.Mutex
	known *recent.Map[string, proxylink.Hello] // by their JSON; those with a good proof alone
}

func newHellos(secret *trust.Secret) *hellos {
	return &hellos{secret: secret, known: recent.New[string, proxylink.Hello](maxHellos)}
}

// find gives the Hello of a body that was checked before.
func (h *hellos) find(body []byte) (hello proxylink.Hello, known bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.known.Get(string(body))
}

// read reads a Hello and checks its proof.
func (h *hellos) read(r io.Reader) (hello proxylink.Hello, pass []byte, err error) {
	body, pass, err := proxylink.ReadFrame(r)
	if err != nil {
		return hello, nil, err
	}
	if hello, known := h.find(body); known {
		return hello, pass, nil
	}
	if hello, err = proxylink.ParseHello(body); err != nil {
		return hello, nil, err
	}
	if !h.secret.Check(hello.Proof) {
		return hello, nil, errProof
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.known.Put(string(body), hello)
	return hello, pass, nil
}
