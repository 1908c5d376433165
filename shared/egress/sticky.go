package egress

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
)

// stickyBytes of the HMAC make an id of twice as many hex characters: what
// providers take in a user name.
const stickyBytes = 8

// StickyID names the address that rule i of a session keeps at its provider:
// 16 hex digits, or nothing for a rule that is not sticky or uses no proxy.
// seed is the session's, random; turn rises when new addresses are asked for.
// The id hangs on what the rule says of the way out, not on its place in the list, so
// that a changed setting keeps the addresses of rules that it did not change;
// rules that say the same are told apart by their order.
func StickyID(seed []byte, turn uint32, rules []Rule, i int) string {
	r := rules[i]
	if r.IP != Sticky || !r.Type.Proxied() {
		return ""
	}
	var same uint32
	for _, earlier := range rules[:i] {
		if wayOut(earlier) == wayOut(r) {
			same++
		}
	}
	mac := hmac.New(sha256.New, seed)
	var n [8]byte
	binary.BigEndian.PutUint32(n[:4], turn)
	binary.BigEndian.PutUint32(n[4:], same)
	_, _ = mac.Write(n[:])
	for _, text := range wayOut(r) {
		_, _ = mac.Write(binary.BigEndian.AppendUint32(nil, uint32(len(text)))) // so that no two rules run together
		_, _ = mac.Write([]byte(text))
	}
	return hex.EncodeToString(mac.Sum(nil)[:stickyBytes])
}

func wayOut(r Rule) [7]string {
	return [7]string{string(r.Type), r.Country, r.State, r.City, r.Server, r.Username, r.DomainPattern}
}
