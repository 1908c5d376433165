package token

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/base32"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"hash/crc32"
	"strings"
)

// KeyPrefix starts every API key, so that people and secret scanners know one.
const KeyPrefix = "berth_"

// ErrNotAPIKey says that a text cannot be an API key, whatever the record holds.
var ErrNotAPIKey = errors.New("token: not an API key")

const secretSize = 32

// Lower case without padding: a key is one word to a double click.
var keyEncoding = base32.NewEncoding("abcdefghijklmnopqrstuvwxyz234567").WithPadding(base32.NoPadding)

// APIKey is the secret of a new API key. Only its Hash is stored.
type APIKey struct{ secret [secretSize]byte }

// NewAPIKey makes a random one.
func NewAPIKey() APIKey {
	var k APIKey
	_, _ = rand.Read(k.secret[:]) // never fails since Go 1.24
	return k
}

// Hash is the SHA-256 of the secret in hex. A secret of 256 random bits needs no
// slow hash: there is nothing to guess.
func (k APIKey) Hash() string { return hashSecret(k.secret[:]) }

// Plaintext is what the customer gets, once. minIndex is the record's index
// at which the key exists, known after its commit; every plaintext of one key
// opens the same, whatever its index.
//
//	"berth_" base32( secret | uvarint minIndex | crc32 of both )
//
// The checksum lets a mistyped key be refused without asking the record.
func (k APIKey) Plaintext(minIndex uint64) string {
	b := append(make([]byte, 0, 48), k.secret[:]...)
	b = binary.AppendUvarint(b, minIndex)
	b = binary.BigEndian.AppendUint32(b, crc32.ChecksumIEEE(b))
	return KeyPrefix + keyEncoding.EncodeToString(b)
}

// HashAPIKey reads what a client presents: the hash to look up and the index
// the record must have reached before a miss counts. Nothing is proven yet.
func HashAPIKey(plaintext string) (hash string, minIndex uint64, err error) {
	text, ok := strings.CutPrefix(plaintext, KeyPrefix)
	if !ok || len(text) > 80 {
		return "", 0, ErrNotAPIKey
	}
	b, err := keyEncoding.DecodeString(text)
	if err != nil || len(b) < secretSize+1+4 {
		return "", 0, ErrNotAPIKey
	}
	body, sum := b[:len(b)-4], binary.BigEndian.Uint32(b[len(b)-4:])
	minIndex, n := binary.Uvarint(body[secretSize:])
	if n != len(body)-secretSize || crc32.ChecksumIEEE(body) != sum {
		return "", 0, ErrNotAPIKey
	}
	return hashSecret(body[:secretSize]), minIndex, nil
}

func hashSecret(secret []byte) string {
	sum := sha256.Sum256(secret)
	return hex.EncodeToString(sum[:])
}
