// Package proxylink is the contract between hostd and proxyd: one TCP
// connection for each connection that a machine opens to its egress listener,
// which begins with a Hello and then carries the client's own bytes.
//
//	"BPX1" | length uint16 big endian | Hello as JSON
//
// There is no answer: what follows is the HTTP proxy request or the SOCKS5
// greeting of the client, and its answer. A Hello that proxyd does not accept
// closes the connection.
package proxylink

// Hello says for whom a connection is. Proof is trust.Secret.Proof.
type Hello struct {
	Proof     string `json:"proof"`
	SessionID string `json:"sessionId"`
	Epoch     uint64 `json:"epoch"`
}
