package testenv

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"time"
)

// Authority certifies servers. Nobody knows it who is not told.
type Authority struct {
	Cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// NewAuthority makes an authority that certifies itself.
func NewAuthority() *Authority {
	der, key := (&Authority{}).sign(&x509.Certificate{Subject: pkix.Name{CommonName: "test authority"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign})
	cert, err := x509.ParseCertificate(der)
	must(err)
	return &Authority{cert, key}
}

// PEM is the authority's certificate.
func (a *Authority) PEM() []byte { return pemOf("CERTIFICATE", a.Cert.Raw) }

// Server gives certificate and key of a server at an address.
func (a *Authority) Server(addr string) (cert, key []byte) {
	der, private := a.sign(&x509.Certificate{Subject: pkix.Name{CommonName: addr}, IPAddresses: []net.IP{net.ParseIP(addr)},
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}})
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	must(err)
	return pemOf("CERTIFICATE", der), pemOf("PRIVATE KEY", secret)
}

// sign makes a certificate with a key of its own, good for a day.
func (a *Authority) sign(t *x509.Certificate) (der []byte, key *ecdsa.PrivateKey) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	now := time.Now()
	t.SerialNumber, t.NotBefore, t.NotAfter = big.NewInt(now.UnixNano()), now.Add(-time.Hour), now.Add(24*time.Hour)
	parent, by := a.Cert, a.key
	if parent == nil {
		parent, by = t, key
	}
	der, bad := x509.CreateCertificate(rand.Reader, t, parent, &key.PublicKey, by)
	must(errors.Join(err, bad))
	return der, key
}

func pemOf(kind string, der []byte) []byte {
	return pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der})
}

// must is for what cannot fail.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
