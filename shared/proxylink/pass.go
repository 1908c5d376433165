package proxylink

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/berth-dev/berth/shared/egress"
	"github.com/berth-dev/berth/shared/trust"
)

// Pass is a session's credential at proxyd: who it is, and where its
// connections go. The gateway seals it for proxyd; hostd attaches it, cannot
// read it and never lets it into the machine.
type Pass struct {
	SessionID string    `json:"sessionId"`
	ProjectID string    `json:"projectId"`
	Epoch     uint64    `json:"epoch"`
	Version   uint64    `json:"version"` // the session's SettingsVersion: of two passes of an epoch the higher holds
	Expires   time.Time `json:"expires"`
	Routes    []Route   `json:"routes,omitempty"` // in order; none: all goes straight out
}

// Route is a rule with all that it takes to follow it.
type Route struct {
	egress.Rule
	Password string `json:"password,omitempty"` // of a custom proxy, in the clear
	StickyID string `json:"stickyId,omitempty"` // names the address to keep; empty where the address is to rotate
}

// PassLife is how long a pass is good. It is renewed at half of it, so that a
// cluster without a gateway for some hours still lets sessions out.
const PassLife = 6 * time.Hour

// Why a pass is refused. Both mean token_invalid.
var (
	ErrPassInvalid = errors.New("pass: not one for this session")
	ErrPassExpired = errors.New("pass: expired")
)

// Keys of passes and passwords, derived from the cluster's secret.
const (
	passKey     = "egress pass"
	passwordKey = "egress password"
)

const sealVersion = 1 // first byte of what is sealed

// SealPass seals a pass (AES-256-GCM over the session's id). Each sealing gives
// other bytes.
func SealPass(secret *trust.Secret, p Pass) ([]byte, error) {
	body, err := json.Marshal(p)
	if err != nil {
		return nil, fmt.Errorf("seal pass: %w", err)
	}
	sealed, err := seal(secret.Key(passKey), body, "pass\x00"+p.SessionID)
	if err == nil && len(sealed) > maxPass {
		err = fmt.Errorf("seal pass: %d bytes, at most %d", len(sealed), maxPass)
	}
	return sealed, err
}

// OpenPass opens a session's pass and checks that it is good at now.
func OpenPass(secret *trust.Secret, now time.Time, sessionID string, sealed []byte) (Pass, error) {
	var p Pass
	body, err := open(secret.Key(passKey), sealed, "pass\x00"+sessionID)
	if err != nil || json.Unmarshal(body, &p) != nil || p.SessionID != sessionID {
		return Pass{}, ErrPassInvalid
	}
	if !now.Before(p.Expires) {
		return Pass{}, ErrPassExpired
	}
	return p, nil
}

// SealPassword seals the password of a custom proxy for the record.
func SealPassword(secret *trust.Secret, sessionID, password string) ([]byte, error) {
	return seal(secret.Key(passwordKey), []byte(password), "password\x00"+sessionID)
}

// OpenPassword reads a password that SealPassword sealed for this session.
func OpenPassword(secret *trust.Secret, sessionID string, sealed []byte) (string, error) {
	b, err := open(secret.Key(passwordKey), sealed, "password\x00"+sessionID)
	if err != nil {
		return "", fmt.Errorf("open a proxy's password: %w", err)
	}
	return string(b), nil
}

// seal gives version | nonce | ciphertext and tag.
func seal(key, body []byte, context string) ([]byte, error) {
	aead, err := newAEAD(key)
	if err != nil {
		return nil, fmt.Errorf("seal: %w", err)
	}
	out := make([]byte, 1+aead.NonceSize(), 1+aead.NonceSize()+len(body)+aead.Overhead())
	out[0] = sealVersion
	nonce := out[1:]
	_, _ = rand.Read(nonce) // never fails since Go 1.24
	return aead.Seal(out, nonce, body, []byte(context)), nil
}

var errSealed = errors.New("not sealed for this")

func open(key, sealed []byte, context string) ([]byte, error) {
	aead, err := newAEAD(key)
	if err != nil {
		return nil, fmt.Errorf("open: %w", err)
	}
	if len(sealed) < 1+aead.NonceSize()+aead.Overhead() || sealed[0] != sealVersion {
		return nil, errSealed
	}
	nonce := sealed[1 : 1+aead.NonceSize()]
	body, err := aead.Open(nil, nonce, sealed[1+aead.NonceSize():], []byte(context))
	if err != nil {
		return nil, errSealed
	}
	return body, nil
}

func newAEAD(key []byte) (cipher.AEAD, error) {
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}
