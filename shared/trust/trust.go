// Package trust holds what lets daemons of one cluster recognise each other.
// Today that is one secret in a file, enough for loopback; certificates and
// join tokens take its place when daemons listen beyond it.
package trust

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
)

// Header carries the cluster secret's proof on HTTP between daemons.
const Header = "X-Berth-Cluster"

// Secret is the cluster's shared secret.
type Secret struct{ key []byte }

// New makes a random secret (tests; LoadOrCreate elsewhere).
func New() *Secret {
	k := make([]byte, 32)
	_, _ = rand.Read(k) // never fails since Go 1.24
	return &Secret{k}
}

const maxSecret = 4096 // bytes of the file

// LoadOrCreate reads the secret from path (hex, mode 0600) or makes it. Daemons
// that start at once agree: the first link to appear wins.
func LoadOrCreate(path string) (*Secret, error) {
	if s, err := load(path); !errors.Is(err, fs.ErrNotExist) {
		return s, err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, err
	}
	tmp, err := os.CreateTemp(filepath.Dir(path), ".secret-*")
	if err != nil {
		return nil, err
	}
	defer os.Remove(tmp.Name())
	_, err = tmp.WriteString(hex.EncodeToString(New().key) + "\n")
	if err := errors.Join(err, tmp.Sync(), tmp.Close()); err != nil {
		return nil, err
	}
	if err := os.Link(tmp.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, err
	}
	return load(path)
}

func load(path string) (*Secret, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Mode().Perm()&0o007 != 0 {
		return nil, fmt.Errorf("%s: any user of this computer may read or change the cluster's secret: chmod 600 it, and replace it if others could have read it", path)
	}
	b, err := io.ReadAll(io.LimitReader(f, maxSecret))
	if err != nil {
		return nil, err
	}
	k, err := hex.DecodeString(strings.TrimSpace(string(b)))
	if err != nil || len(k) < 16 {
		return nil, fmt.Errorf("%s: not a cluster secret: want at least 32 hex digits", path)
	}
	return &Secret{k}, nil
}

// Key derives a 32-byte key for one purpose ("gossip", "hostlink", ...).
func (s *Secret) Key(purpose string) []byte {
	m := hmac.New(sha256.New, s.key)
	m.Write([]byte("berth " + purpose))
	return m.Sum(nil)
}

// Proof is the value of Header.
func (s *Secret) Proof() string { return hex.EncodeToString(s.Key("proof")) }

// Check compares a Header value in constant time.
func (s *Secret) Check(proof string) bool {
	return subtle.ConstantTimeCompare([]byte(proof), []byte(s.Proof())) == 1
}

// LoopbackOnly refuses an address to listen on that is not loopback: daemons
// speak plainly to each other until they have certificates.
func LoopbackOnly(flag, addr string) error {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return fmt.Errorf("%s: %q is not host:port: %w", flag, addr, err)
	}
	if ip := net.ParseIP(host); ip != nil && ip.IsLoopback() || host == "localhost" {
		return nil
	}
	return fmt.Errorf("%s: %q is beyond loopback, and this version has no certificates between daemons yet: use 127.0.0.1", flag, addr)
}
