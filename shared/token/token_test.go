package token

import (
	"bytes"
	"encoding/hex"
	"errors"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var (
	key = bytes.Repeat([]byte{1}, 32)
	now = time.Date(2026, 9, 1, 12, 0, 0, 0, time.UTC)
)

const id = "5f0c3f5e-1f62-4a5e-9c38-000000000001"

func TestSignAndVerify(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		c := Claims{
			SessionID:  rapid.String().Draw(rt, "id"),
			Purpose:    rapid.SampledFrom([]Purpose{Connect, Live, Terminal}).Draw(rt, "purpose"),
			KeyVersion: rapid.Uint32().Draw(rt, "version"),
			MinIndex:   rapid.Uint64().Draw(rt, "index"),
		}
		if rapid.Bool().Draw(rt, "expires") {
			c.Expires = now.Add(time.Duration(rapid.IntRange(1, 1e6).Draw(rt, "s")) * time.Second)
		}
		tok := Sign(key, c)
		got, err := Verify(key, now, c.SessionID, c.Purpose, tok)
		if err != nil || got != c {
			rt.Fatalf("%+v came back as %+v: %v", c, got, err)
		}
		// Any other byte anywhere is refused.
		i := rapid.IntRange(0, len(tok)-1).Draw(rt, "at")
		bad := []byte(tok)
		bad[i] = rapid.ByteRange('!', '~').Filter(func(b byte) bool { return b != tok[i] }).Draw(rt, "byte")
		if _, err := Verify(key, now, c.SessionID, c.Purpose, string(bad)); !errors.Is(err, ErrInvalid) {
			rt.Fatalf("%q for %q: %v", bad, tok, err)
		}
	})
}

func TestVerifyRefuses(t *testing.T) {
	hour := Sign(key, Claims{SessionID: id, Purpose: Live, KeyVersion: 1, Expires: now.Add(time.Hour), MinIndex: 42})
	if len(hour) > maxLen-10 || strings.ContainsAny(hour, "+/=&?#%") {
		t.Errorf("%q does not fit into a URL as it is", hour)
	}
	for _, c := range []struct {
		name    string
		key     []byte
		now     time.Time
		id      string
		purpose Purpose
		tok     string
		want    error
	}{
		{"good", key, now, id, Live, hour, nil},
		{"in its last second", key, now.Add(time.Hour - 1), id, Live, hour, nil},
		{"expired", key, now.Add(time.Hour), id, Live, hour, ErrExpired},
		{"another session", key, now, id[:35] + "2", Live, hour, ErrInvalid},
		{"another purpose", key, now, id, Connect, hour, ErrInvalid},
		{"another cluster", bytes.Repeat([]byte{2}, 32), now, id, Live, hour, ErrInvalid},
		{"empty", key, now, id, Live, "", ErrInvalid},
		{"padded", key, now, id, Live, hour + "=", ErrInvalid},
		{"longer", key, now, id, Live, hour + "AAAA", ErrInvalid},
		{"cut", key, now, id, Live, hour[:len(hour)-1], ErrInvalid},
		{"huge", key, now, id, Live, strings.Repeat("A", 1<<20), ErrInvalid},
	} {
		if _, err := Verify(c.key, c.now, c.id, c.purpose, c.tok); !errors.Is(err, c.want) {
			t.Errorf("%s: %v, want %v", c.name, err, c.want)
		}
	}
}

func TestExpiryNeverComesEarly(t *testing.T) {
	until := now.Add(1500 * time.Millisecond)
	tok := Sign(key, Claims{SessionID: id, Purpose: Live, Expires: until})
	if _, err := Verify(key, until.Add(-1), id, Live, tok); err != nil {
		t.Error(err)
	}
}

func FuzzVerify(f *testing.F) {
	f.Add(Sign(key, Claims{SessionID: id, Purpose: Connect, KeyVersion: 3, MinIndex: 1 << 40}))
	f.Add(Sign(key, Claims{SessionID: id, Purpose: Connect, Expires: now.Add(time.Hour)}))
	f.Add("")
	f.Fuzz(func(t *testing.T, tok string) {
		c, err := Verify(key, now, id, Connect, tok)
		if err == nil && Sign(key, c) != tok {
			t.Errorf("%q is a second spelling of %+v", tok, c)
		}
	})
}

// FuzzParse feeds the part behind the signature, which a fuzzer cannot pass.
func FuzzParse(f *testing.F) {
	f.Add([]byte{format, byte(Connect), 1, 0, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		if len(b) >= 2 {
			_, _ = parse(b)
		}
	})
}

func TestAPIKey(t *testing.T) {
	k := NewAPIKey()
	if raw, err := hex.DecodeString(k.Hash()); err != nil || len(raw) != 32 {
		t.Fatalf("hash %q", k.Hash())
	}
	for _, index := range []uint64{0, 1, 300, 1 << 40, 1<<64 - 1} {
		text := k.Plaintext(index)
		hash, min, err := HashAPIKey(text)
		if err != nil || hash != k.Hash() || min != index || !strings.HasPrefix(text, "berth_") {
			t.Errorf("%s: %s %d %v", text, hash, min, err)
		}
		if strings.Contains(text, k.Hash()[:16]) {
			t.Error("the hash stands in the key")
		}
	}
	if NewAPIKey().Hash() == k.Hash() {
		t.Error("two keys are one")
	}
}

func TestAMistypedAPIKeyIsSeen(t *testing.T) {
	text := NewAPIKey().Plaintext(77)
	for i := len(KeyPrefix); i < len(text); i++ {
		for _, b := range []byte("a7-A=") {
			if bad := text[:i] + string(b) + text[i+1:]; bad != text {
				if hash, _, err := HashAPIKey(bad); err == nil && hash != hashOf(text) {
					t.Errorf("%s passed for %s", bad, text)
				}
			}
		}
	}
	for _, bad := range []string{"", "berth_", "berth_aaaa", text[1:], text[:len(text)-2], text + "aa", "berth_" + strings.Repeat("a", 1<<20)} {
		if _, _, err := HashAPIKey(bad); !errors.Is(err, ErrNotAPIKey) {
			t.Errorf("%.80q: %v", bad, err)
		}
	}
}

func hashOf(text string) string {
	hash, _, _ := HashAPIKey(text)
	return hash
}

func FuzzHashAPIKey(f *testing.F) {
	f.Add(NewAPIKey().Plaintext(0))
	f.Add(NewAPIKey().Plaintext(1 << 63))
	f.Add("berth_")
	f.Fuzz(func(t *testing.T, text string) {
		if hash, _, err := HashAPIKey(text); err == nil && len(hash) != 64 {
			t.Errorf("%q: %q", text, hash)
		}
	})
}
