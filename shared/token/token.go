// Package token makes and checks what stands in for an API key: the signed
// tokens of a session's URLs, and the API keys themselves. Both carry the
// index of the replicated record at which they became valid, so that a gateway
// that lags behind waits for it and never answers 401 from a stale read.
package token

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"time"
)

// Purpose is what a token opens. It is part of what is signed.
type Purpose byte

// The purposes.
const (
	Connect  Purpose = 1 // the CDP WebSocket
	Live     Purpose = 2 // the live view
	Terminal Purpose = 3 // the terminal WebSocket
)

// Claims are what a token says.
type Claims struct {
	SessionID  string
	Purpose    Purpose
	KeyVersion uint32    // must equal the session's URLKeyVersion: the caller checks
	Expires    time.Time // zero: good until the session ends or its URLs are rotated
	MinIndex   uint64    // the record's index at which the session exists
}

// Why a token is refused. Both mean 401.
var (
	ErrInvalid = errors.New("token: not valid for this session and purpose")
	ErrExpired = errors.New("token: expired")
)

const (
	format  = 1  // first byte; another layout gets another number
	macSize = 16 // HMAC-SHA256 cut to 128 bits (RFC 2104 section 5)
	maxLen  = 80 // of the text; the longest honest token has 61
)

// Tokens are compact because they stand in URLs that people paste:
//
//	base64url( format | purpose | uvarint keyVersion | uvarint expiry | uvarint minIndex | mac )
//
// The session id stands in the URL beside it and is signed, not repeated.
var encoding = base64.RawURLEncoding.Strict() // one spelling per token

// Sign makes the token of claims with the cluster's 32-byte signing key.
func Sign(key []byte, c Claims) string {
	b := make([]byte, 0, 64)
	b = append(b, format, byte(c.Purpose))
	b = binary.AppendUvarint(b, uint64(c.KeyVersion))
	b = binary.AppendUvarint(b, expirySeconds(c.Expires))
	b = binary.AppendUvarint(b, c.MinIndex)
	return encoding.EncodeToString(append(b, mac(key, c.SessionID, b)...))
}

// Verify checks a token for one session and purpose at a moment. The compare
// is in constant time, and nothing of an unsigned token is believed.
func Verify(key []byte, now time.Time, sessionID string, purpose Purpose, tok string) (Claims, error) {
	if len(tok) > maxLen {
		return Claims{}, ErrInvalid
	}
	raw, err := encoding.DecodeString(tok)
	if err != nil || len(raw) < 2+macSize {
		return Claims{}, ErrInvalid
	}
	body, sum := raw[:len(raw)-macSize], raw[len(raw)-macSize:]
	if subtle.ConstantTimeCompare(sum, mac(key, sessionID, body)) != 1 {
		return Claims{}, ErrInvalid
	}
	c, ok := parse(body)
	if !ok || c.Purpose != purpose {
		return Claims{}, ErrInvalid
	}
	if !c.Expires.IsZero() && !now.Before(c.Expires) {
		return Claims{}, ErrExpired
	}
	c.SessionID = sessionID
	return c, nil
}

func parse(b []byte) (Claims, bool) {
	if b[0] != format {
		return Claims{}, false
	}
	var fields [3]uint64
	rest := b[2:]
	for i := range fields {
		v, n := binary.Uvarint(rest)
		if n <= 0 {
			return Claims{}, false
		}
		fields[i], rest = v, rest[n:]
	}
	if len(rest) != 0 || fields[0] > 1<<32-1 || fields[1] > 1<<40 {
		return Claims{}, false
	}
	c := Claims{Purpose: Purpose(b[1]), KeyVersion: uint32(fields[0]), MinIndex: fields[2]}
	if fields[1] != 0 {
		c.Expires = time.Unix(int64(fields[1]), 0).UTC()
	}
	return c, true
}

// mac binds body to the session. The prefix keeps these sums apart from any
// other use of the key, the length byte keeps body and id apart.
func mac(key []byte, sessionID string, body []byte) []byte {
	m := hmac.New(sha256.New, key)
	m.Write([]byte("berth url token\x00"))
	m.Write([]byte{byte(len(body))})
	m.Write(body)
	m.Write([]byte(sessionID))
	return m.Sum(nil)[:macSize]
}

// expirySeconds rounds up, so that a token never dies before its time.
func expirySeconds(t time.Time) uint64 {
	if t.IsZero() {
		return 0
	}
	s := t.Unix()
	if t.Nanosecond() > 0 {
		s++
	}
	return uint64(max(s, 1))
}
